"""Cuts the data into chunks of whole groups and has them trained, here or on Ray actors."""

from __future__ import annotations

import logging
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._engine import Outcome, Task, failed_outcome, fit_block, fit_sums
from kingpin_ray._errors import ResourceError
from kingpin_ray._plan import largest_first
from kingpin_ray._session import actor_count, ray_session
from kingpin_ray._shuffle import Shuffled
from kingpin_ray._streamed import Streamed
from kingpin_ray._worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kingpin_ray._frame import Frame
    from kingpin_ray._spill import Spilled

_log = logging.getLogger(__name__)

# A group costs about this many rows on top of its own.
_ROWS_PER_GROUP = 50
_CHUNKS = 32
_CHUNK_ROWS = (20_000, 100_000)
_START_TIMEOUT_S = 120.0
_FAILED_STARTS = 10
_CALLS_PER_ACTOR = 2
_TRIES = 2


@dataclass(frozen=True)
class Chunk:
    """Whole groups that are trained in one call.

    Attributes:
        number: its place in the run.
        groups: ids, largest group first.
        tries: how often a worker died over it.
    """

    number: int
    groups: NDArray[np.int64]
    tries: int = 0


def make_chunks(counts: NDArray[np.int64]) -> list[Chunk]:
    """Returns chunks of about equal work, the largest groups first.

    They depend on the data alone, never on the number of workers: a group always meets the same
    neighbours, so its result has the same bytes under every plan and after every restart.
    """
    order = largest_first(counts)
    cost = counts[order] + _ROWS_PER_GROUP
    low, high = _CHUNK_ROWS
    size = int(np.clip(cost.sum() // _CHUNKS, low, high))
    which = (np.cumsum(cost) - cost) // size
    starts = np.flatnonzero(np.diff(which, prepend=-1))
    return [Chunk(i, part) for i, part in enumerate(np.split(order, starts[1:]))]


def remaining(chunks: list[Chunk], outcomes: list[Outcome]) -> list[Chunk]:
    """Returns what is left of the chunks when some outcomes are already there."""
    if not outcomes:
        return chunks
    done = np.unique(np.concatenate([o.results.column("group").to_numpy() for o in outcomes]))
    left = []
    for chunk in chunks:
        groups = chunk.groups[~np.isin(chunk.groups, done)]
        if len(groups):
            left.append(replace(chunk, groups=groups))
    return left


def run_local(
    frame: Frame | Spilled, chunks: list[Chunk], task: Task, threads: int = 1
) -> Iterator[tuple[Chunk, Outcome]]:
    """Yields each chunk trained in this process, in order.

    Args:
        frame: the data.
        chunks: what is to be trained.
        task: what to do.
        threads: chunks to train at a time, where the model's kernels let go of Python's lock.
    """
    task = replace(task, plan="local")
    threads = min(threads, len(chunks)) if task.model.threads else 1
    if threads <= 1:
        with one_thread():
            for chunk in chunks:
                yield chunk, _fit_here(frame, chunk, task)
        return

    def fit(chunk: Chunk) -> Outcome:
        # OpenMP and BLAS keep their number of threads for each thread that calls them.
        with one_thread():
            return _fit_here(frame, chunk, task)

    frame.warm()
    waiting = deque(chunks)
    running: deque[tuple[Chunk, Future[Outcome]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            while waiting or running:
                # No more in flight than can work, so that memory holds few chunks.
                while waiting and len(running) <= threads:
                    chunk = waiting.popleft()
                    running.append((chunk, pool.submit(fit, chunk)))
                chunk, future = running.popleft()
                yield chunk, future.result()
        finally:
            for _, future in running:
                future.cancel()


def _fit_here(frame: Frame | Spilled, chunk: Chunk, task: Task) -> Outcome:
    if isinstance(frame, Streamed):
        return fit_sums(frame.sums(chunk.groups), task)
    return fit_block(frame.block(chunk.groups), task)


@contextmanager
def one_thread() -> Iterator[None]:
    """Holds numerical libraries to one thread: matrices of one group are too small to share."""
    from threadpoolctl import threadpool_limits

    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 1
    with threadpool_limits(1):
        if before != 1 and torch is not None:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if before != 1 and torch is not None:
                torch.set_num_threads(before)


def run_task(
    frame: Frame | Shuffled, chunks: list[Chunk], task: Task, num_actors: int | None
) -> Iterator[tuple[Chunk, Outcome]]:
    """Yields each chunk as some Ray actor finishes it.

    Actors take the next largest chunk when they are free, so one slow chunk delays nothing else.
    Each chunk's rows go to one actor, once. When an actor dies another is started in its place and
    what it had is done again; a chunk that kills its worker twice is halved until the group that
    does it stands alone and is recorded as an error.

    Raises:
        ResourceError: the cluster lacks the CPUs, or no actor starts.
    """
    task = replace(task, plan="task")
    with ray_session(num_actors) as ray:
        if isinstance(frame, Shuffled) and not frame.scattered:
            frame.scatter(chunks)
        count = actor_count(ray, num_actors, len(chunks))
        pool = _Pool(ray, count)
        try:
            yield from _dispatch(ray, pool, frame, chunks, task)
        finally:
            pool.close()


class _Pool:
    """The living actors: those starting, and what each has been given."""

    def __init__(self, ray: Any, count: int) -> None:
        self.ray = ray
        self.remote = ray.remote(Worker).options(num_cpus=1, max_restarts=0, max_task_retries=0)
        self.starting: dict[Any, Any] = {}
        self.given: dict[Any, list[Any]] = {}
        self.failed_starts = 0
        for _ in range(count):
            self.start()

    def start(self) -> None:
        actor = self.remote.remote()
        self.starting[actor.ready.remote()] = actor

    def started(self, ref: Any) -> None:
        """Takes an actor into service, or starts another when it died over starting.

        Raises:
            ResourceError: actor after actor fails.
        """
        actor = self.starting.pop(ref)
        try:
            self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            self.failed_starts += 1
            if self.failed_starts > _FAILED_STARTS:
                raise ResourceError(
                    f"{self.failed_starts} actors in a row died over starting: {error}"
                ) from error
            self.start()
            return
        self.failed_starts = 0
        self.given[actor] = []

    def replace(self, actor: Any) -> list[Any]:
        """Returns the calls that a lost actor had, the oldest first, and starts another actor."""
        lost = self.given.pop(actor)
        # It may be alive behind a broken connection; then it must not keep its CPU.
        self.ray.kill(actor)
        self.start()
        return lost

    def close(self) -> None:
        for actor in [*self.given, *self.starting.values()]:
            self.ray.kill(actor)


def _dispatch(
    ray: Any, pool: _Pool, frame: Frame | Shuffled, chunks: list[Chunk], task: Task
) -> Iterator[tuple[Chunk, Outcome]]:
    waiting = deque(chunks)
    shared_task = ray.put(task)
    running: dict[Any, tuple[Any, Chunk]] = {}
    while waiting or running:
        # Two calls an actor: the next block travels while this one is trained.
        for depth in range(_CALLS_PER_ACTOR):
            for actor, given in pool.given.items():
                if waiting and len(given) == depth:
                    chunk = waiting.popleft()
                    if isinstance(frame, Shuffled):
                        ref = actor.fit_pieces.remote(shared_task, *frame.arguments(chunk))
                    else:
                        ref = actor.fit.remote(ray.put(frame.block(chunk.groups)), shared_task)
                    given.append(ref)
                    running[ref] = (actor, chunk)
        timeout = None if running else _START_TIMEOUT_S
        ready, _ = ray.wait([*running, *pool.starting], num_returns=1, timeout=timeout)
        if not ready:
            raise ResourceError(
                f"none of {len(pool.starting)} actors started within {_START_TIMEOUT_S:.0f} s; "
                "see `ray status` for what the cluster is short of. Groups that a store holds are "
                "kept: go on with resume()"
            )
        for ref in ready:
            if ref in pool.starting:
                pool.started(ref)
                continue
            if ref not in running:  # it went with an actor that this loop has replaced
                continue
            actor, chunk = running[ref]
            try:
                outcome = ray.get(ref)
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError as error:
                _log.warning("a worker died on chunk %d: %s", chunk.number, error)
                suspect, *innocent = pool.replace(actor)
                waiting.extendleft(running.pop(other)[1] for other in reversed(innocent))
                yield from _again(frame, running.pop(suspect)[1], task, waiting, str(error))
                continue
            del running[ref]
            pool.given[actor].remove(ref)
            yield chunk, outcome


def _again(
    frame: Frame | Shuffled, chunk: Chunk, task: Task, waiting: deque[Chunk], error: str
) -> Iterator[tuple[Chunk, Outcome]]:
    """Queues a chunk whose worker died, or yields it as failed: one group that did it often."""
    tries = chunk.tries + 1
    if tries < _TRIES:
        waiting.append(replace(chunk, tries=tries))
    elif len(chunk.groups) == 1:
        message = f"the worker died {tries} times on this group: {error.splitlines()[0]}"
        yield chunk, failed_outcome(frame.block(chunk.groups), task, message)
    else:
        middle = len(chunk.groups) // 2
        for part in (chunk.groups[:middle], chunk.groups[middle:]):
            waiting.append(Chunk(chunk.number, part, tries=_TRIES - 1))
