"""Chooses where the groups are trained."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kingpin_ray._errors import ParameterError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kingpin_ray.models._base import GroupModel

PLANS = ("auto", "local", "task", "data", "grouped")

# Measured on 2 idle cores: Ray up 2.7-3.7 s, its actors 1.3 s, its end 1.1 s.
_RAY_START_S = 6.0
_RAY_RUNNING_S = 0.5


def check_plan(plan: object) -> str:
    """Returns `plan`.

    Raises:
        ParameterError: it is none of PLANS.
    """
    if plan not in PLANS:
        raise ParameterError(f"plan={plan!r}: choose one of {', '.join(map(repr, PLANS))}")
    return str(plan)


def predicted_seconds(
    model: GroupModel, counts: NDArray[np.int64], n_features: int, fits: int
) -> float:
    """Returns the seconds one core needs for all groups, each fitted `fits` times."""
    row_s, group_s = model.cost(n_features)
    return float(fits * (counts.sum() * row_s + len(counts) * group_s))


def choose(seconds: float, ray_running: bool, num_actors: int | None) -> str:
    """Returns "task" when Ray saves more time than it takes to start, else "local"."""
    workers = num_actors or os.cpu_count() or 1
    overhead = _RAY_RUNNING_S if ray_running else _RAY_START_S
    return "task" if seconds > seconds / workers + overhead else "local"
