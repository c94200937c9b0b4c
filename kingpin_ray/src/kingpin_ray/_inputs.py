"""What users hand over as y and groups, as Arrow columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from sklearn.utils.validation import column_or_1d

from kingpin_ray._errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def one_column(values: Any, name: str) -> pa.Array:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, np.ma.MaskedArray) and values.ndim in (1, 2):
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim == 1:
            return _masked(values)
    try:
        array = np.asarray(values)
        if array.ndim == 2 and array.shape[1] == 1:
            array = column_or_1d(array, warn=True)
        elif array.ndim != 1:
            raise InputError(f"{name} has {array.ndim} dimensions; give one value for each row")
        series = hasattr(values, "iloc") and array.ndim == getattr(values, "ndim", 1) == 1
        return pa.array(values if series else array, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(f"{name} holds values of several types: {error}") from error


def key_columns(groups: Any) -> list[pa.Array]:
    if hasattr(groups, "columns"):
        return [pa.array(groups[name], from_pandas=True) for name in groups.columns]
    if isinstance(groups, np.ma.MaskedArray) and groups.ndim == 2:
        return [_masked(groups[:, j]) for j in range(groups.shape[1])]
    array = groups if isinstance(groups, pa.Array) else np.asarray(groups)
    if isinstance(array, np.ndarray) and array.ndim == 2:
        return [pa.array(array[:, j], from_pandas=True) for j in range(array.shape[1])]
    return [one_column(groups, "groups")]


def _masked(values: Any) -> pa.Array:
    """Returns a masked column with null for what is masked; NumPy would uncover it."""
    mask = np.ma.getmaskarray(values)
    return pa.array(np.ascontiguousarray(values.data), mask=mask, from_pandas=True)


def codes_of(column: pa.Array, classes: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the code of each label; -1 for a label that was not in training."""
    known = {label: code for code, label in enumerate(classes.tolist())}
    return np.array([known.get(label, -1) for label in column.to_pylist()], np.int64)
