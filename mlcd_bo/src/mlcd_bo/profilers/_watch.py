"""Watches one trial until its speed is steady, it fails, or its time is up."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .._errors import InvalidInput
from .._explain import Z95
from .._prior import MODEL_NOISE
from .._steady import Speed, steady_speed
from .._trial import Limits, Status

_POLL_S = 0.05
# The words of an error, not of a remark about memory; log lines may have a prefix in brackets.
_OUT_OF_MEMORY = re.compile(
    r"""^\s*(?:[(\[][^)\]]*[)\]]:?\s*)*
        (?:[\w.]*(?:OutOfMemory|Memory)Error\b
        |(?:[\w.]*(?:Error|Exception)|what\(\)):.*(?:out\ of\ memory|can(?:no|')t\ allocate\ memory)
        |(?:(?:CUDA|HIP|XPU)\s+(?:error:\s*)?)?out\ of\ memory
        |.*std::bad_alloc
        |.*exitcode\s*:\s*-9\b)""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
# A trial of which more than this part is silence since the last step has stalled.
_MOST_SILENCE = 0.5


class Session(Protocol):
    """A running trial, as a watcher sees it."""

    @property
    def steps(self) -> int:
        """Steps that every rank has finished."""
        ...

    @property
    def samples(self) -> float:
        """Samples that all ranks have reported so far."""
        ...

    def poll(self) -> int | None:
        """Returns the exit status once the trial has ended by itself, None before."""
        ...

    def read(self) -> bool:
        """Takes in new step reports; True if steps were added."""
        ...

    def series(
        self, unit: Literal["steps", "samples"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the end of each step in seconds and its work in `unit`."""
        ...

    def silent_ranks(self) -> list[int]:
        """Returns the ranks that have reported no step."""
        ...

    def tail(self) -> str:
        """Returns the last lines that the script printed."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What watching came to.

    Attributes:
        speed: None for a failure.
        status: why it failed, or ``"ok"``.
        detail: in words.
        work_done: job units kept in a checkpoint.
    """

    speed: Speed | None
    status: Status = "ok"
    detail: str = ""
    work_done: float = 0.0


@dataclass(frozen=True)
class Watcher:
    """When to stop a trial.

    Attributes:
        probe_s: most seconds of measuring after the first step.
        startup_s: most seconds until the first step.
        least_s: seconds to measure at least.
        warmup_steps: steps never counted.
    """

    probe_s: float
    startup_s: float
    least_s: float
    warmup_steps: int

    def run(
        self,
        session: Session,
        limits: Limits,
        began: float,
        say: Callable[[str], None],
        before_s: float = 0.0,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Returns the outcome of a trial that began at this monotonic time.

        Args:
            session: the trial.
            limits: when to stop.
            began: monotonic time of its start.
            say: shows a line of progress.
            before_s: seconds charged before that, such as those of renting.
            interrupted: whether the trial is to be given up.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        end = began + min(limits.seconds, self.startup_s + self.probe_s)
        first: float | None = None
        last = began
        speed: Speed | None = None
        measured_s = 0.0
        while True:
            if interrupted():
                raise KeyboardInterrupt
            # First whether it has ended, then its reports: so none of the last ones is missed.
            ended = session.poll()
            now = time.monotonic()
            try:
                if session.read():
                    first, last = now if first is None else first, now
                    times, work = session.series(limits.unit)
                    speed = steady_speed(times, work, self.warmup_steps)
                    # What the steps span: silence after them is not measured.
                    measured_s = float(times[-1] - times[0])
            except InvalidInput as problem:
                return Outcome(None, "error", str(problem))
            if limits.unit == "samples" and session.steps >= 5 and not session.samples:
                return Outcome(None, "error", _NO_SAMPLES)
            say(_progress(speed, limits.unit, now - began))
            startup_s = before_s + (now if first is None else first) - began
            if speed is not None and self._enough(speed, limits, measured_s, startup_s):
                return Outcome(speed)
            if ended is not None:
                return self._ended(ended, speed, session)
            if first is None and now > began + self.startup_s:
                return Outcome(None, "timeout", _no_step(now - began, session))
            if now > end or (first is not None and now > first + self.probe_s):
                break
            time.sleep(_POLL_S)
        if speed is not None and first is not None:
            if now - last > _MOST_SILENCE * (now - first):
                return Outcome(None, "timeout", _stalled(now - last, session))
            detail = f"stopped at the time limit, half-width {speed.half_width:.1%}"
            return Outcome(speed, detail=detail)
        return Outcome(None, "timeout", _no_step(time.monotonic() - began, session))

    def _enough(self, speed: Speed, limits: Limits, measured_s: float, startup_s: float) -> bool:
        if measured_s < self.least_s:
            return False
        if speed.half_width <= limits.half_width or pays_no_more(speed, measured_s, startup_s):
            return True
        # Surely too slow to be chosen: the rest of the probe would be wasted.
        return speed.value * (1 + speed.half_width) < limits.useful_speed

    def _ended(self, code: int, speed: Speed | None, session: Session) -> Outcome:
        if code == 0 and speed is not None:
            return Outcome(speed, detail=f"the script ended by itself after {session.steps} steps")
        if code == 0:
            return Outcome(
                None,
                "error",
                f"the script ended after {session.steps} reported steps, too few to measure; let "
                "it train longer and call mlcd_bo.step(samples) after every step",
            )
        tail = session.tail()
        return Outcome(None, "oom" if _OUT_OF_MEMORY.search(tail) else "error", tail)


def pays_no_more(speed: Speed, measured_s: float, startup_s: float) -> bool:
    """Returns whether more of this probe tells less for its price than another trial would.

    A probe of t seconds after a start-up of S costs ``S + t`` and leaves a relative variance of
    ``v / t + m**2``, where m is what no probe removes (the model's own noise). Their product,
    what one unit of knowledge costs, is least at ``t = sqrt(S v) / m``; with ``v = t sem**2``
    that is reached once ``sem <= m sqrt(t / S)``. A dear start-up is thus used for longer.

    Args:
        speed: so far.
        measured_s: seconds since the first step.
        startup_s: seconds charged before it.
    """
    # As the interval has it, which also knows how few batches the error comes from.
    error = speed.half_width / Z95
    return error <= MODEL_NOISE * math.sqrt(measured_s / max(startup_s, 1e-9))


_NO_SAMPLES = (
    "mlcd_bo.step() was called without samples, but the job is stated in samples; pass the number "
    "of samples of the step, or give Job(total_steps=...)"
)


def _progress(speed: Speed | None, unit: str, seconds: float) -> str:
    if speed is None:
        return f"starting, {seconds:.0f} s"
    return f"{speed.value:,.4g} {unit}/s ± {speed.half_width:.1%}, {seconds:.0f} s"


def _stalled(silent_s: float, session: Session) -> str:
    return (
        f"no step of all ranks was reported for {silent_s:.0f} s after {session.steps} steps: "
        f"the script hangs, or one of its ranks has ended\n{session.tail()}"
    )


def _no_step(waited_s: float, session: Session) -> str:
    if session.steps:
        return f"only {session.steps} steps in {waited_s:.0f} s, too few to measure; raise probe_s"
    silent = session.silent_ranks()
    if session.samples and silent:
        return (
            f"ranks {silent} reported no step within {waited_s:.0f} s while the others did; "
            f"call mlcd_bo.step on every rank\n{session.tail()}"
        )
    return (
        f"no step was reported within {waited_s:.0f} s; call mlcd_bo.step(samples) after every "
        f"optimizer step, or raise startup_s\n{session.tail()}"
    )
