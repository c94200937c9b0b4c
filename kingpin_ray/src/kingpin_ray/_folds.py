"""Which fold a row belongs to: balanced within each group, and computable anywhere.

A row's fold depends only on the group's seed and on the row's place within the group, so two
workers that hold different rows of one group agree without talking.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._blocks import ranges
from kingpin_ray._errors import ParameterError
from kingpin_ray._hashes import mix

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block

    Add = Callable[[NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True)
class Split:
    """How rows of a group are held out.

    Attributes:
        n_folds: how many times a model is fitted and scored.
        period: rows that share one shuffle; each fold gets period / n_folds of them, or the single
            hold-out fold gets one row of each period.
    """

    n_folds: int
    period: int

    @property
    def min_rows(self) -> int:
        """Rows a group needs so that no fold is empty."""
        return self.period


def parse_cv(cv: object, n_configs: int) -> Split | None:
    """Returns the split that `cv` asks for; None means scores on the training rows.

    Args:
        cv: None, a number of folds, or the share of rows to hold out once.
        n_configs: configurations to choose from; with several, None means 5 folds.

    Raises:
        ParameterError: `cv` is none of these.
    """
    if cv is None:
        return Split(5, 5) if n_configs > 1 else None
    if isinstance(cv, numbers.Integral) and not isinstance(cv, bool) and int(cv) >= 2:
        return Split(int(cv), int(cv))
    if isinstance(cv, numbers.Real) and not isinstance(cv, bool) and 0 < float(cv) <= 0.5:
        return Split(1, math.floor(1 / float(cv) + 0.5))
    raise ParameterError(
        f"cv={cv!r}: give a number of folds (2 or more), a share of rows to hold out "
        "(over 0, at most 0.5), or None"
    )


def fold_of_row(block: Block, split: Split) -> NDArray[np.int64]:
    """Returns (N,) the fold in which each row is held out; rows never held out get -1."""
    return _folds_at(block.ordinals(), np.repeat(block.seeds, block.counts), split)


def _folds_at(
    ordinal: NDArray[np.int64], seeds: NDArray[np.uint64], split: Split
) -> NDArray[np.int64]:
    period = np.uint64(split.period)
    lap = (ordinal // split.period).astype(np.uint64)
    shift = mix(seeds + lap * np.uint64(0x9E3779B97F4A7C15))
    fold = ((ordinal.astype(np.uint64) + shift % period) % period).astype(np.int64)
    return np.where(fold < split.n_folds, fold, -1)


@dataclass(frozen=True)
class HeldOut:
    """Rows of a block that early stopping watches.

    Attributes:
        order: (N,) row numbers, each group's held-out rows last.
        middle: (G,) where in `order` those begin.
        first: (G,) training rows of each group that earlier workers hold.
        trained: (G,) training rows of each group, over all workers.
        watched: (G,) held-out rows of each group, over all workers; 0 where none could be spared.
    """

    order: NDArray[np.int64]
    middle: NDArray[np.int64]
    first: NDArray[np.int64]
    trained: NDArray[np.int64]
    watched: NDArray[np.int64]


def hold_out(block: Block, share: float, add: Add | None = None) -> HeldOut:
    """Returns a share of each group's rows to watch; 0 for none.

    A group that is too small, or whose other rows would be of one class, holds nothing out.

    Args:
        block: the rows that are here.
        share: part of the rows.
        add: sums an array over all workers, where each holds some rows of a group.
    """
    add = add or (lambda values: values)
    order = np.arange(len(block.y))
    total = add(block.counts)
    nothing = np.zeros(block.n_groups, np.int64)
    if share <= 0:
        return HeldOut(order, block.offsets[1:].copy(), block.first, total, nothing)
    split = Split(1, max(2, round(1 / share)))
    held = fold_of_row(block, split) == 0
    owner = block.group_of_row()
    watched = add(np.bincount(owner[held], minlength=block.n_groups))
    few = total - watched < 2
    if block.n_classes:
        cells = (owner * block.n_classes + block.y.astype(np.int64))[~held]
        kept = np.bincount(cells, minlength=block.n_groups * block.n_classes)
        few |= (add(kept).reshape(block.n_groups, -1) > 0).sum(axis=1) < 2
    held &= ~few[owner]
    order = np.lexsort((held, owner))
    middle = block.offsets[1:] - np.bincount(owner[held], minlength=block.n_groups)
    earlier = np.repeat(np.arange(block.n_groups), block.first)
    ordinal = ranges(nothing, block.first)
    before = _folds_at(ordinal, np.repeat(block.seeds, block.first), split) == 0
    first = block.first - np.bincount(earlier[before], minlength=block.n_groups) * ~few
    watched = np.where(few, 0, watched)
    return HeldOut(order, middle, first, total - watched, watched)
