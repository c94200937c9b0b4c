"""Batched Newton for many logistic regressions.

The objective of each model is scikit-learn's: C * sum(loss) + |w|^2 / 2, intercept not penalised.
Each group's columns are centred and scaled first. That is a change of variables (the penalty
follows it), so the optimum is the same, and Newton's matrix stays well conditioned on raw columns.

Shape legend: B groups of a bucket, N padded rows, P coefficients (the last is the intercept),
K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._blocks import buckets, padded_rows
from kingpin_ray._kernels import linear_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block, Bucket

    F64 = NDArray[np.float64]
    Add = Callable[[NDArray[Any]], NDArray[Any]]

_MAX_HALVINGS = 30


@dataclass
class LogisticFit:
    """Coefficients of G groups under C configurations.

    Attributes:
        coef: (C, G, M, D) float64; M is 1 for two classes, else the number of classes.
        intercept: (C, G, M) float64.
        n_iter: (C, G) int64 Newton steps.
        converged: (C, G) bool.
    """

    coef: F64
    intercept: F64
    n_iter: NDArray[np.int64]
    converged: NDArray[np.bool_]

    @classmethod
    def empty(cls, configs: int, groups: int, models: int, features: int) -> LogisticFit:
        """Returns zeros of the right shapes."""
        return cls(
            np.zeros((configs, groups, models, features)),
            np.zeros((configs, groups, models)),
            np.zeros((configs, groups), np.int64),
            np.zeros((configs, groups), bool),
        )

    def store(
        self,
        config: int,
        groups: NDArray[np.int64],
        solved: F64,
        steps: NDArray[np.int64],
        converged: NDArray[np.bool_],
        mean: F64,
        scale: F64,
    ) -> None:
        """Takes solutions (groups, M, P) of scaled columns, in the units of the data."""
        features = mean.shape[1]
        w = solved[:, :, :features] / scale[:, None, :]
        self.coef[config, groups] = w
        if solved.shape[2] > features:
            constant = solved[:, :, features] - np.einsum("bmd,bd->bm", w, mean)
            if solved.shape[1] > 1:
                # Softmax does not see a constant added to all classes; this one is unique.
                constant -= constant.mean(axis=1, keepdims=True)
            self.intercept[config, groups] = constant
        self.n_iter[config, groups] = steps
        self.converged[config, groups] = converged


def fit_logistic(
    block: Block,
    codes: NDArray[np.int64],
    n_classes: int,
    penalties: Sequence[float],
    *,
    fit_intercept: bool = True,
    tol: float = 1e-8,
    max_iter: int = 100,
) -> LogisticFit:
    """Returns the optimum of every group under every value of C.

    Args:
        block: the groups; every group must hold every one of the `n_classes` classes.
        codes: (N,) int64 class of each row, 0 to n_classes - 1.
        n_classes: 2 for the binary model, more for the softmax model.
        penalties: scikit-learn's C of each configuration.
        fit_intercept: whether a constant is added.
        tol: stop when a Newton step promises less than `tol` times the objective.
        max_iter: steps after which a model is given back as it is, `converged` False.
    """
    groups, features = block.n_groups, block.X.shape[1]
    models = 1 if n_classes == 2 else n_classes
    fit = LogisticFit.empty(len(penalties), groups, models, features)
    if models == 1 and linear_kernel.library() is not None and features:
        order = np.argsort(penalties, kind="stable")
        weights = 1.0 / np.asarray(penalties, np.float64)[order]
        coef, intercept, steps, done = linear_kernel.logistic(
            block.X, codes, block.offsets, weights, fit_intercept, tol, max_iter
        )
        fit.coef[order], fit.intercept[order] = coef[:, :, None], intercept[:, :, None]
        fit.n_iter[order], fit.converged[order] = steps, done
        return fit
    row_bytes = 8 * (2 * features + 4 * models + 4)
    # From strong to weak penalty, each started from the last one's optimum.
    order = np.argsort(penalties, kind="stable")
    for bucket in buckets(block.counts, row_bytes):
        design, mean, scale = _design(block, bucket, fit_intercept)
        rows, real = padded_rows(block, bucket)
        target = codes[rows]
        ridge = _ridge(scale, fit_intercept)
        start = np.zeros((len(bucket.positions), models, design.shape[2]))
        for at in order:
            weight = 1.0 / penalties[at] if np.isfinite(penalties[at]) else 0.0
            loss = _Binary(target, real) if models == 1 else _Softmax(target, real, n_classes)
            solved, steps, done = _newton(
                _Whole(design, loss), ridge * weight, start, tol=tol, max_iter=max_iter
            )
            start = solved
            fit.store(int(at), bucket.positions, solved, steps, done, mean, scale)
    return fit


def _design(block: Block, bucket: Bucket, fit_intercept: bool) -> tuple[F64, F64, F64]:
    """Returns (B, N, P) centred and scaled rows, zero where padded, with the means and scales."""
    rows, real = padded_rows(block, bucket)
    features = block.X.shape[1]
    design = np.empty((*rows.shape, features + fit_intercept))
    x = design[:, :, :features]
    x[...] = block.X[rows]
    counts = block.counts[bucket.positions][:, None].astype(np.float64)
    x *= real[:, :, None]
    mean = x.sum(axis=1) / counts if fit_intercept else np.zeros((len(rows), features))
    if fit_intercept:
        x -= mean[:, None, :]
        x *= real[:, :, None]
        design[:, :, features] = real
    scale = np.sqrt(np.einsum("bnd,bnd->bd", x, x) / counts)
    # A constant column leaves rounding noise after centring; its optimal weight is zero.
    noise = 1e-13 * np.abs(mean)
    flat = scale <= noise
    if flat.any():
        x *= ~flat[:, None, :]
    scale[flat | (scale == 0)] = 1.0
    x /= scale[:, None, :]
    return design, mean, scale


def _ridge(scale: F64, fit_intercept: bool) -> F64:
    """Returns (B, P) the penalty of each scaled coefficient at C = 1."""
    ridge = 1.0 / scale**2
    if fit_intercept:
        ridge = np.concatenate([ridge, np.zeros((len(ridge), 1))], axis=1)
    return ridge


class _Binary:
    """The two-class loss: one column of coefficients, code 1 positive."""

    def __init__(self, target: NDArray[np.int64], real: NDArray[np.bool_]) -> None:
        self.target = np.where(real, target, 0).astype(np.float64)
        # A padded row scores zero and so adds log 2 to the loss.
        self.padding = (~real).sum(axis=1) * np.log(2.0)

    def take(self, keep: NDArray[np.bool_]) -> None:
        self.target = self.target[keep]
        self.padding = self.padding[keep]

    def __call__(self, design: F64, w: F64) -> tuple[F64, F64, F64]:
        """Returns the loss (B,), gradient (B, P) and Hessian (B, P, P) at w (B, 1, P)."""
        z = np.matmul(design, w.transpose(0, 2, 1))[:, :, 0]
        e = np.exp(-np.abs(z))
        loss = (np.maximum(z, 0.0) - z * self.target + np.log1p(e)).sum(axis=1) - self.padding
        p = np.where(z >= 0, 1.0, e) / (1.0 + e)
        gradient = np.matmul((p - self.target)[:, None, :], design)[:, 0]
        curve = e / (1.0 + e) ** 2
        hessian = np.matmul((design * curve[:, :, None]).transpose(0, 2, 1), design)
        return loss, gradient, hessian


class _Softmax:
    """The loss of K classes, every class with its own coefficients as in scikit-learn."""

    def __init__(self, target: NDArray[np.int64], real: NDArray[np.bool_], n_classes: int) -> None:
        self.hot = (target[:, :, None] == np.arange(n_classes)) & real[:, :, None]
        self.padding = (~real).sum(axis=1) * np.log(float(n_classes))

    def take(self, keep: NDArray[np.bool_]) -> None:
        self.hot = self.hot[keep]
        self.padding = self.padding[keep]

    def __call__(self, design: F64, w: F64) -> tuple[F64, F64, F64]:
        """Returns the loss (B,), gradient (B, KP) and Hessian (B, KP, KP) at w (B, K, P)."""
        batch, classes, width = w.shape
        z = np.matmul(design, w.transpose(0, 2, 1))
        top = z.max(axis=2, keepdims=True)
        e = np.exp(z - top)
        total = e.sum(axis=2, keepdims=True)
        loss = (np.log(total) + top)[:, :, 0].sum(axis=1)
        loss -= np.einsum("bnk,bnk->b", z, self.hot.astype(np.float64)) + self.padding
        p = e / total
        gradient = np.matmul((p - self.hot).transpose(0, 2, 1), design)
        hessian = np.empty((batch, classes, width, classes, width))
        for k in range(classes):
            for j in range(k, classes):
                curve = -p[:, :, k] * p[:, :, j]
                if j == k:
                    curve += p[:, :, k]
                part = np.matmul((design * curve[:, :, None]).transpose(0, 2, 1), design)
                hessian[:, k, :, j, :] = part
                hessian[:, j, :, k, :] = part.transpose(0, 2, 1)
        size = classes * width
        return loss, gradient.reshape(batch, size), hessian.reshape(batch, size, size)


class _Whole:
    """The objective's data term of one bucket whose rows are all here."""

    def __init__(self, design: F64, loss: _Binary | _Softmax) -> None:
        self.design = design
        self.loss = loss

    def take(self, keep: NDArray[np.bool_]) -> None:
        self.design = self.design[keep]
        self.loss.take(keep)

    def __call__(self, w: F64) -> tuple[F64, F64, F64]:
        return self.loss(self.design, w)


