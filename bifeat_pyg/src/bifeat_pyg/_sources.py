"""Row sources on disk, read block by block with plain reads: a mapping would grow with the file."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bifeat_pyg._errors import FeatureError
from bifeat_pyg._rows import RowSource, TensorSource, accepted, columns_of

_KINDS = ".npy, .safetensors, .pt (a tensor), .parquet, .arrow or .feather"


def open_source(source: Any, name: str = "x", key: str | None = None) -> RowSource:
    """Returns the rows of a file, array or tensor.

    Args:
        source: a path to one of the kinds below, a NumPy array (also mapped), a tensor, or a
            pyarrow Table.
        name: for messages.
        key: which tensor of a safetensors file; may be left out where there is one.

    Raises:
        FeatureError: the file is missing, of an unknown kind, or holds no dense numbers.
    """
    if isinstance(source, np.memmap) and source.flags["C_CONTIGUOUS"] and source.ndim:
        return _of_memmap(source, name)
    if type(source).__module__.startswith("pyarrow"):
        return _ArrowSource(source, name)
    if not isinstance(source, (str, Path)):
        return TensorSource(source, name)
    path = Path(source)
    if not path.is_file():
        raise FeatureError(f"{path} is not a file; pass {_KINDS}")
    ending = path.suffix.lower()
    if ending == ".npy":
        return _npy(path, name)
    if ending == ".safetensors":
        return _SafetensorsSource(path, name, key)
    if ending in (".pt", ".pth"):
        # weights_only: no code in the file is run; mmap: it is not read into memory.
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError, EOFError, OSError, UnpicklingError) as error:
            raise FeatureError(
                f"{path} is no tensor that torch.save wrote: {_line(error)}"
            ) from None
        return TensorSource(loaded, name)
    if ending in (".parquet", ".arrow", ".feather"):
        return _ArrowSource(path, name)
    raise FeatureError(f"{path} is of an unknown kind; pass {_KINDS}")


class RawSource:
    """Rows in C order in a file, from an offset on."""

    def __init__(
        self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, name: str
    ) -> None:
        probe = accepted(np.empty((0, *shape[1:]), dtype), name)
        self.name = name
        self.rows, self.tail, self.dtype = shape[0], tuple(shape[1:]), probe.dtype
        self._path, self._stored, self._offset = path, dtype, offset
        self._columns = columns_of(self.tail)
        need = offset + self.rows * self._columns * dtype.itemsize
        if path.stat().st_size < need:
            raise FeatureError(
                f"{path} has {path.stat().st_size} bytes, its header promises {need}: it was cut "
                f"off"
            )

    def read(self, start: int, stop: int) -> Tensor:
        """See `RowSource`."""
        count = (stop - start) * self._columns
        at = self._offset + start * self._columns * self._stored.itemsize
        rows = np.fromfile(self._path, self._stored, count, offset=at)
        return accepted(rows.reshape(stop - start, self._columns), self.name)


class _SafetensorsSource:
    """One tensor of a safetensors file."""

    def __init__(self, path: Path, name: str, key: str | None) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self._file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise FeatureError(f"{path} is no safetensors file: {_line(error)}") from None
        held = list(self._file.keys())  # type: ignore[no-untyped-call]
        if key is None and len(held) == 1:
            key = held[0]
        if key not in held:
            raise FeatureError(f"{path} holds {held}; say which by key=")
        self._slice: Any = self._file.get_slice(key)  # type: ignore[no-untyped-call]
        shape = self._slice.get_shape()
        probe = accepted(self._slice[0:0] if shape else torch.tensor(0.0), name)
        self.name, self.dtype = name, probe.dtype
        self.rows, self.tail = int(shape[0]), tuple(int(s) for s in shape[1:])

    def read(self, start: int, stop: int) -> Tensor:
        """See `RowSource`."""
        rows: Tensor = self._slice[start:stop]
        return rows.reshape(stop - start, columns_of(self.tail))


class _ArrowSource:
    """Numeric columns of a table, or one column of fixed-size lists."""

    def __init__(self, source: Any, name: str) -> None:
        try:
            import pyarrow as pa
            import pyarrow.dataset as ds
        except ImportError:
            raise FeatureError(f"reading {source} needs pyarrow: pip install pyarrow") from None
        if isinstance(source, Path):
            kind = "parquet" if source.suffix == ".parquet" else "feather"
            try:
                self._data = ds.dataset(source, format=kind)
            except (pa.ArrowException, OSError) as error:
                raise FeatureError(f"{source} is no {kind} file: {_line(error)}") from None
        else:
            self._data = ds.dataset(source)
        self._lists = False
        kinds = [field.type for field in self._data.schema]
        if len(kinds) == 1 and pa.types.is_fixed_size_list(kinds[0]):
            self._lists = True
            self.tail: tuple[int, ...] = (kinds[0].list_size,)
            kinds = [kinds[0].value_type]
        else:
            self.tail = (len(kinds),)
        numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
        if not all(any(test(kind) for test in numbers) for kind in kinds):
            raise FeatureError(f"{name}: every column must be a number or bool; got {kinds}")
        self.name = name
        self.rows = int(self._data.count_rows())
        arrays = [np.dtype(kind.to_pandas_dtype()) for kind in kinds]
        self._stored = np.result_type(*arrays) if arrays else np.dtype(np.float32)
        self.dtype = accepted(np.empty((0, 1), self._stored), name).dtype
        self._batches: Any = None
        self._held: list[np.ndarray] = []
        self._at = 0

    def read(self, start: int, stop: int) -> Tensor:
        """See `RowSource`; rows must be asked for in order, or from the start again."""
        if start != self._at or self._batches is None:
            self._batches, self._held, self._at = iter(self._data.to_batches()), [], 0
            while self._at < start:
                self._take(min(start - self._at, 1 << 16))
        return accepted(self._take(stop - start), self.name)

    def _take(self, count: int) -> np.ndarray:
        while sum(len(part) for part in self._held) < count:
            self._held.append(self._rows(next(self._batches)))
        rows = np.concatenate(self._held) if self._held else self._rows(None)
        self._held = [rows[count:]]
        self._at += count
        return rows[:count]

    def _rows(self, batch: Any) -> np.ndarray:
        if batch is None:
            return np.empty((0, *self.tail), self._stored)
        missing = any(column.null_count for column in batch.columns)
        if self._lists:
            if missing:
                raise FeatureError(f"{self.name} has rows without a list; fill or drop them")
            flat = batch.column(0).flatten().to_numpy(zero_copy_only=False)
            return np.asarray(flat, self._stored).reshape(-1, *self.tail)
        # A missing number becomes NaN, which is then reported with its place.
        columns = [c.cast("float64") if c.null_count else c for c in batch.columns]
        arrays = [c.to_numpy(zero_copy_only=False) for c in columns]
        return np.stack(arrays, axis=1).astype(np.float64 if missing else self._stored, copy=False)


def _line(error: Exception) -> str:
    """Returns the first line of a message that may go on for many."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _npy(path: Path, name: str) -> RowSource:
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            else:
                shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        except (ValueError, SyntaxError) as error:
            raise FeatureError(f"{path} is no .npy file: {error}") from None
        offset = file.tell()
    if dtype.hasobject or not shape:
        raise FeatureError(f"{path} holds {dtype} of shape {shape}; features are rows of numbers")
    if fortran and len(shape) > 1:
        raise FeatureError(f"{path} is in Fortran order; save np.ascontiguousarray(x) instead")
    return RawSource(path, dtype, shape, offset, name)


def _of_memmap(array: np.memmap, name: str) -> RowSource:
    # Read the file itself: pages touched through a mapping count as memory of this process.
    filename, base = array.filename, array
    while isinstance(base.base, np.memmap):
        base = base.base
    if filename is None or array.dtype.hasobject:
        return TensorSource(array, name)
    start = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    array.flush()
    return RawSource(Path(filename), array.dtype, array.shape, array.offset + start, name)
