"""The training job: how much work, by what script, under which batch policy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal

from ._check import positive, words
from ._errors import InvalidInput

BatchPolicy = Literal["global", "local"]


@dataclass(frozen=True)
class Job:
    """An amount of training work and the script that does it.

    Give exactly one of `total_steps` and `total_samples`. Steps can only be compared between
    deployments while the global batch stays the same; with a fixed *local* batch every added
    worker makes a step larger, so there `total_samples` is the only honest measure.

    Attributes:
        total_steps: optimizer steps of the whole job.
        total_samples: training samples of the whole job, over all workers.
        script: the training script, for profilers that start one.
        args: its command-line arguments.
        checkpoint: the file or folder in which the script keeps its progress and from which it
            goes on. Given, a profiler that can asks the script to save at the end of a trial,
            and what the trial has trained counts: less is left for the next one and for the
            final run. The script then must end when `mlcd_bo.step` returns False.
        batch_policy: ``"global"`` if the global batch stays fixed when workers are added,
            ``"local"`` if the batch of each worker does.

    Raises:
        InvalidInput: none or both of the totals, a total that is not above zero, steps under a
            local batch policy, an unknown policy, arguments that are one string, or a script
            or checkpoint that is no path.
    """

    total_steps: float | None = None
    total_samples: float | None = None
    script: str | PathLike[str] | None = None
    args: Sequence[str] = ()
    checkpoint: str | PathLike[str] | None = None
    batch_policy: BatchPolicy = "global"

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", words("args", self.args))
        if (self.total_steps is None) == (self.total_samples is None):
            raise InvalidInput(
                "give exactly one of total_steps and total_samples, got "
                f"total_steps={self.total_steps!r}, total_samples={self.total_samples!r}"
            )
        if self.total_steps is not None:
            object.__setattr__(self, "total_steps", positive("total_steps", self.total_steps))
        if self.total_samples is not None:
            samples = positive("total_samples", self.total_samples)
            object.__setattr__(self, "total_samples", samples)
        for name in ("script", "checkpoint"):
            path = getattr(self, name)
            if path is not None and not isinstance(path, str | PathLike):
                raise InvalidInput(f"{name} must be a path, got {path!r}")
        if self.batch_policy not in ("global", "local"):
            raise InvalidInput(
                f"batch_policy must be 'global' or 'local', got {self.batch_policy!r}"
            )
        if self.batch_policy == "local" and self.total_steps is not None:
            raise InvalidInput(
                "total_steps cannot be compared between deployments under "
                "batch_policy='local', where a step grows with the number of workers; "
                "give total_samples"
            )

    @property
    def unit(self) -> Literal["steps", "samples"]:
        """What `work` counts and speeds are per second of."""
        return "steps" if self.total_steps is not None else "samples"

    @property
    def work(self) -> float:
        """The whole job, in `unit`."""
        total = self.total_steps if self.total_steps is not None else self.total_samples
        return float(total if total is not None else math.nan)
