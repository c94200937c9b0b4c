"""Features as rows: what kinds are accepted, and one way to read them in blocks."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bifeat_pyg._errors import FeatureError

# Values held at a time while features are read: 16 MiB as float32.
_BLOCK_VALUES = 1 << 22

_INTEGRAL = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class RowSource(Protocol):
    """Rows that can be read block by block.

    Attributes:
        name: for messages.
        rows: number of rows, N.
        tail: shape of one row; () for a vector of N scalars.
        dtype: as stored.
    """

    name: str
    rows: int
    tail: tuple[int, ...]
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Returns rows start to stop, [stop - start, columns], of `dtype`."""


class TensorSource:
    """Rows of a tensor or array in memory (or mapped into it)."""

    def __init__(self, features: Any, name: str = "x") -> None:
        self._features: Tensor = accepted(features, name)
        self.name = name
        self.rows = int(self._features.shape[0])
        self.tail = tuple(int(size) for size in self._features.shape[1:])
        self.dtype = self._features.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """See `RowSource`."""
        return self._features[start:stop].reshape(stop - start, columns_of(self.tail))


def columns_of(tail: tuple[int, ...]) -> int:
    """Returns how many columns rows of this shape have; a scalar is one."""
    return int(np.prod(tail, dtype=np.int64)) if tail else 1


def is_integral(dtype: torch.dtype) -> bool:
    """Returns whether values of this dtype must come back exactly."""
    return dtype in _INTEGRAL


def blocks(source: RowSource, most: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yields (first row, rows) of bounded size, at most `most` rows at a time."""
    size = max(1, _BLOCK_VALUES // max(columns_of(source.tail), 1))
    size = size if most is None else min(size, most)
    for start in range(0, source.rows, size):
        yield start, source.read(start, min(start + size, source.rows))


def accepted(features: Any, name: str) -> Tensor:
    """Returns features as a strided CPU tensor without copying, or says why they cannot be used.

    Raises:
        FeatureError: sparse, quantized, complex, masked integers, without data, of objects, or not
            an array at all.
    """
    if isinstance(features, np.ma.MaskedArray):
        features = _unmasked(features, name)
    if isinstance(features, np.ndarray):
        if features.dtype.kind not in "biuf" or features.dtype.itemsize > 8:
            raise FeatureError(
                f"{name} is an array of {features.dtype}; use floats, integers or bool"
            )
        native = features.astype(features.dtype.newbyteorder("="), copy=False)
        if native.dtype in (np.uint16, np.uint32, np.uint64):
            native = native.astype(np.int64)
        features = _from_numpy(native)
    if not isinstance(features, Tensor):
        hint = ""
        if type(features).__name__ == "SparseTensor" or hasattr(features, "tocsr"):
            hint = "; features are stored dense: convert with .to_dense() or .toarray()"
        raise FeatureError(
            f"{name} is a {type(features).__name__}; it must be a torch tensor or numpy array{hint}"
        )
    if features.layout != torch.strided:
        raise FeatureError(
            f"{name} is sparse ({features.layout}); features are stored dense. Convert with "
            ".to_dense() (0/1 features then take 1 bit a value as bool)"
        )
    if features.is_meta:
        raise FeatureError(f"{name} is a meta tensor, which holds no values; load the features")
    if features.dim() == 0:
        raise FeatureError(f"{name} is a single number; features have one row for each node")
    if features.dtype not in _INTEGRAL + _FLOATING:
        raise FeatureError(f"{name} is {features.dtype}; use a float, integer or bool dtype")
    rows: Tensor = features.detach().cpu()
    return rows


def _unmasked(array: np.ma.MaskedArray, name: str) -> np.ndarray:
    """Returns the values, NaN where they are masked: what lies under a mask must not be stored."""
    if not np.ma.is_masked(array):
        return np.asarray(array.data)
    if array.dtype.kind != "f":
        raise FeatureError(
            f"{name} masks {int(np.count_nonzero(array.mask))} value(s), and {array.dtype} has no "
            "NaN to mark them; fill them with .filled(...)"
        )
    return np.asarray(array.filled(np.nan))


def _from_numpy(array: np.ndarray) -> Tensor:
    if any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch has no negative strides
    if array.flags.writeable:
        return torch.from_numpy(array)
    # torch warns of read-only memory because it could be written through the tensor; it is not
    # here.
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The given NumPy array is not writ", category=UserWarning
        )
        return torch.from_numpy(array)
