"""A packed table: the codes of N rows, the codec that reads them, what packing lost."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bifeat_pyg import _dispatch
from bifeat_pyg._errors import RowIndexError
from bifeat_pyg._fit import Errors, encode, learn
from bifeat_pyg._rows import RowSource
from bifeat_pyg.quantizers._base import Codec, Spec

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip


@dataclass(frozen=True)
class PackedTable:
    """Rows of features, packed.

    Attributes:
        codes: uint8 [N, stride]; the first `codec.row_bytes` of a row count.
        codec: reads them, and knows the shape of a row before packing.
        dtype: of the features before packing.
        errors: what packing lost, if known.
    """

    codes: Tensor
    codec: Codec
    dtype: torch.dtype
    errors: Errors | None = None

    @classmethod
    def build(cls, source: RowSource, spec: Spec, nan: str = "error") -> "PackedTable":
        """Returns the table of a source, read twice: to fit, and to encode."""
        codec = learn(source, spec, nan)
        codes, errors = encode(source, codec, nan)
        return cls(codes, codec, source.dtype, errors)

    @property
    def rows(self) -> int:
        """Number of rows, N."""
        return int(self.codes.shape[0])

    @property
    def packed_bytes(self) -> int:
        """Bytes of codes and parameters."""
        return self.rows * self.codec.row_bytes + self.codec.param_bytes

    @property
    def source_bytes(self) -> int:
        """Bytes of the features before packing."""
        size = torch.empty((), dtype=self.dtype).element_size()
        return self.rows * self.codec.columns * size

    def gather(self, index: Any = None) -> Tensor:
        """Returns packed rows, uint8 [M, row_bytes]; a view for None (all) and for a slice."""
        index = row_index(index, self.rows)
        bytes_ = self.codec.row_bytes
        if isinstance(index, slice):
            return self.codes[index, :bytes_]
        # In a worker, write straight into shared memory: the batch then crosses without a copy.
        out = None
        if torch.utils.data.get_worker_info() is not None and index.numel() and bytes_:
            count = index.numel()
            shared = torch.UntypedStorage._new_shared(count * bytes_)  # type: ignore[no-untyped-call]
            out = torch.empty(0, dtype=torch.uint8).set_(shared, 0, (count, bytes_), (bytes_, 1))
        return _dispatch.gather(self.codes, bytes_, index, out)

    def fetch(
        self, index: Any = None, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        """Returns rows as floats, [M, *tail]: gathered and dequantized in one kernel."""
        index = row_index(index, self.rows)
        if isinstance(index, slice):
            return self.codec.decode(self.codes[index], dtype, out=out)
        return self.codec.decode(self.codes, dtype, index, out=out)


def _check_slice(index: slice) -> None:
    for name in ("start", "stop", "step"):
        value = getattr(index, name)
        if value is not None and not isinstance(value, (int, np.integer)):
            raise RowIndexError(f"the {name} of the slice is {value!r}; use whole numbers")
    if index.step is not None and index.step < 1:
        raise RowIndexError(f"the step of the slice is {index.step}; it must be above 0")


def row_index(index: Any, rows: int) -> Tensor | slice:
    """Returns an index of any allowed kind as int64 row numbers or a slice.

    Args:
        index: None (all), int, slice, bool mask [rows], integers as tensor, array or list.
        rows: number of rows of the table.

    Raises:
        RowIndexError: another kind, or a mask of another length. Bounds of integers are checked
            where rows are read, those of an int here.
    """
    if index is None:
        return slice(None)
    if isinstance(index, slice):
        _check_slice(index)
        return index
    if isinstance(index, np.ma.MaskedArray) and np.ma.is_masked(index):
        raise RowIndexError("index is a masked array; pass index.compressed() to leave these out")
    if isinstance(index, (int, np.integer)) and not isinstance(index, (bool, np.bool_)):
        return torch.tensor([int(index)])
    if isinstance(index, (list, tuple, range)):
        try:
            index = np.asarray(index, dtype=np.int64 if len(index) == 0 else None)
        except ValueError as error:
            raise RowIndexError(f"index is no row of integers: {error}") from None
    if isinstance(index, np.ndarray):
        if index.dtype.kind not in "biu":
            raise RowIndexError(f"index is an array of {index.dtype}; use integers or bool")
        index = torch.from_numpy(index.astype(np.int64 if index.dtype.kind != "b" else bool))
    if not isinstance(index, Tensor) or index.dim() > 1:
        kind = list(index.shape) if isinstance(index, Tensor) else type(index).__name__
        raise RowIndexError(
            f"index is {kind}; use None, an int, a slice, a bool mask, or one row of integers"
        )
    if index.dtype == torch.bool:
        if index.numel() != rows:
            raise RowIndexError(f"a mask of {index.numel()} values does not fit {rows} rows")
        return index.nonzero().flatten()
    if index.is_floating_point() or index.is_complex():
        raise RowIndexError(f"index is {index.dtype}; use integers or bool")
    return index.reshape(-1)
