"""Policies as points of the unit cube, which is where tuners search.

Columns: the coordinates of the space for the client that gets most, then the exponent of the
aggregation weight, then one slope for each (output, metric) pair in which the clients differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ._metrics import METRICS, NAMES, Scaler
from ._policy import GROUP, WEIGHT, Policy, Slopes, steerable
from ._space import SearchSpace


@dataclass(frozen=True)
class _Prior:
    """Range and prior of a slope, per natural unit of the metric (nat, unit of entropy, ...)."""

    low: float
    prior: float
    high: float


# From the measured studies: what helped, and how far slopes could go before they harmed.
_LOSS_STEP = _Prior(-1.5, -1.2, 0.5)
_PRIORS: dict[tuple[str, str], _Prior] = {
    (WEIGHT, "reference-loss"): _Prior(-2.0, -1.5, 0.5),
    (WEIGHT, "label-entropy"): _Prior(-1.0, 2.0, 4.0),
    ("lr", "reference-loss"): _LOSS_STEP,
    ("local-epochs", "reference-loss"): _LOSS_STEP,
    ("local-steps", "reference-loss"): _LOSS_STEP,
    ("lr", "label-entropy"): _Prior(-0.5, 0.0, 1.0),
    ("lr", "feature-norm"): _Prior(-1.5, -1.0, 0.5),
}
# Slopes a user asked for with `by=`: one unit of coordinate per spread of the metric, no prior.
_ASKED = 1.0
# However large the spread, a slope moves a client at one spread by at most e^3.
_STEEPEST = 3.0


class PolicyCube:
    """Translates between policies and points of the unit cube.

    Args:
        space: the search space.
        scaler: scales the metrics of the clients; pairs in which its spread is at the metric's
            minimum are left out, since the clients do not differ there.
        weight: whether aggregation weights may be changed.
        centroids: centres of groups; slopes are then on groups instead of metrics.
        metrics_KM: the clients' metrics, as `as_matrix` gives them.
    """

    def __init__(
        self,
        space: SearchSpace,
        scaler: Scaler,
        *,
        weight: bool,
        centroids: tuple[tuple[float, ...], ...] = (),
        metrics_KM: np.ndarray | None = None,
    ) -> None:
        self.space = space
        self.scaler = scaler
        self.weight = weight
        self.centroids = centroids
        rows = np.zeros((0, len(NAMES))) if metrics_KM is None else metrics_KM
        self.z_KM = scaler.transform(rows)
        spread = dict(zip(NAMES, scaler.scale, strict=True))
        allowed = steerable(space, weight)
        self.space_is_steerable = bool(allowed)
        differing = [pair for pair in allowed if spread[pair[1]] > METRICS[pair[1]].spread]
        by_metric = {pair: _limits(pair, spread[pair[1]]) for pair in differing}
        limits = by_metric if not centroids else _by_group(allowed, by_metric, centroids)
        self.pairs = list(limits)
        self._bounds: list[tuple[float, float]] = [d.bounds for d in space.values()]
        if weight:
            self._bounds.append((0.0, 1.0))
        self._first_slope = len(self._bounds)
        self.prior: Slopes = {}
        for pair, (low, prior, high) in limits.items():
            self._bounds.append((low, high))
            self.prior[pair] = prior

    @property
    def dimensions(self) -> int:
        """Columns of a point."""
        return len(self._bounds)

    def no_slopes(self) -> dict[int, float]:
        """The columns to hold, and at what, so that every client gets the same values."""
        return {
            self._first_slope + i: self._to_unit(self._first_slope + i, 0.0)
            for i in range(len(self.pairs))
        }

    def policy(self, point: np.ndarray, origin: str = "tuned") -> Policy:
        """The policy at a point of shape (dimensions,)."""
        numbers = [
            low + float(u) * (high - low)
            for u, (low, high) in zip(point, self._bounds, strict=True)
        ]
        base = dict(zip(self.space, numbers, strict=False))
        exponent = numbers[len(self.space)] if self.weight else 1.0
        slopes = dict(zip(self.pairs, numbers[self._first_slope :], strict=True))
        # The point that stands for 0 may miss it by a rounding error.
        slopes = {pair: slope for pair, slope in slopes.items() if abs(slope) > 1e-9}
        policy = Policy(self.space, base, self.scaler, slopes, exponent, origin, self.centroids)
        return self._anchored(policy) if slopes else policy

    def _anchored(self, policy: Policy) -> Policy:
        """The policy lowered so that no client of the population exceeds the point's value.

        A point's coordinate is that of the client that gets most. So a slope on a setting that is
        good for all only ever lowers some clients: without this it raised others past the
        learning rate at which training diverges.
        """
        base = {
            name: value - float(policy.shift(name, self.z_KM).max(initial=0.0))
            if any(output == name for output, _ in policy.slopes)
            else value
            for name, value in policy.base.items()
        }
        return replace(policy, base=base)

    def point(self, base: np.ndarray, slopes: Mapping[tuple[str, str], float]) -> np.ndarray:
        """The point of `base` with its slopes replaced; pairs not given get 0."""
        point = np.array(base, dtype=np.float64)
        for i, pair in enumerate(self.pairs):
            column = self._first_slope + i
            point[column] = self._to_unit(column, slopes.get(pair, 0.0))
        return point

    def suggestions(self) -> list[Slopes]:
        """Slopes worth trying first: parts of the prior, alone and together."""
        loss = {p: s for p, s in self.prior.items() if self.centroids or p[1] == "reference-loss"}
        parts = [
            {p: s for p, s in loss.items() if p[0] == WEIGHT},
            {p: s for p, s in loss.items() if p[0] != WEIGHT},
            loss,
            {p: s / 2 for p, s in loss.items()},
            {p: s for p, s in self.prior.items() if p == (WEIGHT, "label-entropy")},
            {p: s for p, s in self.prior.items() if p[1] == "feature-norm"},
            dict(self.prior),
        ]
        kept: list[Slopes] = []
        for part in parts:
            nonzero = {p: s for p, s in part.items() if s}
            if nonzero and nonzero not in kept:
                kept.append(nonzero)
        return kept

    def _to_unit(self, column: int, number: float) -> float:
        low, high = self._bounds[column]
        return min(max((number - low) / (high - low), 0.0), 1.0)


def _limits(pair: tuple[str, str], scale: float) -> tuple[float, float, float]:
    """Lowest slope, prior and highest, per spread of the metric."""
    known = _PRIORS.get(pair)
    if known is None:
        return -_ASKED, 0.0, _ASKED
    low, high = max(known.low * scale, -_STEEPEST), min(known.high * scale, _STEEPEST)
    return low, min(max(known.prior * scale, low), high), high


def _by_group(
    allowed: list[tuple[str, str]],
    by_metric: dict[tuple[str, str], tuple[float, float, float]],
    centroids: tuple[tuple[float, ...], ...],
) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Limits of each output in each group but the first, whose priors follow those by metric."""
    centres = np.asarray(centroids)
    limits = {}
    for output in dict.fromkeys(name for name, _ in allowed):
        for group in range(1, len(centres)):
            away = centres[group] - centres[0]
            prior = sum(
                slope * away[NAMES.index(metric)]
                for (name, metric), (_, slope, _) in by_metric.items()
                if name == output
            )
            prior = float(min(max(prior, -_STEEPEST), _STEEPEST))
            limits[output, f"{GROUP}{group}"] = (-_STEEPEST, prior, _STEEPEST)
    return limits
