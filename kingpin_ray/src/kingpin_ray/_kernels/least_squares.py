"""Least squares of many groups from their Gram matrices.

A group's rows enter only through Z^T Z with Z = [x - m, y - c, 1], shifted by the group's own means
so that nothing cancels. Grams of folds add up: every fold and every penalty comes from one pass.

Shape legend: N rows, D features, G groups, B groups of a bucket, Q = D + 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kingpin_ray._blocks import buckets, offsets_of
from kingpin_ray._kernels import linear_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F64 = NDArray[np.float64]

# Normal equations square the condition number; past this, rows are solved directly.
_SAFE_RECIPROCAL = 1e-9


def group_means(X: NDArray[np.floating], y: NDArray[np.generic], offsets: NDArray[np.int64]) -> F64:
    """Returns (G, D + 1) means of features and target; zero for an empty group."""
    counts = np.diff(offsets)
    sums = np.zeros((len(counts), X.shape[1] + 1))
    filled = np.flatnonzero(counts)
    if len(filled):
        starts = offsets[:-1][filled]
        sums[filled, :-1] = np.add.reduceat(X, starts, axis=0, dtype=np.float64)
        sums[filled, -1] = np.add.reduceat(y.astype(np.float64), starts)
    return sums / np.maximum(counts, 1)[:, None]


def grams(
    X: NDArray[np.floating], y: NDArray[np.generic], offsets: NDArray[np.int64], shift: F64
) -> F64:
    """Returns (G, Q, Q) Gram matrices of [x, y, 1] with `shift` (G, D + 1) taken off first."""
    groups, features = len(offsets) - 1, X.shape[1]
    counts = np.diff(offsets)
    out = np.zeros((groups, features + 2, features + 2))
    for bucket in buckets(counts, 8 * (features + 2)):
        column = np.arange(bucket.width)
        real = column < counts[bucket.positions][:, None]
        rows = offsets[bucket.positions][:, None] + np.where(real, column, 0)
        z = np.empty((*rows.shape, features + 2))
        z[:, :, :features] = X[rows]
        z[:, :, features] = y[rows]
        z[:, :, :-1] -= shift[bucket.positions][:, None, :]
        z[:, :, -1] = 1.0
        z *= real[:, :, None]
        out[bucket.positions] = np.matmul(z.transpose(0, 2, 1), z)
    return out


def centred_grams(
    X: NDArray[np.floating],
    y: NDArray[np.generic],
    offsets: NDArray[np.int64],
    fit_intercept: bool,
) -> tuple[F64, F64]:
    """Returns the shifts (G, D + 1) and Grams (G, Q, Q) of each group.

    The shifts are the means, or zero where no constant is free to make up for them.
    """
    if linear_kernel.library() is not None:
        shift, out = linear_kernel.grams(X, y, offsets, None, 1, fit_intercept)
        return shift, out[:, 0]
    shift = group_means(X, y, offsets) * float(fit_intercept)
    return shift, grams(X, y, offsets, shift)


def solve(gram: F64, alpha: float, fit_intercept: bool) -> tuple[F64, F64, NDArray[np.bool_]]:
    """Returns weights (G, D), constants (G,) in shifted coordinates, and which are trustworthy.

    Args:
        gram: (G, Q, Q).
        alpha: scikit-learn's ridge penalty; 0 for none.
        fit_intercept: whether the constant is free.
    """
    features = gram.shape[1] - 2
    rows = np.maximum(gram[:, -1, -1], 1.0)
    total = gram[:, :-1, -1]
    inner = gram[:, :-1, :-1]
    if fit_intercept:
        inner = inner - total[:, :, None] * total[:, None, :] / rows[:, None, None]
    system = inner[:, :features, :features].copy()
    right = inner[:, :features, features]
    diagonal = np.einsum("gii->gi", system)
    # Rounding noise of a constant column must not become a column of its own.
    before = np.einsum("gii->gi", gram)[:, :features]
    constant = diagonal <= 1e-13 * np.maximum(before, 1e-300)
    diagonal += alpha
    dead = constant & (alpha == 0.0)
    scale = 1.0 / np.sqrt(np.where(dead, 1.0, diagonal))
    system *= scale[:, :, None] * scale[:, None, :]
    if dead.any():
        system[dead[:, :, None] | dead[:, None, :]] = 0.0
        system[:, np.arange(features), np.arange(features)] += dead
    right = np.where(dead, 0.0, right * scale)
    floor = np.min(np.where(dead, 1.0, alpha * scale**2), axis=1)
    good = floor >= _SAFE_RECIPROCAL
    doubtful = np.flatnonzero(~good)
    if len(doubtful):
        good[doubtful] = np.linalg.eigvalsh(system[doubtful])[:, 0] >= _SAFE_RECIPROCAL
        system[~good] += 1e-12 * np.eye(features)
    weights = np.linalg.solve(system, right[:, :, None])[:, :, 0] * scale
    weights[dead] = 0.0
    if fit_intercept:
        constant_term = (total[:, -1] - np.einsum("gd,gd->g", weights, total[:, :-1])) / rows
    else:
        constant_term = np.zeros(len(gram))
    return weights, constant_term, good


def squared_errors(gram: F64, weights: F64, constant: F64) -> tuple[F64, F64, F64]:
    """Returns residual sum, total sum of squares about the mean, and rows, each (G,)."""
    one = np.ones((len(gram), 1))
    v = np.concatenate([-weights, one, -constant[:, None]], axis=1)
    residual = np.einsum("gi,gij,gj->g", v, gram, v, optimize=True)
    return np.maximum(residual, 0.0), *totals(gram)


def solve_rows(
    X: NDArray[np.floating], y: NDArray[np.generic], alpha: float, fit_intercept: bool
) -> tuple[F64, float]:
    """Returns the weights (D,) of least norm and the constant, from the rows of one group."""
    x: F64 = X.astype(np.float64)
    target = y.astype(np.float64)
    mean_x = x.mean(axis=0) if fit_intercept else np.zeros(x.shape[1])
    mean_y = float(target.mean()) if fit_intercept else 0.0
    x -= mean_x
    target = target - mean_y
    if alpha > 0:
        x = np.concatenate([x, np.sqrt(alpha) * np.eye(x.shape[1])])
        target = np.concatenate([target, np.zeros(x.shape[1])])
    weights = np.asarray(np.linalg.lstsq(x, target, rcond=None)[0], np.float64)
    return weights, mean_y - float(mean_x @ weights)


def shift_back(gram: F64, shift: F64) -> F64:
    """Returns the Grams (G, Q, Q) of rows from which nothing was taken off."""
    size = gram.shape[1]
    move = np.broadcast_to(np.eye(size), gram.shape).copy()
    move[:, -1, :-1] = shift
    return np.asarray(np.matmul(move.transpose(0, 2, 1), np.matmul(gram, move)))


def solve_gram(gram: F64, alpha: float, fit_intercept: bool) -> tuple[F64, float]:
    """Returns the weights (D,) of least norm and the constant of one Gram (Q, Q).

    For groups whose rows no single worker holds, or that are gone. Columns count in their own
    units; directions below 1e-12 of the whole count as absent, since a Gram has squared them.
    """
    features = len(gram) - 2
    rows = max(float(gram[-1, -1]), 1.0)
    total = gram[:-1, -1]
    inner = gram[:-1, :-1] - np.outer(total, total) / rows if fit_intercept else gram[:-1, :-1]
    diagonal = np.diagonal(inner)[:features]
    alive = diagonal > 1e-13 * np.diagonal(gram)[:features]
    scale = np.where(alive, 1.0 / np.sqrt(np.where(alive, diagonal, 1.0) + alpha), 0.0)
    system = (inner[:features, :features] + alpha * np.eye(features)) * np.outer(scale, scale)
    values, vectors = np.linalg.eigh(system)
    kept = values > 1e-12
    part = vectors[:, kept]
    weights = scale * (part @ ((part.T @ (scale * inner[:features, features])) / values[kept]))
    # Of all solutions the shortest: what lies along an absent direction is taken off.
    absent = scale[:, None] * vectors[:, ~kept]
    weights -= absent @ np.linalg.lstsq(absent, weights, rcond=1e-12)[0]
    constant = (total[-1] - weights @ total[:-1]) / rows if fit_intercept else 0.0
    return weights, float(constant)


def fold_grams(
    X: NDArray[np.floating],
    y: NDArray[np.generic],
    offsets: NDArray[np.int64],
    fit_intercept: bool,
    folds: NDArray[np.int64],
    n_parts: int,
) -> tuple[F64, F64]:
    """Returns each group's shifts (G, D + 1) and the Grams (G, n_parts, Q, Q) of its folds."""
    if linear_kernel.library() is not None:
        return linear_kernel.grams(X, y, offsets, folds, n_parts, fit_intercept)
    shift = group_means(X, y, offsets) * float(fit_intercept)
    groups = len(offsets) - 1
    owner = np.repeat(np.arange(groups), np.diff(offsets)) * n_parts + folds
    order = np.argsort(owner, kind="stable")
    parts = offsets_of(np.bincount(owner, minlength=groups * n_parts))
    flat = grams(X[order], y[order], parts, np.repeat(shift, n_parts, axis=0))
    return shift, flat.reshape(groups, n_parts, *flat.shape[1:])


