"""What profiling a deployment gives and costs, and the protocol that profilers follow."""

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args, runtime_checkable

from ._check import at_least_zero, positive, real, whole
from ._errors import InvalidInput
from ._space import Deployment

Status = Literal["ok", "oom", "quota", "preempted", "error", "timeout"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Limits:
    """How long and how exactly a profiler may measure.

    Attributes:
        seconds: most seconds the trial may last, start-up included.
        half_width: stop once the 95 % confidence half-width is below this part of the speed.
        useful_speed: a speed (job units per second) below which this deployment can no longer
            be chosen; a profiler may stop early once it is surely slower. 0 turns that off.
        unit: what speeds are per second of: the job's samples or its steps.
        checkpoint: the job's checkpoint, if what a trial trains is to be kept.

    Raises:
        InvalidInput: a field is out of its range.
    """

    seconds: float = 600.0
    half_width: float = 0.02
    useful_speed: float = 0.0
    unit: Literal["steps", "samples"] = "samples"
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        positive("seconds", self.seconds)
        positive("half_width", self.half_width)
        if self.unit not in ("steps", "samples"):
            raise InvalidInput(f"unit must be 'steps' or 'samples', got {self.unit!r}")
        at_least_zero("useful_speed", self.useful_speed)


@dataclass(frozen=True)
class Observation:
    """What one trial measured and cost.

    A failed trial has no speed (NaN) and still costs; it is never a speed of zero.

    Attributes:
        speed: job units (samples or steps) per second of the whole cluster in steady state;
            NaN unless `status` is ``"ok"``.
        speed_sem: standard error of `speed`, same unit; NaN unless `status` is ``"ok"``.
        seconds: wall time the trial took, start-up and tear-down included.
        dollars: what the trial cost.
        status: ``"ok"``, ``"oom"`` (out of memory), ``"quota"`` (not that many machines to be
            had), ``"preempted"``, ``"error"`` (the script failed) or ``"timeout"`` (no steady
            speed within the limit).
        detail: why, in words: the end of the log for a failure.
        work_done: job units that are kept because a checkpoint was carried on.

    Raises:
        InvalidInput: a field is out of its range.
    """

    speed: float
    speed_sem: float
    seconds: float
    dollars: float
    status: Status = "ok"
    detail: str = field(default="", compare=False)
    work_done: float = 0.0

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise InvalidInput(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")
        speed = real("speed", self.speed)
        if self.status == "ok":
            if not (math.isfinite(speed) and speed > 0):
                raise InvalidInput(
                    f"speed of an 'ok' trial must be finite and above 0, got {self.speed!r}; a "
                    "trial that measured no speed has status 'error' or 'timeout'"
                )
            error = at_least_zero("speed_sem", self.speed_sem)
        else:
            if not math.isnan(speed):
                raise InvalidInput(
                    f"speed of a {self.status!r} trial must be NaN, got {self.speed!r}: a failure "
                    "is not a slow run"
                )
            speed = error = math.nan
        # Plain values only: what is kept and sent on is JSON.
        object.__setattr__(self, "speed", speed)
        object.__setattr__(self, "speed_sem", error)
        object.__setattr__(self, "detail", str(self.detail))
        for name in ("seconds", "dollars", "work_done"):
            object.__setattr__(self, name, at_least_zero(name, getattr(self, name)))

    @classmethod
    def failed(
        cls, status: Status, seconds: float, dollars: float, detail: str = ""
    ) -> "Observation":
        """Returns the observation of a trial that measured no speed."""
        return cls(math.nan, math.nan, seconds, dollars, status, detail)


@dataclass(frozen=True)
class Trial:
    """One deployment that was tried, what came of it, and the price it was tried at.

    Attributes:
        deployment: what was tried.
        observation: what came of it.
        batch: trials of one batch ran side by side; their hours count once (the longest).
            None: a batch of its own.
        price_per_hour: dollars per hour of the cluster when it was tried; None takes the
            deployment's.
        began: Unix time of its start, or None.

    Raises:
        InvalidInput: a field is of the wrong kind or out of its range.
    """

    deployment: Deployment
    observation: Observation
    batch: int | None = None
    price_per_hour: float | None = None
    began: float | None = None

    def __post_init__(self) -> None:
        for name, kind in (("deployment", Deployment), ("observation", Observation)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise InvalidInput(f"{name} must be of type {kind.__name__}, got {value!r}")
        if self.batch is not None:
            object.__setattr__(self, "batch", whole("batch", self.batch))
        if self.price_per_hour is not None:
            price = positive("price_per_hour", self.price_per_hour, unit=" (dollars)")
            object.__setattr__(self, "price_per_hour", price)
        if self.began is not None:
            object.__setattr__(self, "began", at_least_zero("began", self.began))


@dataclass(frozen=True)
class TrialCost:
    """How long a trial may last at most, as planned before it runs.

    Attributes:
        startup_s: seconds until the script trains, on one machine.
        per_machine_s: further start-up seconds for each machine.
        probe_s: most seconds of measuring.
    """

    startup_s: float = 60.0
    per_machine_s: float = 20.0
    probe_s: float = 120.0

    def __post_init__(self) -> None:
        positive("probe_s", self.probe_s)
        for name in ("startup_s", "per_machine_s"):
            at_least_zero(name, getattr(self, name))

    def __call__(self, deployment: Deployment) -> float:
        """Returns the most seconds that a trial of `deployment` may last."""
        return self.startup_s + self.per_machine_s * deployment.count + self.probe_s


@runtime_checkable
class Profiler(Protocol):
    """Runs the job on a deployment for a little while and says how fast it was.

    A profiler may also have a method ``trial_seconds(deployment) -> float``: the most seconds
    a trial of that deployment lasts. `DeploymentOptimizer.run` plans with it. And a method
    ``interrupt()``, called from another thread when trials side by side are to be given up.
    """

    def profile(self, deployment: Deployment, limits: Limits) -> Observation:
        """Returns the speed of `deployment` and what finding it took.

        A trial that fails returns an observation that says so; it raises only what stops the
        whole search (a missing script, a lost connection that will not come back).
        """
        ...
