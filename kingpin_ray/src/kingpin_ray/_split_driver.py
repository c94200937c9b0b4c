"""Runs groups whose rows are split over workers, and rebuilds the workers when one is lost."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kingpin_ray._engine import Outcome, Task, failed_outcome
from kingpin_ray._errors import KingpinError, ResourceError
from kingpin_ray._gap import TIMEOUT_S, SplitWorker
from kingpin_ray._session import actor_count, ray_session
from kingpin_ray._shuffle import Shuffled

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from kingpin_ray._driver import Chunk
    from kingpin_ray._frame import Frame

_log = logging.getLogger(__name__)

_TRIES = 2


def run_split(
    frame: Frame | Shuffled, chunks: list[Chunk], task: Task, num_actors: int | None
) -> Iterator[tuple[Chunk, Outcome]]:
    """Yields each chunk, trained by all workers together, each holding some rows of every group.

    Rows of Parquet files stay with the worker that their row groups fall to; no chunk of them may
    be scattered already.

    When a worker dies the others give up at their timeout or at once; all are replaced and the
    chunk is done again, twice at most.

    Raises:
        ResourceError: the cluster lacks the CPUs, or the workers cannot find each other.
    """
    with ray_session(num_actors) as ray:
        world = actor_count(ray, num_actors, 1 << 30)
        if isinstance(frame, Shuffled) and not frame.scattered:
            frame.scatter(chunks)
        team: list[Any] = []
        try:
            for chunk in chunks:
                for attempt in range(_TRIES):
                    if not team:
                        team = assemble_team(ray, world)
                    refs = [_give(ray, frame, chunk, task, team, rank) for rank in range(world)]
                    try:
                        found = _all_or_first_error(ray, refs)
                    except ray.exceptions.RayError as error:
                        dismiss(ray, team)
                        team = []
                        cause = getattr(error, "cause", None)
                        if isinstance(cause, KingpinError):
                            raise cause from None
                        _log.warning("workers lost on chunk %d: %s", chunk.number, error)
                        if attempt + 1 == _TRIES:
                            reason = f"the workers failed {_TRIES} times: {error}"
                            yield chunk, failed_outcome(frame.block(chunk.groups), task, reason)
                        continue
                    outcome = found[0][0]
                    assert outcome is not None
                    yield chunk, outcome
                    break
            if team:
                ray.get([worker.leave.remote() for worker in team], timeout=TIMEOUT_S)
        finally:
            dismiss(ray, team)


def assemble_team(ray: Any, world: int) -> list[Any]:
    """Returns actors that found each other and can sum.

    Raises:
        ResourceError: they could not.
    """
    # With a GPU for each worker NCCL sums where the gradients are; else gloo does on the CPU.
    backend = "nccl" if ray.cluster_resources().get("GPU", 0) >= world > 1 else "gloo"
    remote = ray.remote(SplitWorker).options(
        num_cpus=1, num_gpus=1 if backend == "nccl" else 0, max_restarts=0
    )
    team = [remote.remote() for _ in range(world)]
    try:
        address = ray.get(team[0].ready.remote(), timeout=TIMEOUT_S)
        joins = [
            worker.join.remote(rank, world, address, backend) for rank, worker in enumerate(team)
        ]
        ray.get(joins, timeout=TIMEOUT_S)
    except ray.exceptions.RayError as error:
        dismiss(ray, team)
        cause = getattr(error, "cause", None)
        if isinstance(cause, KingpinError):
            raise cause from None
        raise ResourceError(
            f"{world} workers could not form a group within {TIMEOUT_S:.0f} s: {error}"
        ) from error
    return team


def _all_or_first_error(ray: Any, refs: list[Any]) -> list[Any]:
    """Returns all results; raises as soon as one call fails, while the others may still wait."""
    waiting = list(refs)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        ray.get(ready)
    return list(ray.get(refs))


def dismiss(ray: Any, team: list[Any]) -> None:
    """Ends actors."""
    for worker in team:
        ray.kill(worker)


def _give(
    ray: Any, frame: Frame | Shuffled, chunk: Chunk, task: Task, team: list[Any], rank: int
) -> Any:
    if isinstance(frame, Shuffled):
        return team[rank].fit_pieces.remote(task, *frame.arguments(chunk, rank, len(team)))
    return team[rank].fit.remote(ray.put(frame.part(chunk.groups, rank, len(team))), task)


def run_grouped(
    frame: Frame | Shuffled,
    chunks: list[Chunk],
    task: Task,
    num_actors: int | None,
    big: NDArray[np.bool_],
) -> Iterator[tuple[Chunk, Outcome]]:
    """Yields groups too big for one worker, split and in step, then all others, placed whole.

    Args:
        frame: the data.
        chunks: all that is to be trained.
        task: what to do.
        num_actors: as of the estimator.
        big: (G,) the groups to split.
    """
    from kingpin_ray._driver import run_task

    split, whole = [], []
    for chunk in chunks:
        mask = big[chunk.groups]
        if mask.any():
            split.append(replace(chunk, groups=chunk.groups[mask]))
        if not mask.all():
            # A chunk's rows are found by its number.
            number = chunk.number + (len(big) if mask.any() else 0)
            whole.append(replace(chunk, groups=chunk.groups[~mask], number=number))
    with ray_session(num_actors) as ray:
        actor_count(ray, num_actors, 1 << 30)
        if isinstance(frame, Shuffled):
            frame.scatter([*split, *whole])
        if split:
            yield from run_split(frame, split, replace(task, plan="grouped"), num_actors)
        if whole:
            yield from run_task(frame, whole, task, num_actors)
