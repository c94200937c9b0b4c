"""Runs the trials of one batch, side by side, and keeps saying that they still run."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass

from ._errors import InvalidInput
from ._space import Deployment
from ._store import Store
from ._trial import Limits, Observation, Profiler

_HEARTBEAT_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """How one trial ended.

    Attributes:
        seconds: wall time until it returned or raised.
        observation: what it returned, None if it raised.
        problem: what it raised, None if it returned.
    """

    seconds: float
    observation: Observation | None = None
    problem: BaseException | None = None


def run_batch(
    profiler: Profiler,
    deployments: Sequence[Deployment],
    limits: Sequence[Limits],
    done: Callable[[int, Outcome], None],
) -> BaseException | None:
    """Profiles the deployments side by side; returns the first thing that was raised, if any.

    Args:
        profiler: measures one deployment at a time.
        deployments: at least one.
        limits: of each.
        done: called in this thread with the place of each trial and its outcome, as soon as it
            has ended, raising ones too.
    """
    if len(deployments) == 1:
        # No thread: an interrupt then reaches the profiler, which ends its trial.
        only = _timed(profiler, deployments[0], limits[0])
        done(0, only)
        return only.problem
    interrupt: BaseException | None = None
    problems: list[BaseException] = []
    places: dict[Future[Outcome], int] = {}

    def take(future: Future[Outcome]) -> None:
        outcome = future.result()
        if outcome.problem is not None:
            problems.append(outcome.problem)
        done(places.pop(future), outcome)

    try:
        with ThreadPoolExecutor(len(deployments), "mlcd-trial") as pool:
            try:
                for place, pair in enumerate(zip(deployments, limits, strict=True)):
                    places[pool.submit(_timed, profiler, *pair)] = place
                for future in as_completed(list(places)):
                    take(future)
            except (KeyboardInterrupt, SystemExit):
                # Only here is it known: threads get no interrupt, and the pool waits for them.
                getattr(profiler, "interrupt", lambda: None)()
                raise
    except BaseException as raised:
        interrupt = raised
    # An interrupt left the pool only after its trials had ended: they are paid for.
    for future in list(places):
        if not future.cancelled():
            take(future)
    return interrupt or (problems[0] if problems else None)


@contextmanager
def kept_alive(
    store: Store | None, rows: Sequence[int], batch: int, began: float
) -> Iterator[None]:
    """Writes to the store that these trials run, and every second that they still do.

    Args:
        store: where; None writes nothing.
        rows: their deployments.
        batch: of all of them.
        began: Unix time of their start.
    """
    if store is None:
        yield
        return
    store.start(list(rows), batch, began)
    start, ended = time.monotonic(), threading.Event()

    def beat() -> None:
        while not ended.wait(_HEARTBEAT_S):
            # Time that has passed, not the clock's: that may be set back or forth meanwhile.
            store.alive(began + time.monotonic() - start)

    thread = threading.Thread(target=beat, name="mlcd-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _timed(profiler: Profiler, deployment: Deployment, limits: Limits) -> Outcome:
    start = time.monotonic()
    try:
        seen = profiler.profile(deployment, limits)
        if not isinstance(seen, Observation):
            raise InvalidInput(
                f"profile({deployment}) of {type(profiler).__name__} must return an Observation, "
                f"got {seen!r}"
            )
    except BaseException as problem:
        # An interrupt, too: what it cost until then is charged before it goes on its way.
        return Outcome(time.monotonic() - start, problem=problem)
    return Outcome(time.monotonic() - start, seen)
