"""Which fold a row belongs to: balanced within each group, and computable anywhere.

A row's fold depends only on the group's seed and on the row's place within the group, so two
workers that hold different rows of one group agree without talking.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kingpin_ray._errors import ParameterError
from kingpin_ray._hashes import mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block


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
    ordinal = block.ordinals()
    period = np.uint64(split.period)
    lap = (ordinal // split.period).astype(np.uint64)
    shift = mix(np.repeat(block.seeds, block.counts) + lap * np.uint64(0x9E3779B97F4A7C15))
    fold = ((ordinal.astype(np.uint64) + shift % period) % period).astype(np.int64)
    return np.where(fold < split.n_folds, fold, -1)
