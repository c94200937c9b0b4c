"""Sufficient statistics of least squares that add up over parts of the data, rows let go.

A group's rows enter a linear fit only through their number, their means, and the products of what
is left when the means are taken off. Two parts of a group are put together by the update of Chan,
Golub and LeVeque (1983): a sum of squares that never subtracts, so nothing cancels however the
parts are cut. Each fold of a group has statistics of its own.

Shape legend: N rows, D features, G groups, P parts of a group (its folds), C cells (a part of a
group), Z = D + 1 (features and target), Q = D + 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kingpin_ray._blocks import Block, offsets_of
from kingpin_ray._folds import fold_of_row
from kingpin_ray._kernels import least_squares as ls

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kingpin_ray._folds import Split

    F64 = NDArray[np.float64]

# Cells that are put together at a time: what is held for it stays small.
_PIECE = 2048


def parts_of(split: Split | None) -> int:
    """Returns P: the folds, and one more for rows that are never held out."""
    if split is None:
        return 1
    return split.n_folds + int(split.period > split.n_folds)


def cell_bytes(features: int) -> int:
    """Returns the bytes of one cell."""
    return 8 * (features + 1) * (features + 2) + 8


@dataclass
class Cells:
    """Statistics of C cells.

    Attributes:
        rows: (C,) float64.
        mean: (C, Z).
        scatter: (C, Z, Z) products with the cell's own means taken off.
    """

    rows: F64
    mean: F64
    scatter: F64

    @classmethod
    def zeros(cls, count: int, features: int) -> Cells:
        """Returns cells without rows."""
        size = features + 1
        return cls(np.zeros(count), np.zeros((count, size)), np.zeros((count, size, size)))

    def merge(self, at: NDArray[np.int64], other: Cells) -> None:
        """Adds the rows of other cells to those of the cells `at`, each named at most once."""
        for begin in range(0, len(at), _PIECE):
            here, there = at[begin : begin + _PIECE], slice(begin, begin + _PIECE)
            before, more = self.rows[here], other.rows[there]
            rows = np.maximum(before + more, 1.0)
            apart = other.mean[there] - self.mean[here]
            self.mean[here] += apart * (more / rows)[:, None]
            weight = before * more / rows
            self.scatter[here] += other.scatter[there]
            self.scatter[here] += apart[:, :, None] * (apart * weight[:, None])[:, None, :]
            self.rows[here] = before + more

    def grown(self, count: int) -> Cells:
        """Returns these cells and more without rows behind them."""
        more = Cells.zeros(count - len(self.rows), self.mean.shape[1] - 1)
        return Cells(
            np.concatenate([self.rows, more.rows]),
            np.concatenate([self.mean, more.mean]),
            np.concatenate([self.scatter, more.scatter]),
        )

    def together(self) -> Cells:
        """Returns one cell of all rows."""
        rows = float(self.rows.sum())
        share = self.rows / max(rows, 1.0)
        mean = share @ self.mean
        apart = self.mean - mean
        scatter = self.scatter.sum(axis=0) + (apart * self.rows[:, None]).T @ apart
        return Cells(np.array([rows]), mean[None], scatter[None])


def cells_of(block: Block, split: Split | None) -> tuple[NDArray[np.int64], Cells]:
    """Returns which cells (group * P + part) of a block have rows, and their statistics.

    Rows with a NaN or infinite feature are left out: their group cannot be trained anyway.
    """
    finite = np.isfinite(block.X).all(axis=1)
    folds = np.zeros(len(block.y), np.int64)
    count = parts_of(split)
    if split is not None:
        folds = fold_of_row(block, split)
        folds = np.where(folds < 0, split.n_folds, folds)
    cell = block.group_of_row() * count + folds
    order = np.argsort(cell, kind="stable")
    if not finite.all():
        order = order[finite[order]]
    held = np.bincount(cell[order], minlength=block.n_groups * count)
    there = np.flatnonzero(held)
    mean, gram = ls.centred_grams(block.X[order], block.y[order], offsets_of(held[there]), True)
    return there, Cells(held[there].astype(np.float64), mean, gram[:, :-1, :-1])


def unusable(block: Block) -> NDArray[np.int64]:
    """Returns (G,) the rows with a NaN or infinite feature."""
    bad = ~np.isfinite(block.X).all(axis=1)
    return np.bincount(block.group_of_row()[bad], minlength=block.n_groups)


@dataclass(frozen=True)
class Sums:
    """Whole groups as statistics; where a trainer needs them, they stand in for a `Block`.

    Attributes:
        cells: of (G * P) cells.
        groups: (G,) int64 ids in the key table.
        counts: (G,) usable rows.
        n_dropped: (G,) rows without a target.
        missing: (G,) usable rows with a NaN or infinite feature, which `cells` leaves out.
    """

    cells: Cells
    groups: NDArray[np.int64]
    counts: NDArray[np.int64]
    n_dropped: NDArray[np.int64]
    missing: NDArray[np.int64]

    @property
    def n_groups(self) -> int:
        """The number of groups."""
        return len(self.groups)

    def select(self, positions: NDArray[np.int64]) -> Sums:
        """Returns some of the groups, in the order given."""
        parts = len(self.cells.rows) // max(self.n_groups, 1)
        at = (positions[:, None] * parts + np.arange(parts)).reshape(-1)
        cells = Cells(self.cells.rows[at], self.cells.mean[at], self.cells.scatter[at])
        return replace(
            self,
            cells=cells,
            groups=self.groups[positions],
            counts=self.counts[positions],
            n_dropped=self.n_dropped[positions],
            missing=self.missing[positions],
        )

    def grams(self, fit_intercept: bool) -> tuple[F64, F64]:
        """Returns the shifts (G, Z) and Grams (G, P, Q, Q) that `ls.fold_grams` would return."""
        groups, size = self.n_groups, self.cells.mean.shape[1]
        rows = self.cells.rows.reshape(groups, -1)
        mean = self.cells.mean.reshape(groups, -1, size)
        total = np.maximum(rows.sum(axis=1), 1.0)
        shift = np.einsum("gp,gpz->gz", rows, mean) / total[:, None] * float(fit_intercept)
        apart = mean - shift[:, None, :]
        out = np.empty((*rows.shape, size + 1, size + 1))
        out[..., :-1, :-1] = self.cells.scatter.reshape(*rows.shape, size, size)
        out[..., :-1, :-1] += apart[..., :, None] * (apart * rows[..., None])[..., None, :]
        out[..., :-1, -1] = out[..., -1, :-1] = apart * rows[..., None]
        out[..., -1, -1] = rows
        return shift, out
