"""Carries out an assignment: which chunks go where, for every kind of data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray import _plan
from kingpin_ray._driver import run_local, run_task
from kingpin_ray._errors import ParameterError
from kingpin_ray._plan import Assignment
from kingpin_ray._session import ray_is_running
from kingpin_ray._shuffle import Shuffled
from kingpin_ray._spill import Spilled
from kingpin_ray._split_driver import run_grouped, run_split

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kingpin_ray._driver import Chunk
    from kingpin_ray._engine import Outcome
    from kingpin_ray._run import Run


def assignment_of(
    plan: object, run: Run, num_actors: int | None, kept: Mapping[str, Any] | None = None
) -> Assignment:
    """Returns where the groups of a run are trained.

    Args:
        plan: the user's wish.
        run: what is to be trained.
        num_actors: as of the estimator.
        kept: what an unfinished store says of it; a resumed run splits the same groups, because
            sums over workers round differently.

    Raises:
        ParameterError: the plan is unknown, or the model cannot be split.
    """
    wish = _plan.check_plan(plan)
    frame, task = run.frame, run.task
    if wish == "data" and not task.model.splits:
        raise ParameterError(
            f"plan='data': {type(task.model).__name__} needs whole groups; use 'task'"
        )
    possible = _plan.walls(
        task,
        frame.counts,
        len(run.layout.features),
        0 if frame.classes is None else len(frame.classes),
        _plan.count_workers(num_actors),
        ray_is_running(),
        _plan.count_cores(num_actors),
    )
    if isinstance(frame, Shuffled):  # the rows are in Ray already
        possible["local"] = replace(possible["task"])
    if isinstance(frame, Spilled):
        return possible["local"]
    if kept is not None and wish == "auto":
        return Assignment(kept["plan"], int(kept["split"]), float("nan"))
    return _plan.assign(wish, possible)


def run_chunks(
    assignment: Assignment, run: Run, chunks: list[Chunk], num_actors: int | None
) -> Iterator[tuple[Chunk, Outcome]]:
    """Yields each chunk as it is finished, under an assignment."""
    frame, task = run.frame, replace(run.task, plan=assignment.plan)
    if assignment.plan == "local":
        assert not isinstance(frame, Shuffled)
        return run_local(frame, chunks, task, _plan.count_cores(num_actors))
    assert not isinstance(frame, Spilled)
    if assignment.plan == "data":
        return run_split(frame, chunks, task, num_actors)
    if assignment.plan == "grouped":
        big = np.zeros(len(frame.counts), bool)
        big[_plan.largest_first(frame.counts)[: assignment.split]] = True
        return run_grouped(frame, chunks, task, num_actors, big)
    return run_task(frame, chunks, task, num_actors)
