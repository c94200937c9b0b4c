"""The heterogeneity metrics: at most six numbers a client reports, each clipped and rounded.

The table `METRICS` is the allow-list. Nothing outside it is sent by a client or read by a server.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._errors import MetricsError


@dataclass(frozen=True)
class Metric:
    """One number a client may report.

    Attributes:
        low: smallest value that is sent.
        high: largest value that is sent.
        step: values are rounded to multiples of this.
        spread: smallest spread over clients that is treated as a difference between them.
        reveals: what somebody who sees the value learns about the client's data.
    """

    low: float
    high: float
    step: float
    spread: float
    reveals: str


METRICS: dict[str, Metric] = {
    "log-size": Metric(
        0.0, 16.0, math.log(2) / 2, 0.35, "the number of examples, within a factor of 1.19"
    ),
    "label-entropy": Metric(
        0.0, 1.0, 0.05, 0.12, "how evenly labels are spread; 0 says all examples share one label"
    ),
    "reference-loss": Metric(
        0.0, 12.0, 0.05, 0.3, "how far the labels are from what the server's model expects"
    ),
    "gradient-norm": Metric(
        0.0, 1.5, 0.05, 0.1, "how unlike the server's proxy data the label mix is"
    ),
    "feature-norm": Metric(
        -8.0, 12.0, 0.05, 0.1, "the logarithm of the root mean square of the inputs"
    ),
}
NAMES: tuple[str, ...] = tuple(METRICS)


def clip_and_round(name: str, value: float) -> float:
    """The value as it may be sent: inside the declared range, on the declared grid."""
    metric = METRICS[name]
    clipped = min(max(value, metric.low), metric.high)
    rounded = round(clipped / metric.step) * metric.step
    # The last multiple of the step may lie just past the bound.
    return float(min(max(round(rounded, 6), metric.low), metric.high))


def allowed(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a client as they may be sent: allow-listed, finite, clipped, rounded.

    Args:
        values: what a profile function returned. Names of the allow-list may be left out.

    Raises:
        MetricsError: a name is not on the allow-list, or a value is not a number.
    """
    unknown = [name for name in values if name not in METRICS]
    if unknown:
        raise MetricsError(
            f"profile returned {unknown!r}, which may not leave the client; "
            f"allowed: {', '.join(NAMES)}"
        )
    sent: dict[str, float] = {}
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise MetricsError(f"profile returned {name}={value!r}; expected a number") from error
        if math.isfinite(number):
            sent[name] = clip_and_round(name, number)
    return sent


@dataclass(frozen=True)
class Received:
    """The metrics of one client as the server uses them.

    Attributes:
        values: every name of the allow-list; NaN where the client gave nothing usable.
        problems: what was wrong, one short text each; empty for a good report.
    """

    values: dict[str, float]
    problems: tuple[str, ...]


def received(values: Mapping[str, Any]) -> Received:
    """Reads a client's report without trusting it: unusable numbers become NaN, large ones clip."""
    kept: dict[str, float] = {}
    problems: list[str] = []
    for name, metric in METRICS.items():
        value = values.get(name)
        if value is None:
            problems.append(f"{name} missing")
            kept[name] = math.nan
        elif isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(f"{name} is a {type(value).__name__}")
            kept[name] = math.nan
        elif not math.isfinite(value):
            problems.append(f"{name} is {value}")
            kept[name] = math.nan
        elif not metric.low <= value <= metric.high:
            problems.append(f"{name}={value:g} outside [{metric.low:g}, {metric.high:g}]")
            kept[name] = clip_and_round(name, float(value))
        else:
            kept[name] = float(value)
    extra = [name for name in values if name not in METRICS]
    if extra:
        problems.append(f"{len(extra)} value(s) outside the allow-list ignored")
    return Received(kept, tuple(problems))


def as_matrix(rows: Iterable[Mapping[str, float]]) -> np.ndarray:
    """Metrics as a float64 matrix, a row a client, columns in the order of `NAMES`."""
    matrix = [[float(row.get(name, math.nan)) for name in NAMES] for row in rows]
    return np.asarray(matrix, dtype=np.float64).reshape(-1, len(NAMES))


@dataclass(frozen=True)
class Scaler:
    """Centres and scales metrics by the median and spread of a population of clients.

    A spread below the metric's declared minimum is raised to it, so that differences
    which mean nothing are not blown up. Scaled values are clipped to [-3, 3].
    """

    centre: tuple[float, ...]
    scale: tuple[float, ...]

    @classmethod
    def fit(cls, matrix_KM: np.ndarray) -> "Scaler":
        """The scaler of a population; a column with no number at all becomes constant."""
        centre, scale = [], []
        for column, name in zip(matrix_KM.T, NAMES, strict=True):
            finite = column[np.isfinite(column)]
            middle = float(np.median(finite)) if len(finite) else 0.0
            # Root mean square about the median: a small group of odd clients still counts.
            spread = float(np.sqrt(np.mean((finite - middle) ** 2))) if len(finite) else 0.0
            centre.append(middle)
            scale.append(max(spread, METRICS[name].spread))
        return cls(tuple(centre), tuple(scale))

    def transform(self, matrix_KM: np.ndarray) -> np.ndarray:
        """Scaled metrics, same shape; NaN becomes 0, which is the median."""
        # Bounded first: a policy must not overflow on numbers that no check has seen.
        bounded = np.clip(matrix_KM, -1e6, 1e6)
        z = (bounded - np.asarray(self.centre)) / np.asarray(self.scale)
        known = np.nan_to_num(z, nan=0.0, posinf=3.0, neginf=-3.0)
        return np.asarray(np.clip(known, -3.0, 3.0))


def label_entropy(counts: Sequence[int] | np.ndarray) -> float:
    """Entropy of label counts over that of equal counts: 0 for one class, 1 for a flat mix."""
    weights = np.asarray(counts, dtype=np.float64)
    if len(weights) < 2 or weights.sum() <= 0:
        return 0.0
    p = weights[weights > 0] / weights.sum()
    return max(0.0, float(-(p * np.log(p)).sum() / math.log(len(weights))))
