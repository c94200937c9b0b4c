"""Chooses where each group is trained: here, whole on an actor, or split over all of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kingpin_ray._costs import ClusterCosts, cluster_costs, exchange_seconds, fit_seconds
from kingpin_ray._errors import ParameterError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kingpin_ray._engine import Task

PLANS = ("auto", "local", "task", "data", "grouped")

# Size classes of `explain` grow by this factor.
_CLASS = 4
# Splitting must promise this much less than the next best plan: it changes the last digits.
_GAIN = 0.9
# As many chunks of groups as `_driver.make_chunks` cuts, at most; each is its own round of sums.
_CHUNKS = 32
# Below this many rows there is one chunk, which no second thread can share.
_LEAST_CHUNK_ROWS = 20_000
_BYTES = 8


@dataclass(frozen=True)
class Assignment:
    """Where the groups are trained.

    Attributes:
        plan: "local", "task", "data" or "grouped".
        split: how many of the largest groups are split over all workers; all under "data".
        seconds: predicted wall seconds.
    """

    plan: str
    split: int
    seconds: float


def check_plan(plan: object) -> str:
    """Returns `plan`.

    Raises:
        ParameterError: it is none of PLANS.
    """
    if plan not in PLANS:
        raise ParameterError(f"plan={plan!r}: choose one of {', '.join(map(repr, PLANS))}")
    return str(plan)


def largest_first(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the groups in order of size, the largest first; equals in order of their keys."""
    return np.lexsort((np.arange(len(counts)), -counts))


def count_workers(num_actors: int | None) -> int:
    """Returns how many actors there would be: `num_actors`, or the CPUs of Ray or this machine."""
    if num_actors is not None:
        return int(num_actors)
    import sys

    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return max(1, int(ray.cluster_resources().get("CPU", 1)))
    return os.cpu_count() or 1


def count_cores(num_actors: int | None) -> int:
    """Returns how many threads train in this process: `num_actors`, or the CPUs it may use."""
    if num_actors is not None:
        return int(num_actors)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fits_of(task: Task) -> int:
    """Returns how often each group is fitted: every setting and fold, and the final model."""
    return len(task.configs) * (task.split.n_folds if task.split else 0) + 1


def walls(
    task: Task,
    counts: NDArray[np.int64],
    n_features: int,
    n_classes: int,
    workers: int,
    ray_running: bool,
    cores: int = 1,
    cluster: ClusterCosts | None = None,
) -> dict[str, Assignment]:
    """Returns the best assignment of each plan that is possible, with its predicted seconds.

    Under "grouped", every number of split groups is tried that a fair placement could want: the
    largest groups, as long as one of them alone takes longer than its share of the workers.
    """
    cluster = cluster or cluster_costs()
    spent = fit_seconds(task.model, counts, n_features, fits_of(task))
    total = float(spent.sum())
    cores = min(cores, -(-int(counts.sum()) // _LEAST_CHUNK_ROWS)) if task.model.threads else 1
    longest = float(spent.max(initial=0.0))
    found = {"local": Assignment("local", 0, max(longest, total / max(cores, 1)))}
    start = cluster.running_s if ray_running else cluster.start_s
    start += float(counts.sum()) * _BYTES * (n_features + 1) * cluster.ship_s
    order = largest_first(counts)
    largest = spent[order]
    found["task"] = Assignment("task", 0, start + max(longest, total / workers))
    if not task.model.splits or workers < 2 or not len(counts):
        return found
    exchange = exchange_seconds(
        task.model, counts, n_features, n_classes, fits_of(task), workers, cluster
    )[order]
    shared = np.maximum.accumulate(exchange[:, 0])
    own = np.cumsum(exchange[:, 1])
    split = np.cumsum(largest)

    def wall(k: int) -> float:
        rest = float(largest[k]) if k < len(largest) else 0.0
        whole = max(rest, (total - float(split[k - 1])) / workers)
        chunks = 1 if k < _CHUNKS else min(_CHUNKS, len(largest))
        sums = chunks * float(shared[k - 1]) + float(own[k - 1])
        return start + cluster.team_s + float(split[k - 1]) / workers + sums + whole

    useful = np.flatnonzero(largest * workers > total)
    best = min(range(1, len(useful) + 1), key=wall, default=0)
    if best and best < len(largest):
        found["grouped"] = Assignment("grouped", best, wall(best))
    found["data"] = Assignment("data", len(largest), wall(len(largest)))
    return found


def assign(plan: str, possible: dict[str, Assignment]) -> Assignment:
    """Returns the assignment of a plan; "auto" is the one that is predicted to end first.

    Args:
        plan: one of PLANS.
        possible: what `walls` returns.
    """
    if plan == "grouped" and "grouped" not in possible:
        return Assignment("grouped", 0, possible["task"].seconds)
    if plan != "auto":
        return possible[plan] if plan in possible else Assignment(plan, 0, float("nan"))
    whole = min((possible["local"], possible["task"]), key=lambda a: a.seconds)
    split = [possible[name] for name in ("grouped", "data") if name in possible]
    best = min(split, key=lambda a: a.seconds, default=whole)
    return best if best.seconds < _GAIN * whole.seconds else whole


def explain(
    results: pa.Table,
    task: Task,
    n_features: int,
    n_classes: int,
    workers: int,
    run: tuple[float, float] | None,
) -> pa.Table:
    """Returns predicted and measured seconds by plan and size of group, and of the whole run.

    Args:
        results: RESULT_FIELDS rows.
        task: what was done.
        n_features: features of the data.
        n_classes: classes of the data; 0 for regression.
        workers: actors that split groups shared.
        run: predicted and measured wall seconds of the run, if known.
    """
    final = results.filter(pc.is_null(results.column("fold")))
    rows = final.column("n_rows").to_numpy()
    group = results.column("group").to_numpy()
    spent = np.bincount(group, results.column("seconds").to_numpy(), int(group.max()) + 1)
    trained = np.isin(final.column("status").to_pylist(), ("ok", "not_converged"))
    predicted = fit_seconds(task.model, rows, n_features, fits_of(task)) * trained
    split = np.isin(final.column("plan").to_pylist(), ("data", "grouped"))
    if split.any() and workers > 1:
        asked, own = exchange_seconds(
            task.model, rows, n_features, n_classes, fits_of(task), workers, cluster_costs()
        ).T
        # Groups that are split together share the asking.
        shared = asked.max() * min(_CHUNKS, int(split.sum())) / split.sum()
        predicted = np.where(split, predicted / workers + shared + own, predicted)
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
    found = found.sort_by([("plan", "ascending"), ("rows_from", "ascending")])
    if run is None:
        return found
    whole = [["whole run"], [None], [len(rows)], [int(rows.sum())], [run[0]], [run[1]]]
    return pa.concat_tables([found, pa.table(whole, schema=found.schema)])