class _Split:
    """The data term of all groups, of which other workers hold more rows: one exchange a call."""

    def __init__(self, parts: Sequence[tuple[NDArray[np.int64], _Whole]], groups: int, add: Add):
        self.parts = list(parts)
        self.groups = groups
        self.add = add

    def take(self, keep: NDArray[np.bool_]) -> None:
        renumber = np.cumsum(keep) - 1
        parts = []
        for positions, part in self.parts:
            mine = keep[positions]
            if mine.any():
                if not mine.all():
                    part.take(mine)
                parts.append((renumber[positions[mine]], part))
        self.parts = parts
        self.groups = int(keep.sum())

    def __call__(self, w: F64) -> tuple[F64, F64, F64]:
        size = w.shape[1] * w.shape[2]
        total = np.zeros((self.groups, 1 + size + size * size))
        for positions, part in self.parts:
            loss, gradient, hessian = part(w[positions])
            total[positions, 0] = loss
            total[positions, 1 : 1 + size] = gradient
            total[positions, 1 + size :] = hessian.reshape(len(positions), -1)
        total = self.add(total)
        hessian = total[:, 1 + size :].reshape(-1, size, size)
        return total[:, 0], total[:, 1 : 1 + size], hessian


class _SplitBinary:
    """As `_Split`, of two classes and by the compiled kernel."""

    def __init__(self, x: F64, codes: NDArray[np.int64], offsets: NDArray[np.int64], add: Add):
        self.design = linear_kernel.padded(x)
        self.target = codes.astype(np.float64)
        self.begin, self.end = offsets[:-1], offsets[1:]
        self.add = add

    def take(self, keep: NDArray[np.bool_]) -> None:
        self.begin, self.end = self.begin[keep], self.end[keep]

    def __call__(self, w: F64) -> tuple[F64, F64, F64]:
        size = w.shape[2]
        total = self.add(
            linear_kernel.logistic_terms(self.design, self.target, self.begin, self.end, w[:, 0])
        )
        hessian = total[:, 1 + size :].reshape(-1, size, size)
        return total[:, 0], total[:, 1 : 1 + size], hessian


