"""What users hand over, as Arrow columns and as numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from sklearn.utils.validation import column_or_1d

from kingpin_ray._errors import InputError, MixedTypesError, UnsupportedColumnError
from kingpin_ray._keys import one_chunk

if TYPE_CHECKING:
    from numpy.typing import NDArray


def arrow_of(values: Any, what: str) -> pa.Array:
    """Returns one column of user data as an Arrow array, NaN of pandas as null.

    Args:
        values: a pandas Series or a one-dimensional array.
        what: how an error names it.

    Raises:
        MixedTypesError: it holds values of several types.
        UnsupportedColumnError: it holds complex numbers or another type that Arrow lacks.
    """
    kind = getattr(values, "dtype", None)
    if isinstance(kind, np.dtype) and kind.kind == "c":
        raise UnsupportedColumnError(
            f"{what}: Complex data not supported; give real numbers, for example the real and the "
            "imaginary part as two columns"
        )
    if isinstance(kind, np.dtype) and not kind.isnative:
        values = values.astype(kind.newbyteorder("="))
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise MixedTypesError(
            f"{what} holds values of several types ({error}); convert it to one type first"
        ) from error
    except pa.ArrowNotImplementedError as error:
        raise UnsupportedColumnError(
            f"{what} is of type {kind}, which is not supported ({error}); convert it to numbers, "
            "strings or dates"
        ) from error


def one_column(values: Any, name: str) -> pa.Array:
    """Returns y or groups as one Arrow column.

    Raises:
        InputError: it has another number of dimensions, or a type that cannot be used.
    """
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, np.ma.MaskedArray) and values.ndim in (1, 2):
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim == 1:
            return _masked(values)
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InputError(f"{name}: {error}; give one value for each row") from error
    if array.ndim == 2 and array.shape[1] == 1:
        array = column_or_1d(array, warn=True)
    elif array.ndim != 1:
        raise InputError(f"{name} has {array.ndim} dimensions; give one value for each row")
    series = hasattr(values, "iloc") and array.ndim == getattr(values, "ndim", 1) == 1
    return arrow_of(values if series else array, name)


def key_columns(groups: Any) -> list[pa.Array]:
    """Returns `groups` as one Arrow column for each part of the key."""
    if isinstance(groups, (pa.Table, pa.RecordBatch)):
        return list(groups.columns)
    if hasattr(groups, "columns"):
        return [arrow_of(groups[name], f"groups[{name!r}]") for name in groups.columns]
    if isinstance(groups, np.ma.MaskedArray) and groups.ndim == 2:
        return [_masked(groups[:, j]) for j in range(groups.shape[1])]
    array = groups if isinstance(groups, pa.Array) else np.asarray(groups)
    if isinstance(array, np.ndarray) and array.ndim == 2:
        return [arrow_of(array[:, j], "groups") for j in range(array.shape[1])]
    return [one_column(groups, "groups")]


def _masked(values: Any) -> pa.Array:
    """Returns a masked column with null for what is masked; NumPy would uncover it."""
    mask = np.ma.getmaskarray(values)
    return pa.array(np.ascontiguousarray(values.data), mask=mask, from_pandas=True)


def numeric_column(column: Any, name: Any) -> NDArray[np.generic]:
    """Returns a feature column as a number array, null as NaN.

    Raises:
        UnsupportedColumnError: the column is not numeric.
    """
    array = one_chunk(column)
    kind = array.type
    numeric = (
        pa.types.is_floating(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    )
    if pa.types.is_decimal(kind):
        array, numeric = array.cast(pa.float64()), True
    if not numeric:
        raise UnsupportedColumnError(
            f"features: column {name!r} is of type {kind}; models need numbers. Encode it (for "
            "example with pandas get_dummies) or leave it out through features=[...]"
        )
    if pa.types.is_null(kind):
        return np.full(len(array), np.nan, np.float32)
    if pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    if array.null_count and pa.types.is_integer(array.type):
        small = array.type.bit_width <= 16
        array = array.cast(pa.float32() if small else pa.float64(), safe=False)
    return np.asarray(array.to_numpy(zero_copy_only=False))
