"""Small made-up worlds with a known truth, and a profiler that lives in one."""

import math
from collections.abc import Mapping

from mlcd_bo import Catalog, Deployment, InstanceType, Limits, Observation, SearchSpace


def two_types(counts=(1, 2, 4, 8)) -> SearchSpace:
    return SearchSpace(
        Catalog([InstanceType("small", 0.5, vcpus=4), InstanceType("big", 1.6, vcpus=16)]), counts
    )


class World:
    """Profiles by formula: speeds fall short of linear; failures as told."""

    def __init__(
        self,
        space: SearchSpace,
        scaling: float = 0.8,
        power: float = 0.8,
        seconds: float = 180.0,
        failures: Mapping[str, str] | None = None,
        bumps: Mapping[str, float] | None = None,
    ) -> None:
        self.space = space
        self.scaling = scaling
        self.power = power
        self.seconds = seconds
        self.failures = dict(failures or {})
        self.bumps = dict(bumps or {})
        self.seen: list[Deployment] = []

    def speed(self, deployment: Deployment) -> float:
        price = deployment.instance_type.price
        log_speed = self.power * math.log(price) + self.scaling * math.log(deployment.count)
        return 1000.0 * math.exp(log_speed + self.bumps.get(deployment.key, 0.0))

    def trial_seconds(self, deployment: Deployment) -> float:
        return self.seconds + 20.0 * deployment.count

    def profile(self, deployment: Deployment, limits: Limits) -> Observation:
        self.seen.append(deployment)
        seconds = self.trial_seconds(deployment)
        dollars = seconds / 3600 * deployment.price_per_hour
        if deployment.key in self.failures:
            return Observation.failed(self.failures[deployment.key], seconds, dollars, "as told")
        return Observation(self.speed(deployment), 0.0, seconds, dollars)