def fit_logistic_split(
    block: Block,
    codes: NDArray[np.int64],
    n_classes: int,
    penalties: Sequence[float],
    add: Add,
    *,
    fit_intercept: bool = True,
    tol: float = 1e-8,
    max_iter: int = 100,
) -> LogisticFit:
    """As `fit_logistic`, where each worker holds some rows of every group.

    Args:
        add: sums an array over all workers.
        block: the rows that are here.
        codes: their classes.
        n_classes: as for `fit_logistic`; every class is held by some worker.
        penalties: as for `fit_logistic`.
        fit_intercept: as for `fit_logistic`.
        tol: as for `fit_logistic`.
        max_iter: as for `fit_logistic`.
    """
    groups, features = block.n_groups, block.X.shape[1]
    models = 1 if n_classes == 2 else n_classes
    fit = LogisticFit.empty(len(penalties), groups, models, features)
    counts = np.maximum(add(block.counts.astype(np.float64)), 1.0)[:, None]
    mean = np.zeros((groups, features))
    if fit_intercept:
        mean = add(_sums(block.X.astype(np.float64), block)) / counts
    owner = block.group_of_row()
    x = block.X - mean[owner]
    scale = np.sqrt(add(_sums(x * x, block)) / counts)
    flat = scale <= 1e-13 * np.abs(mean)
    scale[flat | (scale == 0)] = 1.0
    x = np.where(flat[owner], 0.0, x / scale[owner])
    if fit_intercept:
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    ridge = _ridge(scale, fit_intercept)
    start = np.zeros((groups, models, x.shape[1]))
    compiled = models == 1 and linear_kernel.library() is not None
    found = [] if compiled else [
        (bucket.positions, *padded_rows(block, bucket))
        for bucket in buckets(block.counts, 8 * (2 * features + 4 * models + 4))
    ]  # fmt: skip
    for at in np.argsort(penalties, kind="stable"):
        weight = 1.0 / penalties[at] if np.isfinite(penalties[at]) else 0.0
        problem: _Split | _SplitBinary
        if compiled:
            problem = _SplitBinary(x, codes, block.offsets, add)
        else:
            parts = []
            for positions, rows, real in found:
                target = codes[rows]
                loss = _Binary(target, real) if models == 1 else _Softmax(target, real, n_classes)
                parts.append((positions, _Whole(x[rows] * real[:, :, None], loss)))
            problem = _Split(parts, groups, add)
        start, steps, done = _newton(problem, ridge * weight, start, tol=tol, max_iter=max_iter)
        fit.store(int(at), np.arange(groups), start, steps, done, mean, scale)
    return fit