def search(held: F64, n_folds: int, fit_intercept: bool, alphas: F64) -> F64:
    """Returns held-out squared errors (G, len(alphas), n_folds); NaN where rows must be looked at.

    Args:
        held: (G, parts, Q, Q) Grams, of which the first `n_folds` are held out in turn.
        n_folds: folds.
        fit_intercept: whether the constant is free.
        alphas: penalties.
    """
    if linear_kernel.library() is not None:
        return linear_kernel.ridge_search(held, n_folds, fit_intercept, alphas, _SAFE_RECIPROCAL)
    residual = np.empty((len(held), len(alphas), n_folds))
    whole = held.sum(axis=1)
    for f in range(n_folds):
        for c, alpha in enumerate(alphas):
            weights, constant, good = solve(whole - held[:, f], float(alpha), fit_intercept)
            found, _, _ = squared_errors(held[:, f], weights, constant)
            residual[:, c, f] = np.where(good, found, np.nan)
    return residual


def totals(gram: F64) -> tuple[F64, F64]:
    """Returns (...) sums of squares of the target about its mean, and rows, of (..., Q, Q)."""
    rows = gram[..., -1, -1]
    about = gram[..., -2, -2] - gram[..., -2, -1] ** 2 / np.maximum(rows, 1.0)
    return np.maximum(about, 0.0), rows
