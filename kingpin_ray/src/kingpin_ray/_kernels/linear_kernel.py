"""The compiled trainer of linear models behind Python's hands; None of it where it was not built.

`least_squares.py` and `newton.py` hold the same mathematics in NumPy: the reference, and the way
without a compiler.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._kernels import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F64 = NDArray[np.float64]


@functools.cache
def library() -> Any:
    """Returns the loaded kernel, or None where it was not built."""
    loaded = compiled.load("linear")
    if loaded is None:
        return None
    pointer, i32, i64, f64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    loaded.kp_grams.argtypes = [
        pointer, i32, pointer, pointer, pointer, i64, i32, i32, i32, pointer, pointer,
    ]  # fmt: skip
    loaded.kp_ridge_search.argtypes = [
        pointer, i64, i32, i32, i32, i32, pointer, i64, f64, pointer,
    ]  # fmt: skip
    loaded.kp_logistic.argtypes = [
        pointer, i32, pointer, pointer, i64, i32, i32, pointer, i64, f64, i32, pointer, pointer,
        pointer, pointer,
    ]  # fmt: skip
    loaded.kp_logistic_terms.argtypes = [
        pointer, pointer, pointer, pointer, i64, i32, pointer, pointer,
    ]  # fmt: skip
    return loaded


def _done(status: int) -> None:
    if status != 0:
        raise MemoryError("the linear kernel ran out of memory; use fewer or smaller groups")


def _plain(X: NDArray[np.floating]) -> NDArray[np.floating]:
    """Returns rows as the kernel reads them: float32 or float64, row by row."""
    kind = np.float32 if X.dtype == np.float32 else np.float64
    return np.ascontiguousarray(X, kind)


def grams(
    X: NDArray[np.floating],
    y: NDArray[np.generic],
    offsets: NDArray[np.int64],
    folds: NDArray[np.int64] | None,
    parts: int,
    centre: bool,
) -> tuple[F64, F64]:
    """Returns the means (G, D + 1) taken off, zero unless `centre`, and Grams (G, parts, Q, Q)."""
    rows, target = _plain(X), np.ascontiguousarray(y, np.float64)
    offsets = np.ascontiguousarray(offsets, np.int64)
    groups, features = len(offsets) - 1, X.shape[1]
    part = None if folds is None else np.ascontiguousarray(folds, np.int64)
    shift = np.empty((groups, features + 1))
    out = np.empty((groups, parts, features + 2, features + 2))
    _done(
        library().kp_grams(
            rows.ctypes.data, int(rows.dtype == np.float32), target.ctypes.data,
            offsets.ctypes.data, None if part is None else part.ctypes.data, groups, features,
            parts, int(centre), shift.ctypes.data, out.ctypes.data,
        )
    )  # fmt: skip
    return shift, out


def ridge_search(held: F64, n_folds: int, fit_intercept: bool, alphas: F64, safe: float) -> F64:
    """Returns held-out squared errors (G, len(alphas), n_folds).

    NaN where a penalty is below `safe` of the strongest column: what normal equations say there
    cannot be trusted.
    """
    held, alphas = np.ascontiguousarray(held), np.ascontiguousarray(alphas, np.float64)
    groups, parts, size, _ = held.shape
    residual = np.empty((groups, len(alphas), n_folds))
    _done(
        library().kp_ridge_search(
            held.ctypes.data, groups, parts, n_folds, size - 2, int(fit_intercept),
            alphas.ctypes.data, len(alphas), safe, residual.ctypes.data,
        )
    )  # fmt: skip
    return residual


def logistic(
    X: NDArray[np.floating],
    codes: NDArray[np.int64],
    offsets: NDArray[np.int64],
    weights: F64,
    fit_intercept: bool,
    tol: float,
    max_iter: int,
) -> tuple[F64, F64, NDArray[np.int64], NDArray[np.bool_]]:
    """Returns coef (C, G, D), intercept (C, G), steps (C, G) and whether each converged (C, G).

    Args:
        X: (N, D) rows.
        codes: (N,) 0 and 1.
        offsets: (G + 1,) rows of group g are offsets[g]:offsets[g + 1]; none is empty.
        weights: (C,) 1 / C, from strong to weak: each starts from the last one's optimum.
        fit_intercept: whether a constant is added.
        tol: as of `newton.fit_logistic`.
        max_iter: as of `newton.fit_logistic`.
    """
    rows, codes = _plain(X), np.ascontiguousarray(codes, np.int64)
    offsets = np.ascontiguousarray(offsets, np.int64)
    weights = np.ascontiguousarray(weights, np.float64)
    shape = (len(weights), len(offsets) - 1)
    coef, intercept = np.empty((*shape, X.shape[1])), np.empty(shape)
    steps, converged = np.empty(shape, np.int64), np.empty(shape, np.uint8)
    _done(
        library().kp_logistic(
            rows.ctypes.data, int(rows.dtype == np.float32), codes.ctypes.data,
            offsets.ctypes.data, shape[1], X.shape[1], int(fit_intercept), weights.ctypes.data,
            shape[0], tol, max_iter, coef.ctypes.data, intercept.ctypes.data, steps.ctypes.data,
            converged.ctypes.data,
        )
    )  # fmt: skip
    return coef, intercept, steps, converged.astype(bool)


def padded(rows: F64) -> F64:
    """Returns rows (N, P) as the kernel walks them: P rounded up to whole vectors, zeros behind."""
    out = np.zeros((len(rows), -(-rows.shape[1] // 8) * 8))
    out[:, : rows.shape[1]] = rows
    return out


def logistic_terms(
    design: F64, target: F64, begin: NDArray[np.int64], end: NDArray[np.int64], w: F64
) -> F64:
    """Returns (B, 1 + P + P * P) loss, gradient and Hessian of B groups at their own w (B, P).

    Args:
        design: (N, padded P) what `padded` returned.
        target: (N,) 0.0 and 1.0.
        begin: (B,) first row of each group.
        end: (B,) the row behind its last.
        w: coefficients.
    """
    begin, end = np.ascontiguousarray(begin, np.int64), np.ascontiguousarray(end, np.int64)
    w = np.ascontiguousarray(w)
    groups, size = w.shape
    out = np.empty((groups, 1 + size + size * size))
    _done(
        library().kp_logistic_terms(
            design.ctypes.data, target.ctypes.data, begin.ctypes.data, end.ctypes.data, groups,
            size, w.ctypes.data, out.ctypes.data,
        )
    )  # fmt: skip
    return out