def _sums(values: F64, block: Block) -> F64:
    sums = np.zeros((block.n_groups, values.shape[1]))
    filled = np.flatnonzero(block.counts)
    if len(filled):
        sums[filled] = np.add.reduceat(values, block.offsets[:-1][filled], axis=0)
    return sums


def _newton(
    problem: _Whole | _Split | _SplitBinary,
    ridge: F64,
    start: F64,
    *,
    tol: float,
    max_iter: int,
) -> tuple[F64, NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the optima (B, M, P), the steps each took and whether it converged.

    Every pass evaluates loss, gradient and Hessian of all open models at once. A model whose step
    did not lower its objective halves the step; one that promises too little more takes its last
    step and is closed; closed models leave the batch when they are many.
    """
    batch, models, width = start.shape
    size = models * width
    solved = start.copy()
    steps = np.zeros(batch, np.int64)
    converged = np.zeros(batch, bool)

    open_at = np.arange(batch)
    lam = np.tile(ridge, (1, models))
    w = start.reshape(batch, size).copy()
    good = w.copy()
    value = np.full(batch, np.inf)
    step = np.zeros_like(w)
    halvings = np.zeros(batch, np.int64)
    closed = np.zeros(batch, bool)
    for _ in range(max_iter + _MAX_HALVINGS):
        loss, gradient, hessian = problem(w.reshape(-1, models, width))
        objective = loss + 0.5 * (lam * w * w).sum(axis=1)
        better = objective <= value + 1e-12 * np.abs(value)
        stuck = ~better & (halvings >= _MAX_HALVINGS)
        retry = ~better & ~stuck & ~closed
        moved = better & ~closed
        good[moved] = w[moved]
        value[moved] = objective[moved]
        halvings[moved] = 0
        if moved.any():
            gradient = gradient + lam * w
            hessian[:, np.arange(size), np.arange(size)] += lam
            newer, promise = _solve(hessian, gradient)
            step[moved] = newer[moved]
            steps[open_at[moved]] += 1
            enough = moved & (promise <= tol * (1.0 + np.abs(objective)))
            full = moved & ~enough & (steps[open_at] < max_iter)
            # The promise of a last step is its own error bound: take it and be done.
            good[enough] -= step[enough]
            converged[open_at[enough]] = True
            closed |= (moved & ~full) | (stuck & ~closed)
            w[full] = good[full] - step[full]
        else:
            closed |= stuck
        if retry.any():
            halvings[retry] += 1
            step[retry] *= 0.5
            w[retry] = good[retry] - step[retry]
        if closed.all():
            break
        if closed.sum() * 3 >= len(closed):
            keep = ~closed
            solved[open_at[closed]] = good[closed].reshape(-1, models, width)
            problem.take(keep)
            lam, w, good = lam[keep], w[keep], good[keep]
            value, step, halvings = value[keep], step[keep], halvings[keep]
            open_at, closed = open_at[keep], closed[keep]
    solved[open_at] = good.reshape(-1, models, width)
    return solved, steps, converged


def _solve(hessian: F64, gradient: F64) -> tuple[F64, F64]:
    """Returns the Newton step (B, P) and half of what it promises to gain (B,)."""
    diagonal = np.einsum("bii->bi", hessian)
    # Jacobi scaling, with a jitter far below the tolerance for directions nothing determines.
    inverse = 1.0 / np.sqrt(np.maximum(diagonal, 1e-300))
    inverse[diagonal <= 0] = 1.0
    scaled = hessian * inverse[:, :, None] * inverse[:, None, :]
    view = np.einsum("bii->bi", scaled)
    view += 1e-13
    view[diagonal <= 0] = 1.0
    right = gradient * inverse
    step = np.linalg.solve(scaled, right[:, :, None])[:, :, 0]
    return step * inverse, 0.5 * (step * right).sum(axis=1)
