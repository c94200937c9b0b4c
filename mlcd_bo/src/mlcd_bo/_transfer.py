"""Learning from earlier jobs, as far as they rank deployments like this one does.

The idea of the ranking-weighted ensemble (RGPE, M. Feurer et al., arXiv 1802.02219): each earlier
job's model is weighted by how often it ranks the deployments measured so far best of all, this
job's own model (judged without the point it predicts) among them. Here the ensemble gives the
prior mean, so that measurements always have the last word.

Legend: N deployments, n observations, J models (the own prior first), S samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._catalog import Catalog, InstanceType
from ._errors import InvalidInput
from ._model import Posterior, ScalingModel
from ._prior import MODEL_NOISE, Array
from ._space import Deployment, SearchSpace
from ._trial import Trial

_SAMPLES = 256
# With fewer observations there is no ranking to judge by: half stays with the own prior.
_FEWEST = 3


@dataclass(frozen=True)
class EarlierJob:
    """The measured speeds of a job that was searched before.

    Attributes:
        deployments: what was measured.
        speeds: work per second.
        sems: standard errors of the speeds.
    """

    deployments: tuple[Deployment, ...]
    speeds: tuple[float, ...]
    sems: tuple[float, ...]

    @classmethod
    def of(cls, trials: Sequence[Trial]) -> "EarlierJob":
        """Returns what the successful ones of `trials` measured.

        Raises:
            InvalidInput: none of them gave a speed.
        """
        good = [t for t in trials if t.observation.status == "ok"]
        if not good:
            raise InvalidInput("earlier holds a job of which no trial gave a speed; leave it out")
        return cls(
            tuple(t.deployment for t in good),
            tuple(t.observation.speed for t in good),
            tuple(t.observation.speed_sem for t in good),
        )

    def as_rows(self) -> list[dict[str, Any]]:
        """Returns plain values that JSON can hold."""
        return [
            {
                "type": {k: v for k, v in vars(d.instance_type).items() if v is not None},
                "count": d.count,
                "spot": d.spot,
                "knobs": [list(knob) for knob in d.knobs],
                "speed": speed,
                "sem": sem,
            }
            for d, speed, sem in zip(self.deployments, self.speeds, self.sems, strict=True)
        ]

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> "EarlierJob":
        """Returns the job of `as_rows`."""
        deployments = tuple(
            Deployment(
                InstanceType(**row["type"]),
                row["count"],
                row["spot"],
                tuple((name, value) for name, value in row["knobs"]),
            )
            for row in rows
        )
        return cls(deployments, tuple(r["speed"] for r in rows), tuple(r["sem"] for r in rows))


class TransferModel(ScalingModel):
    """The scaling model with a prior mean that leans on earlier jobs where they fit.

    Args:
        space: the deployments.
        earlier: jobs searched before; their instance types may be others.

    Attributes:
        weights: of the own prior and of each earlier job at the last `posterior`, shape J.
    """

    def __init__(self, space: SearchSpace, earlier: Sequence[EarlierJob]) -> None:
        super().__init__(space)
        self._plain_mean = self.prior_mean
        beliefs = [_belief(space, job) for job in earlier]
        self._means = np.stack([self._plain_mean, *[b.mean for b in beliefs]])
        self._sds = np.stack([np.zeros(len(space)), *[b.sd for b in beliefs]])
        self.weights = self._first_weights()

    def _first_weights(self) -> Array:
        others = len(self._means) - 1
        return np.array([0.5, *[0.5 / others] * others]) if others else np.ones(1)

    def posterior(self, rows: NDArray[np.int64], values: Array, noise: Array) -> Posterior:
        """Returns the beliefs after observing; see `ScalingModel.posterior`."""
        self.weights = self._weights(rows, values, noise)
        # Only shapes are shared between jobs: each mean is moved to this job's level.
        level = self._means[:, rows] if len(rows) else self._means
        centred = self._means - level.mean(axis=1, keepdims=True)
        self.prior_mean = self.weights @ centred
        return super().posterior(rows, values, noise)

    def _weights(self, rows: NDArray[np.int64], values: Array, noise: Array) -> Array:
        n = len(rows)
        if len(self._means) == 1 or n < _FEWEST:
            return self._first_weights()
        rng = np.random.default_rng(n)
        mean = self._means[:, rows].copy()
        sd = self._sds[:, rows].copy()
        self.prior_mean = self._plain_mean
        for left_out in range(n):
            kept = np.arange(n) != left_out
            own = super().posterior(rows[kept], values[kept], noise[kept])
            mean[0, left_out], sd[0, left_out] = own.mean[rows[left_out]], own.sd[rows[left_out]]
        draws = mean[:, None, :] + sd[:, None, :] * rng.standard_normal((len(mean), _SAMPLES, n))
        order = np.sign(values[:, None] - values[None, :])
        # Each draw's pairs that stand the other way round: J x S
        wrong = (np.sign(draws[..., :, None] - draws[..., None, :]) != order).sum(axis=(-2, -1))
        # An earlier job that is mostly worse than the own model at its worst only dilutes.
        useless = np.median(wrong, axis=1) > np.quantile(wrong[0], 0.95)
        useless[0] = False
        best = np.where(useless[:, None], np.iinfo(np.int64).max, wrong)
        winners = best == best.min(axis=0)
        return np.asarray((winners / winners.sum(axis=0)).mean(axis=1))


def _belief(space: SearchSpace, job: EarlierJob) -> Posterior:
    """Returns what an earlier job believes of each deployment of `space`."""
    kinds = {d.instance_type.name: d.instance_type for d in space}
    names = {name for name, _ in space[0].knobs}
    for deployment in job.deployments:
        if {name for name, _ in deployment.knobs} != names:
            raise InvalidInput(
                f"earlier holds {deployment}, whose knobs are not those of the search space"
            )
        kinds.setdefault(deployment.instance_type.name, deployment.instance_type)
    # A type of the same name is the same machine, whatever it cost then.
    moved = [Deployment(kinds[d.instance_type.name], d.count, False, d.knobs) for d in
             job.deployments]  # fmt: skip
    both = SearchSpace.of(Catalog(kinds.values()), dict.fromkeys([*space, *moved]))
    speed, sem = np.array(job.speeds), np.array(job.sems)
    rows = np.array([both.position(d) for d in moved], dtype=np.int64)
    belief = ScalingModel(both).posterior(rows, -np.log(speed), (sem / speed) ** 2 + MODEL_NOISE**2)
    return Posterior(belief.mean[: len(space)], belief.sd[: len(space)])
