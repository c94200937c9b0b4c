"""Scores of many groups at once, under scikit-learn's scoring names (higher is better).

Shape legend: N rows in group order, G groups, K classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kingpin_ray._errors import UnknownScoringError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    F64 = NDArray[np.float64]
    Scorer = Callable[[NDArray[np.generic], F64, NDArray[np.int64]], F64]


def _mean(values: F64, offsets: NDArray[np.int64]) -> F64:
    """Returns the mean of each group's values; NaN for a group without rows."""
    counts = np.diff(offsets)
    owner = np.repeat(np.arange(len(counts)), counts)
    total = np.bincount(owner, weights=values, minlength=len(counts))
    with np.errstate(invalid="ignore"):
        return total / counts


def _squared_error(y: NDArray[np.generic], guess: F64, offsets: NDArray[np.int64]) -> F64:
    return -_mean((y.astype(np.float64) - guess) ** 2, offsets)


def _root_squared_error(y: NDArray[np.generic], guess: F64, offsets: NDArray[np.int64]) -> F64:
    return -np.sqrt(-_squared_error(y, guess, offsets))


def _absolute_error(y: NDArray[np.generic], guess: F64, offsets: NDArray[np.int64]) -> F64:
    return -_mean(np.abs(y.astype(np.float64) - guess), offsets)


def _r2(y: NDArray[np.generic], guess: F64, offsets: NDArray[np.int64]) -> F64:
    truth = y.astype(np.float64)
    centre = np.repeat(_mean(truth, offsets), np.diff(offsets))
    return r2_of(-_squared_error(y, guess, offsets), _mean((truth - centre) ** 2, offsets))


def r2_of(residual: F64, total: F64) -> F64:
    """Returns 1 - residual / total with scikit-learn's rules for a constant target."""
    with np.errstate(divide="ignore", invalid="ignore"):
        score = 1.0 - residual / total
    # A constant target: perfect is 1, anything else 0.
    return np.where(total == 0, np.where(residual == 0, 1.0, 0.0), score)


SQUARED = ("r2", "neg_mean_squared_error", "neg_root_mean_squared_error")
"""Scores that follow from sums of squares, without a look at the rows."""


def squared_score(name: str, residual: F64, about: F64, rows: F64) -> F64:
    """Returns a score in SQUARED from sums of squares.

    Args:
        name: of the score.
        residual: sums of squared errors.
        about: sums of squares of the target about its mean, of a shape that broadcasts.
        rows: numbers of rows.
    """
    if name == "r2":
        return r2_of(residual, about)
    with np.errstate(divide="ignore", invalid="ignore"):
        mse = residual / rows
    return -mse if name == "neg_mean_squared_error" else -np.sqrt(mse)


def _accuracy(y: NDArray[np.generic], proba: F64, offsets: NDArray[np.int64]) -> F64:
    return _mean((proba.argmax(axis=1) == y).astype(np.float64), offsets)


def _log_loss(y: NDArray[np.generic], proba: F64, offsets: NDArray[np.int64]) -> F64:
    eps = np.finfo(np.float64).eps
    picked = proba[np.arange(len(y)), y.astype(np.int64)]
    return _mean(np.log(np.clip(picked, eps, 1.0)), offsets)


def _brier(y: NDArray[np.generic], proba: F64, offsets: NDArray[np.int64]) -> F64:
    if proba.shape[1] == 2:
        return -_mean((proba[:, 1] - (y == 1)) ** 2, offsets)
    hot = y.astype(np.int64)[:, None] == np.arange(proba.shape[1])
    return -_mean(((proba - hot) ** 2).sum(axis=1), offsets)


def _roc_auc(y: NDArray[np.generic], proba: F64, offsets: NDArray[np.int64]) -> F64:
    """Rank statistic of Mann and Whitney, ties counted half; NaN where a class is missing."""
    if proba.shape[1] != 2:
        raise UnknownScoringError(
            f"scoring='roc_auc' needs two classes, the target has {proba.shape[1]}; "
            "use 'neg_log_loss' or 'accuracy'"
        )
    counts = np.diff(offsets)
    owner = np.repeat(np.arange(len(counts)), counts)
    score = proba[:, 1]
    order = np.lexsort((score, owner))
    value, group = score[order], owner[order]
    new = np.ones(len(order), bool)
    new[1:] = (value[1:] != value[:-1]) | (group[1:] != group[:-1])
    tie = np.cumsum(new) - 1
    place = np.arange(len(order)) - offsets[group] + 1.0
    size = np.bincount(tie)
    rank = (np.bincount(tie, weights=place) / np.maximum(size, 1))[tie]
    positive = (y == 1)[order].astype(np.float64)
    n_pos = np.bincount(group, weights=positive, minlength=len(counts))
    n_neg = counts - n_pos
    total = np.bincount(group, weights=rank * positive, minlength=len(counts))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((total - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))


REGRESSION: dict[str, Scorer] = {
    "r2": _r2,
    "neg_mean_squared_error": _squared_error,
    "neg_root_mean_squared_error": _root_squared_error,
    "neg_mean_absolute_error": _absolute_error,
}
CLASSIFICATION: dict[str, Scorer] = {
    "accuracy": _accuracy,
    "neg_log_loss": _log_loss,
    "neg_brier_score": _brier,
    "roc_auc": _roc_auc,
}


def scorer(name: str | None, classifier: bool) -> tuple[str, Scorer]:
    """Returns the name and function of a scoring; None is scikit-learn's default of the kind.

    Raises:
        UnknownScoringError: there is no such scoring for this kind of model.
    """
    table = CLASSIFICATION if classifier else REGRESSION
    chosen = name if name is not None else next(iter(table)) if not classifier else "accuracy"
    if not isinstance(chosen, str) or chosen not in table:
        kind = "classifier" if classifier else "regressor"
        raise UnknownScoringError(
            f"scoring={name!r} is not known for a {kind}; choose one of {', '.join(sorted(table))}"
        )
    return chosen, table[chosen]
