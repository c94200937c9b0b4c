"""Chooses where the groups are trained, from what a fit costs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kingpin_ray._blocks import Block, offsets_of
from kingpin_ray._errors import ParameterError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kingpin_ray._engine import Task
    from kingpin_ray.models._base import GroupModel

PLANS = ("auto", "local", "task", "data", "grouped")

# Measured on 2 idle cores: Ray up 2.7-3.7 s, its actors 1.3 s, its end 1.1 s.
_RAY_START_S = 6.0
_RAY_RUNNING_S = 0.5
# Size classes of `explain` grow by this factor.
_CLASS = 4


@dataclass(frozen=True)
class Costs:
    """What one fit costs on one core of this machine.

    Attributes:
        row_s: seconds per row and feature (with four more features for what is not per feature).
        group_s: seconds per group on top of its rows.
    """

    row_s: float
    group_s: float


_measured: dict[str, Costs] = {}


def check_plan(plan: object) -> str:
    """Returns `plan`.

    Raises:
        ParameterError: it is none of PLANS.
    """
    if plan not in PLANS:
        raise ParameterError(f"plan={plan!r}: choose one of {', '.join(map(repr, PLANS))}")
    return str(plan)


def calibrate(model: GroupModel, n_features: int = 20, seed: int = 0) -> Costs:
    """Measures what a fit of `model` costs here; `plan="auto"` and `explain` use it from then on.

    Many small groups of generated rows are fitted, then a few large ones; two measurements give
    the two costs. It takes about a second for the linear models.

    Args:
        model: the model, with the parameters it will be used with.
        n_features: features of the generated rows.
        seed: seed of the rows.
    """
    rng = np.random.default_rng(seed)
    shapes = ((400, 25), (10, 4000))
    seconds = []
    for groups, rows in shapes:
        X = rng.normal(size=(groups * rows, n_features))
        signal = X[:, 0] + rng.normal(size=len(X))
        y: NDArray[np.generic] = signal
        if model.classifier:
            y = (signal > 0).astype(np.int64)
        zeros = np.zeros(groups, np.int64)
        block = Block(
            X, y, offsets_of(np.full(groups, rows)), np.arange(groups), zeros.astype(np.uint64),
            2 if model.classifier else 0, zeros, zeros,
        )  # fmt: skip
        model.fit(block.select(np.arange(2)), [{}])  # libraries load outside the clock
        began = time.perf_counter()
        model.fit(block, [{}])
        seconds.append(time.perf_counter() - began)
    system = np.array([[groups * rows, groups] for groups, rows in shapes], float)
    row, group = np.maximum(np.linalg.solve(system, np.array(seconds)), 1e-12)
    costs = Costs(float(row) / (n_features + 4), float(group))
    _measured[_name(model)] = costs
    return costs


def _name(model: GroupModel) -> str:
    return repr(model)


def fit_seconds(
    model: GroupModel, counts: NDArray[np.int64], n_features: int, fits: int
) -> NDArray[np.float64]:
    """Returns (G,) the seconds that one core needs for each group, fitted `fits` times."""
    known = _measured.get(_name(model))
    if known is not None:
        row_s, group_s = known.row_s * (n_features + 4), known.group_s
    else:
        row_s, group_s = model.cost(n_features)
    return np.asarray(fits * (counts * row_s + group_s))


def predicted_seconds(
    model: GroupModel, counts: NDArray[np.int64], n_features: int, fits: int
) -> float:
    """Returns the seconds one core needs for all groups, each fitted `fits` times."""
    return float(fit_seconds(model, counts, n_features, fits).sum())


def choose(seconds: float, ray_running: bool, num_actors: int | None) -> str:
    """Returns "task" when Ray saves more time than it takes to start, else "local"."""
    workers = num_actors or os.cpu_count() or 1
    overhead = _RAY_RUNNING_S if ray_running else _RAY_START_S
    return "task" if seconds > seconds / workers + overhead else "local"


def explain(results: pa.Table, task: Task, n_features: int) -> pa.Table:
    """Returns predicted and measured seconds by plan and size of group.

    Args:
        results: RESULT_FIELDS rows.
        task: what was done.
        n_features: features of the data.
    """
    final = results.filter(pc.is_null(results.column("fold")))
    rows = final.column("n_rows").to_numpy()
    group = results.column("group").to_numpy()
    spent = np.bincount(group, results.column("seconds").to_numpy(), int(group.max()) + 1)
    fits = len(task.configs) * (task.split.n_folds if task.split else 0) + 1
    trained = np.isin(final.column("status").to_pylist(), ("ok", "not_converged"))
    predicted = fit_seconds(task.model, rows, n_features, fits) * trained
    size = np.floor(np.log(np.maximum(rows, 1)) / np.log(_CLASS)).astype(np.int64)
    table = pa.table(
        {
            "plan": final.column("plan"),
            "rows_from": _CLASS**size,
            "groups": np.ones(len(rows), np.int64),
            "rows": rows,
            "predicted_seconds": predicted,
            "measured_seconds": spent[final.column("group").to_numpy()],
        }
    )
    names = ("groups", "rows", "predicted_seconds", "measured_seconds")
    found = table.group_by(["plan", "rows_from"]).aggregate([(name, "sum") for name in names])
    found = found.rename_columns(["plan", "rows_from", *names])
    return found.sort_by([("plan", "ascending"), ("rows_from", "ascending")])
