"""What the trials of a search say: speeds, failures, and what those rule out.

Legend: N deployments, n successful trials.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._job import Job
from ._prior import MODEL_NOISE, Array
from ._space import Deployment, SearchSpace
from ._trial import Observation, Trial


@dataclass(frozen=True)
class Evidence:
    """The trials of a search as numbers.

    Attributes:
        rows: deployments of the successful trials, length n.
        values: their ``log(seconds per unit of work)``, length n.
        noise: variances of `values`, length n.
        pace: measured seconds per unit, shape N; NaN where nothing was measured.
        pace_sd: standard error of log `pace` by the measurements alone, shape N.
        failed: ruled out by a failure, shape N.
        tried: deployments in the order tried, failures included.
        seconds: seconds of the successful trials, length n.
        kept_part: the part of `seconds` in which they have trained what is carried on, mean.
    """

    rows: NDArray[np.int64]
    values: Array
    noise: Array
    pace: Array
    pace_sd: Array
    failed: NDArray[np.bool_]
    tried: NDArray[np.int64]
    seconds: Array
    kept_part: float

    @classmethod
    def of(cls, space: SearchSpace, job: Job, trials: Sequence[Trial]) -> "Evidence":
        """Returns the evidence of `trials`."""
        good = [t for t in trials if t.observation.status == "ok"]
        rows = np.array([space.position(t.deployment) for t in good], dtype=np.int64)
        speed = np.array([t.observation.speed for t in good])
        sem = np.array([t.observation.speed_sem for t in good])
        noise = (sem / speed) ** 2 + MODEL_NOISE**2
        values = -np.log(speed)
        weight = np.bincount(rows, 1.0 / noise, len(space))
        total = np.bincount(rows, values / noise, len(space))
        with np.errstate(invalid="ignore"):
            pace = np.exp(total / weight)
            pace_sd = np.sqrt(np.bincount(rows, (sem / speed / noise) ** 2, len(space))) / weight
        failed, tried = _failures(space, job, trials)
        return cls(
            rows=rows,
            values=values,
            noise=noise,
            pace=pace,
            pace_sd=pace_sd,
            # What worked once is not ruled out by a failure beside it.
            failed=failed & ~np.isfinite(pace),
            tried=tried,
            seconds=np.array([t.observation.seconds for t in good]),
            kept_part=float(np.mean([_kept_part(t.observation) for t in good])) if good else 0.0,
        )

    def part_of(self, most_seconds: Array) -> float:
        """Returns which part of their largest duration trials have taken, 1 before the first.

        Args:
            most_seconds: largest duration of a trial of each deployment, shape N.
        """
        if not len(self.rows):
            return 1.0
        return float(np.clip(np.mean(self.seconds / most_seconds[self.rows]), 0.02, 1.0))


def _failures(
    space: SearchSpace, job: Job, trials: Sequence[Trial]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Returns what failures rule out, and the rows tried in order."""
    failed = np.zeros(len(space), dtype=bool)
    tried: list[int] = []
    preempted: set[int] = set()
    for trial in trials:
        row = space.position(trial.deployment)
        tried.append(row)
        status = trial.observation.status
        if status == "oom":
            # A fixed global batch leaves less for each worker when there are more of them; a
            # fixed local batch needs the same memory on any number of machines.
            everywhere = job.batch_policy == "local"
            failed |= [
                _same_type(d, trial) and (everywhere or d.count <= trial.deployment.count)
                for d in space
            ]
        elif status == "quota":
            failed |= [
                _same_type(d, trial)
                and d.count >= trial.deployment.count
                and d.spot == trial.deployment.spot
                for d in space
            ]
        elif status == "preempted":
            # Once is bad luck; it may be tried again. Twice is how this market is.
            failed[row] |= row in preempted
            preempted.add(row)
        elif status in ("error", "timeout"):
            failed[row] = True
    return failed, np.array(tried, dtype=np.int64)


def _kept_part(seen: Observation) -> float:
    return min(seen.work_done / (seen.speed * seen.seconds), 1.0) if seen.seconds > 0 else 0.0


def _same_type(deployment: Deployment, trial: Trial) -> bool:
    return deployment.instance_type.name == trial.deployment.instance_type.name
