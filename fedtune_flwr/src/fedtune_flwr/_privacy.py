"""Optional noise on the metrics, added on the client before anything is sent."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ._errors import ConfigError
from ._metrics import METRICS, clip_and_round


@dataclass(frozen=True)
class Noise:
    """Local differential privacy for the metrics of one client.

    Every metric lies in a declared range, so replacing the client's whole data set changes it by
    at most the width of the range. That width is the sensitivity; `epsilon` is divided equally
    over the metrics that are sent, by basic composition. Ranges are wide, so small epsilons drown
    the metrics: at `epsilon=5` little but the coarse difference between clients is left.

    Attributes:
        epsilon: total privacy loss of one answer, above 0.
        mechanism: "laplace", pure epsilon; or "gaussian", (epsilon, delta) with epsilon below 1
            for each metric.
        delta: for "gaussian", divided like epsilon.

    Raises:
        ConfigError: epsilon or delta is out of range, or the mechanism is unknown.

    Source: Dwork and Roth, The Algorithmic Foundations of Differential Privacy, theorems 3.6
    (Laplace mechanism), 3.22 (Gaussian mechanism) and 3.16 (composition).
    """

    epsilon: float
    mechanism: Literal["laplace", "gaussian"] = "laplace"
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ConfigError(f"epsilon={self.epsilon!r} must be a finite number above 0")
        if self.mechanism not in ("laplace", "gaussian"):
            raise ConfigError(
                f"mechanism={self.mechanism!r} is unknown; allowed: 'laplace', 'gaussian'"
            )
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta={self.delta!r} must be between 0 and 1")

    def scale(self, name: str, count: int) -> float:
        """Laplace scale, or Gaussian standard deviation, of one of `count` metrics.

        Raises:
            ConfigError: the Gaussian mechanism is asked for epsilon of 1 or more a metric, where
                its guarantee does not hold.
        """
        width = METRICS[name].high - METRICS[name].low
        share = self.epsilon / count
        if self.mechanism == "laplace":
            return width / share
        if share >= 1:
            raise ConfigError(
                f"epsilon={self.epsilon!r} over {count} metrics is {share:g} each; the Gaussian "
                "mechanism needs less than 1 each. Use mechanism='laplace' or a smaller epsilon"
            )
        return width * math.sqrt(2 * math.log(1.25 * count / self.delta)) / share

    def apply(
        self, values: Mapping[str, float], rng: np.random.Generator | None = None
    ) -> dict[str, float]:
        """The values with noise, clipped and rounded again (which costs no privacy).

        Args:
            values: allow-listed metrics.
            rng: None takes fresh operating-system entropy, as a client must.
        """
        rng = rng or np.random.default_rng(secrets.randbits(128))
        noisy = {}
        for name, value in values.items():
            scale = self.scale(name, len(values))
            draw = rng.laplace if self.mechanism == "laplace" else rng.normal
            noisy[name] = clip_and_round(name, value + float(draw(0.0, scale)))
        return noisy
