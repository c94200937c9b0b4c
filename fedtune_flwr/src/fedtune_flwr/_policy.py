"""The policy: from a client's metrics to its hyperparameters and its aggregation weight.

    coordinate_i = base + slopes @ z_i         (clipped to the space)
    weight_i     = n_i ** exponent * exp(weight_slopes @ z_i)

with z the scaled metrics, or in a grouped policy an indicator of the group whose centre is nearest.
All slopes 0 gives every client the same values.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ._cluster import nearest
from ._errors import SpaceError, StateError
from ._files import write_atomic
from ._metrics import NAMES, Scaler, as_matrix
from ._space import Scalar, SearchSpace

WEIGHT = "weight"
GROUP = "group-"
# A client's weight may change by at most this factor either way, whatever it reports.
MAX_LOG_WEIGHT = 5.0

Slopes = dict[tuple[str, str], float]

# Metrics that may steer an output when its dimension names none (measured to help somewhere;
# every other pair only widened the search).
DEFAULT_BY: dict[str, tuple[str, ...]] = {
    "lr": ("reference-loss", "label-entropy", "feature-norm"),
    "local-epochs": ("reference-loss",),
    "local-steps": ("reference-loss",),
    WEIGHT: ("reference-loss", "label-entropy"),
}


def steerable(space: SearchSpace, weight: bool) -> list[tuple[str, str]]:
    """The (output, metric) pairs that a tuner may give a slope to.

    Raises:
        SpaceError: a dimension names a metric that does not exist.
    """
    pairs: list[tuple[str, str]] = []
    for name, dimension in space.items():
        metrics = DEFAULT_BY.get(name, ()) if dimension.by is None else dimension.by
        for metric in metrics:
            if metric not in NAMES:
                raise SpaceError(f"{name}: by={metric!r} is no metric; allowed: {', '.join(NAMES)}")
            pairs.append((name, metric))
    if weight:
        pairs += [(WEIGHT, metric) for metric in DEFAULT_BY[WEIGHT]]
    return pairs


@dataclass(frozen=True)
class Assignment:
    """What one client gets.

    Attributes:
        values: hyperparameters, under their keys in the space.
        weight_factor: what the client's own aggregation weight is multiplied by.
    """

    values: dict[str, Scalar]
    weight_factor: float


@dataclass(frozen=True)
class Policy:
    """Hyperparameters as a function of a client's metrics.

    Attributes:
        space: the search space the values are clipped to.
        base: coordinates of a client whose metrics are all at the median.
        slopes: change of an output's coordinate per unit of a scaled metric.
        scaler: how metrics are centred and scaled.
        weight_exponent: aggregation weights grow with this power of the number of examples.
        origin: how the policy came to be: "default", "prior", "global" or "tuned".
        centroids: centres of the groups in scaled metrics; slopes are then on "group-1",
            "group-2", ..., relative to group 0. Empty where slopes are on metrics.
    """

    space: SearchSpace
    base: dict[str, float]
    scaler: Scaler
    slopes: Slopes = field(default_factory=dict)
    weight_exponent: float = 1.0
    origin: str = "default"
    centroids: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def constant(
        cls,
        space: SearchSpace,
        values: Mapping[str, Scalar] | None = None,
        scaler: Scaler | None = None,
    ) -> "Policy":
        """A policy that gives every client the same values; the middle of the space by default.

        Raises:
            SpaceError: values lie outside the space.
        """
        if values is None:
            base = {name: sum(d.bounds) / 2 for name, d in space.items()}
        else:
            base = space.coordinates(values)
        return cls(space, base, scaler or Scaler((0.0,) * len(NAMES), (1.0,) * len(NAMES)))

    @property
    def customizes(self) -> bool:
        """Whether two clients can get different values."""
        return any(self.slopes.values())

    def coordinates_many(self, matrix_KM: np.ndarray) -> dict[str, np.ndarray]:
        """The coordinate of every output for each row of metrics, clipped to the space."""
        z_KM = self.scaler.transform(matrix_KM)
        result: dict[str, np.ndarray] = {}
        for name, dimension in self.space.items():
            coordinate_K = np.full(len(z_KM), self.base[name]) + self.shift(name, z_KM)
            result[name] = np.clip(coordinate_K, *dimension.bounds)
        return result

    def log_weight_many(self, matrix_KM: np.ndarray) -> np.ndarray:
        """The logarithm of each client's weight factor, from its metrics alone."""
        shift_K = self.shift(WEIGHT, self.scaler.transform(matrix_KM))
        return np.asarray(np.clip(shift_K, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT))

    def shift(self, output: str, z_KM: np.ndarray) -> np.ndarray:
        """What the slopes add to an output's coordinate for each row of scaled metrics."""
        shift_K = np.zeros(len(z_KM))
        own = {metric: slope for (name, metric), slope in self.slopes.items() if name == output}
        if own and self.centroids:
            group_K = nearest(z_KM, self.centroids)
            for metric, slope in own.items():
                shift_K += slope * (group_K == int(metric.removeprefix(GROUP)))
            return shift_K
        for metric, slope in own.items():
            shift_K += slope * z_KM[:, NAMES.index(metric)]
        return shift_K

    def group_of(self, metrics: Mapping[str, float] | None) -> int:
        """The number of a client's group; 0 where the policy has none."""
        if not self.centroids:
            return 0
        return int(nearest(self.scaler.transform(as_matrix([metrics or {}])), self.centroids)[0])

    def assign(self, metrics: Mapping[str, float] | None) -> Assignment:
        """What a client with these metrics gets; None or missing numbers count as the median."""
        row = as_matrix([metrics or {}])
        coordinates = {k: float(v[0]) for k, v in self.coordinates_many(row).items()}
        factor = math.exp(float(self.log_weight_many(row)[0]))
        return Assignment(self.space.values_at(coordinates), factor)

    def scaled(self, strength: float) -> "Policy":
        """The same policy with every slope multiplied by `strength` (0 customizes nothing)."""
        slopes = {pair: slope * strength for pair, slope in self.slopes.items()}
        return replace(self, slopes=slopes)

    def explain(self, rows: Sequence[Mapping[str, float]] = ()) -> str:
        """The policy in words, with the range of values over some clients if given."""
        values = self.space.values_at(self.base)
        lines = [f"origin: {self.origin}"]
        for name, value in values.items():
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            lines.append(f"{name} = {text} at the median client{self._terms(name)}")
        lines.append(f"weight = n^{self.weight_exponent:.2g}{self._terms(WEIGHT)}")
        if rows:
            coordinates = self.coordinates_many(as_matrix(rows))
            for name, column in coordinates.items():
                low, high = (self.space[name].value(float(c)) for c in (column.min(), column.max()))
                lines.append(f"{name} over {len(rows)} clients: {low:.4g} to {high:.4g}")
        return "\n".join(lines)

    def _terms(self, output: str) -> str:
        terms = []
        for (name, metric), slope in self.slopes.items():
            if name != output or not slope:
                continue
            if metric in NAMES:
                per = f"per {self.scaler.scale[NAMES.index(metric)]:.2f} {metric}"
            else:
                per = f"in {metric}"
            terms.append(f", x exp({slope:+.2f} {per})")
        return "".join(terms)

    def to_dict(self) -> dict[str, Any]:
        """A form that JSON can hold; `from_dict` reads it."""
        return {
            "space": self.space.to_dict(),
            "base": self.base,
            "slopes": [[name, metric, slope] for (name, metric), slope in self.slopes.items()],
            "centre": list(self.scaler.centre),
            "scale": list(self.scaler.scale),
            "metrics": list(NAMES),
            "weight_exponent": self.weight_exponent,
            "origin": self.origin,
            "centroids": [list(centre) for centre in self.centroids],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Policy":
        """The policy that `to_dict` described.

        Raises:
            StateError: fields are missing, or it was written for other metrics.
        """
        try:
            if tuple(fields["metrics"]) != NAMES:
                raise StateError(
                    f"policy was written for metrics {fields['metrics']}, this version has {NAMES}"
                )
            return cls(
                SearchSpace.from_dict(fields["space"]),
                {str(k): float(v) for k, v in fields["base"].items()},
                Scaler(tuple(map(float, fields["centre"])), tuple(map(float, fields["scale"]))),
                {(str(o), str(m)): float(s) for o, m, s in fields["slopes"]},
                float(fields["weight_exponent"]),
                str(fields["origin"]),
                tuple(tuple(map(float, centre)) for centre in fields["centroids"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"not a policy: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Writes the policy as JSON, by a temporary name and a rename."""
        write_atomic(Path(path), json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> "Policy":
        """The policy in a file that `save` wrote.

        Raises:
            StateError: the file cannot be read or is not a policy.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StateError(f"policy file {path}: {error}") from error
        return cls.from_dict(fields)
