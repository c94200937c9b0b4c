"""The target as numbers: values, class codes, and the truth of rows to score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kingpin_ray._errors import EmptyDataError, InputError, UnsupportedColumnError
from kingpin_ray._inputs import numeric_column
from kingpin_ray._keys import plain_column

if TYPE_CHECKING:
    from numpy.typing import NDArray


def target_values(column: Any, name: Any) -> NDArray[np.float64]:
    """Returns a regression target, NaN where it is missing or infinite; a view where it can be."""
    try:
        values = numeric_column(column, name).astype(np.float64, copy=False)
    except UnsupportedColumnError as error:
        raise UnsupportedColumnError(
            f"target={name!r}: a regression target must be numeric; for classes use Logistic or "
            "another classifier"
        ) from error
    finite = np.isfinite(values)
    return values if finite.all() else np.where(finite, values, np.nan)


def target_classes(column: Any, name: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Returns (N,) class codes, -1 where missing, and the sorted classes.

    Raises:
        UnsupportedColumnError: the target looks continuous.
    """
    array = plain_column(column, str(name))
    if pa.types.is_floating(array.type):
        values = array.to_numpy(zero_copy_only=False)
        known = values[~np.isnan(values)]
        if not np.isfinite(known).all():
            raise UnsupportedColumnError(
                f"target={name!r}: Input y contains infinity, which is no class; leave it out or "
                "make it NaN, which is dropped and counted"
            )
        if (known != np.round(known)).any():
            raise UnsupportedColumnError(
                f"Unknown label type: target={name!r} is continuous, not classes; use a regression "
                "model such as Linear, or make classes of it first"
            )
    coded = array.dictionary_encode()
    order = pc.sort_indices(coded.dictionary).to_numpy()
    classes = coded.dictionary.take(pa.array(order)).to_numpy(zero_copy_only=False)
    rank = np.empty(len(order) + 1, np.int64)
    rank[order] = np.arange(len(order))
    rank[-1] = -1
    codes = pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False)
    return rank[codes], classes


def held_truth(
    column: Any, name: str, classes: NDArray[Any] | None, scoring: str
) -> tuple[NDArray[np.generic], NDArray[np.bool_]]:
    """Returns the true values or class codes of rows to score, and which rows have one.

    Args:
        column: Arrow array.
        name: how an error names it.
        classes: the classes of training; None for regression.
        scoring: accuracy alone can score a class that was not in training: as an error.

    Raises:
        InputError: no row has a target, or a class is new.
    """
    if classes is None:
        values = target_values(column, name)
        kept = ~np.isnan(values)
        codes: NDArray[np.generic] = values
    else:
        known = {label: code for code, label in enumerate(classes.tolist())}
        labels = plain_column(column, name).to_pylist()
        kept = np.array([label is not None for label in labels], bool)
        place = np.array([known.get(label, -1) for label in labels], np.int64)
        codes, new = place, kept & (place < 0)
        if new.any() and scoring != "accuracy":
            raise InputError(
                f"{name}: the class {labels[int(np.flatnonzero(new)[0])]!r} was not in training; "
                f"scoring={scoring!r} cannot score it, 'accuracy' counts it as wrong"
            )
    if not kept.any():
        raise EmptyDataError(
            f"{name} is missing in all {len(kept)} rows; there is nothing to score"
        )
    return codes, kept
