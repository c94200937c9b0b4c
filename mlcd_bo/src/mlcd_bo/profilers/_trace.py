"""Profiles nothing: replays measured runs, charging what a real trial would have cost."""

import math
from collections.abc import Callable
from os import PathLike

import numpy as np

from .._catalog import Catalog
from .._check import at_least_zero, positive, whole
from .._errors import InvalidInput, TraceError
from .._job import Job
from .._space import Deployment, SearchSpace
from .._trace import Trace, read_traces
from .._trial import Limits, Observation, TrialCost


class TraceProfiler:
    """Answers from a table of measured runs, to try a search before paying for one.

    Each trial is charged the whole of `trial_cost` in hours and in dollars, failures too.

    Args:
        trace: a CSV file (columns: see `read_traces`), or a `Trace`.
        job: which job of the file; may be left out if there is only one.
        trial_cost: seconds of a trial.
        noise: relative standard error of a measured speed.
        seed: of the noise; a deployment gives the same answer every time.
        catalog: sizes of the instance types, if the file's names are known.
        kept_s: seconds of each trial whose training is carried on to the next and counts.

    Attributes:
        space: the deployments of the table.

    Raises:
        TraceError: the file or a cell of it is not usable.
        InvalidInput: the noise, the seed or `kept_s` is out of its range.

    Example:
        >>> profiler = TraceProfiler("runs.csv")  # doctest: +SKIP
        >>> search = DeploymentOptimizer(
        ...     profiler.space, Scenario.fastest(), profiler.job_of(hours=3)
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        trace: str | PathLike[str] | Trace,
        job: str | None = None,
        *,
        trial_cost: Callable[[Deployment], float] | None = None,
        noise: float = 0.0,
        seed: int = 0,
        catalog: Catalog | None = None,
        kept_s: float = 0.0,
    ) -> None:
        if not isinstance(trace, Trace):
            traces = read_traces(trace, catalog, None if job is None else [job])
            if len(traces) > 1:
                raise TraceError(
                    f"trace {str(trace)!r} holds {len(traces)} jobs; name one with job= (--job), "
                    f"such as {next(iter(traces))!r} (`mlcd replay FILE --list-jobs` prints all)"
                )
            (trace,) = traces.values()
        if not 0.0 <= noise < 1.0:
            raise InvalidInput(f"noise must be at least 0 and below 1, got {noise!r}")
        if not math.isfinite(trace.fastest):
            raise TraceError(f"job {trace.job!r} has no run that gave a speed; all of them failed")
        self.trace = trace
        self.space: SearchSpace = trace.space
        self.noise = float(noise)
        self.seed = whole("seed", seed)
        self.kept_s = at_least_zero("kept_s", kept_s)
        self._trial_cost = trial_cost or TrialCost()

    def job_of(self, hours: float) -> Job:
        """Returns a job of such a length that its fastest run takes `hours`."""
        return Job(total_samples=self.trace.fastest * positive("hours", hours) * 3600)

    def trial_seconds(self, deployment: Deployment) -> float:
        """Returns the most seconds that a trial lasts, which is what it is charged."""
        return float(self._trial_cost(deployment))

    def profile(self, deployment: Deployment, limits: Limits) -> Observation:
        """Returns the measured speed of `deployment`, with noise, at the price of a trial.

        Raises:
            TraceError: the deployment was not measured.
        """
        cell = self.trace.cells.get(deployment)
        if cell is None:
            raise TraceError(
                f"{deployment} is not in the trace of job {self.trace.job!r}; search over the "
                "profiler's own `space`"
            )
        seconds = self.trial_seconds(deployment)
        dollars = deployment.price_per_hour * seconds / 3600
        if cell.status != "ok":
            return Observation.failed(cell.status, seconds, dollars, "failed in the trace")
        rng = np.random.default_rng([self.seed, self.space.position(deployment)])
        speed = cell.speed * float(np.exp(self.noise * rng.standard_normal()))
        work = cell.speed * min(self.kept_s, seconds)
        return Observation(speed, speed * self.noise, seconds, dollars, work_done=work)
