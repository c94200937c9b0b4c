"""Looking at train replies before the inner strategy averages them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    Bulyan,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from ._space import Scalar
from ._wire import APPLIED_RECORD, METRICS_RECORD

# Their aggregate does not follow the reported weights, or follows them for another purpose.
_UNWEIGHTED = (Bulyan, FedMedian, FedTrimmedAvg, FedXgbBagging, FedXgbCyclic, MultiKrum, QFedAvg)


def chain(strategy: Strategy) -> list[Strategy]:
    """A strategy and those it wraps, outermost first."""
    found = [strategy]
    while isinstance(inner := getattr(found[-1], "strategy", None), Strategy):
        found.append(inner)
    return found


def weight_key(strategy: Strategy) -> str:
    """The key of the aggregation weight in the metrics of a reply."""
    for each in chain(strategy):
        if isinstance(each, FedAvg):
            return each.weighted_by_key
    return "num-examples"


def weights_matter(strategy: Strategy) -> bool:
    """Whether changing the weights of replies is allowed and has an effect.

    Differential-privacy wrappers compute their noise for equal weights, so there it is not.
    """
    strategies = chain(strategy)
    if any(type(each).__name__.startswith("DifferentialPrivacy") for each in strategies):
        return False
    return isinstance(strategies[-1], FedAvg) and not isinstance(strategies[-1], _UNWEIGHTED)


def fault(content: RecordDict, key: str) -> str | None:
    """What would poison the average, in a few words; None for a sound reply."""
    for record in content.array_records.values():
        for name, array in record.items():
            values = array.numpy()
            if values.dtype.kind in "fc" and not np.isfinite(values).all():
                return f"array {name!r} holds NaN or infinite values"
    for metrics in content.metric_records.values():
        weight = metrics.get(key)
        if weight is None or isinstance(weight, list):
            continue
        if not math.isfinite(weight) or weight < 0:
            return f"weight {key}={weight!r} is not a finite number of 0 or more"
    return None


def take_own(content: RecordDict) -> tuple[ConfigRecord | None, ConfigRecord | None]:
    """Removes this plugin's records from a reply; returns (metrics, applied)."""
    taken: list[ConfigRecord | None] = []
    for key in (METRICS_RECORD, APPLIED_RECORD):
        record = content.config_records.get(key)
        if key in content:
            del content[key]
        taken.append(record)
    return taken[0], taken[1]


def mismatch(sent: Mapping[str, Scalar], applied: Mapping[str, Any]) -> str | None:
    """How the echoed values differ from those sent; None where every sent value was applied."""
    wrong = []
    for name, value in sent.items():
        echoed = applied.get(name)
        if isinstance(value, float) and isinstance(echoed, int | float):
            same = math.isclose(value, echoed, rel_tol=1e-6, abs_tol=1e-12)
        else:
            same = value == echoed
        if not same:
            wrong.append(f"{name}: sent {value!r}, applied {echoed!r}")
    return "; ".join(wrong) or None


def reweight(reply: Message, key: str, exponent: float, factor: float) -> None:
    """Sets the reply's weight n to n^exponent * factor; other metrics stay as they are."""
    for name, metrics in reply.content.metric_records.items():
        n = metrics.get(key)
        if n is None or isinstance(n, list):
            continue
        weight = (float(n) ** exponent if n > 0 else 0.0) * factor
        rebuilt = MetricRecord(dict(metrics.items()))
        rebuilt[key] = weight
        content = RecordDict(dict(reply.content.items()))
        content[name] = rebuilt
        reply.content = content
        return
