"""Looking at train replies before the inner strategy averages them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
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

# Their arrays are trees, which no client returns in the shape it received.
_TREES = (FedXgbBagging, FedXgbCyclic)
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
            try:
                values = array.numpy()
            except (TypeError, ValueError, EOFError, OSError) as error:
                return f"array {name!r} cannot be read ({error})"
            # Clients of the older interface leave the shape empty.
            if array.shape and tuple(array.shape) != values.shape:
                return f"array {name!r} claims shape {tuple(array.shape)}, holds {values.shape}"
            if values.dtype.kind in "fc" and not np.isfinite(values).all():
                return f"array {name!r} holds NaN or infinite values"
    for metrics in content.metric_records.values():
        weight = metrics.get(key)
        if weight is None or isinstance(weight, list):
            continue
        if not math.isfinite(weight) or weight < 0:
            return f"weight {key}={weight!r} is not a finite number of 0 or more"
    return None


def weight_of(content: RecordDict, key: str) -> float | None:
    """The weight in a reply, where it has one."""
    for metrics in content.metric_records.values():
        weight = metrics.get(key)
        if weight is not None and not isinstance(weight, list):
            return float(weight)
    return None


def odd_evaluations(contents: Sequence[RecordDict], key: str) -> list[str | None]:
    """What keeps each evaluate reply from being averaged with the others; None for sound ones.

    Numbers that are not finite, and metrics or a weight that all but it have. What all replies
    share is the inner strategy's affair.
    """
    found: list[str | None] = []
    for content in contents:
        values = [
            (name, value)
            for metrics in content.metric_records.values()
            for name, given in metrics.items()
            for value in (given if isinstance(given, list) else [given])
        ]
        wrong = [f"{name}={value!r}" for name, value in values if not math.isfinite(value)]
        weight = weight_of(content, key)
        if weight is not None and weight < 0:
            wrong.append(f"{key}={weight!r}")
        found.append(f"evaluation returned {', '.join(wrong)}" if wrong else None)
    layouts = {i: _evaluation_layout(contents[i]) for i, p in enumerate(found) if p is None}
    if layouts:
        usual = Counter(layouts.values()).most_common(1)[0][0]
        for i, layout in layouts.items():
            if layout != usual:
                found[i] = "its evaluation metrics are not those of the others"
    return found


def _evaluation_layout(content: RecordDict) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((name, tuple(sorted(m))) for name, m in content.metric_records.items())


def averages_arrays(strategy: Strategy) -> bool:
    """Whether the innermost strategy averages arrays in Flower's own code.

    That code asks every reply for the same arrays and a weight. A strategy of another author may
    well accept other replies.
    """
    innermost = chain(strategy)[-1]
    own = type(innermost).aggregate_train.__module__.startswith("flwr.")
    return own and isinstance(innermost, FedAvg) and not isinstance(innermost, _TREES)


def odd_ones(
    contents: Sequence[RecordDict], key: str, sent: ArrayRecord | None
) -> list[str | None]:
    """What sets each reply apart from the others, so that they cannot be averaged with it.

    A single such reply makes Flower's strategies raise. What two or more replies all share, and
    no other reply contradicts, is how this federation works, or a mistake that the inner strategy
    should name: it is let through.

    Args:
        contents: sound replies of one round.
        key: the key of the aggregation weight.
        sent: the arrays that were sent, whose names and shapes are expected back.

    Returns:
        An entry a reply: a few words, or None for one that goes with the rest.
    """
    found = [_incomplete(content, key) for content in contents]
    whole = [i for i, problem in enumerate(found) if problem is None]
    if len(contents) > 1 and not whole:
        return [None] * len(contents)
    layouts = {i: _array_layout(contents[i]) for i in whole}
    expected = _expected([shapes for _, shapes in layouts.values()], sent)
    alike = []
    for i, (_, shapes) in layouts.items():
        if shapes == expected:
            alike.append(i)
        else:
            names = sorted({name for name, _ in shapes ^ expected})
            found[i] = f"arrays {', '.join(names)} are missing, new or of another shape"
    # Flower looks for one and the same record and for the same metrics in all replies.
    records = {i: (layouts[i][0], _metric_layout(contents[i])) for i in alike}
    usual = Counter(records.values()).most_common(1)
    for i, layout in records.items():
        if layout != usual[0][0]:
            found[i] = f"records or metrics {_names(layout)}, the others {_names(usual[0][0])}"
    return found


def _incomplete(content: RecordDict, key: str) -> str | None:
    """What a reply lacks that every reply to an averaging strategy has."""
    for kind, records in (
        ("ArrayRecord", content.array_records),
        ("MetricRecord", content.metric_records),
    ):
        if len(records) != 1:
            return f"it holds {len(records)} records of type {kind}, not one"
    weight = next(iter(content.metric_records.values())).get(key)
    if weight is None or isinstance(weight, list):
        return f"its metrics have no number {key!r}"
    return None


_Shapes = frozenset[tuple[str, tuple[int, ...]]]


def _shapes(arrays: ArrayRecord) -> _Shapes:
    return frozenset(
        (name, tuple(array.shape) or array.numpy().shape) for name, array in arrays.items()
    )


def _array_layout(content: RecordDict) -> tuple[str, _Shapes]:
    name, arrays = next(iter(content.array_records.items()))
    return name, _shapes(arrays)


def _metric_layout(content: RecordDict) -> tuple[str, tuple[str, ...]]:
    name, metrics = next(iter(content.metric_records.items()))
    return name, tuple(sorted(metrics))


def _names(layout: tuple[str, tuple[str, tuple[str, ...]]]) -> str:
    return f"{layout[0]!r}, {layout[1][0]!r}: {', '.join(layout[1][1])}"


def _expected(layouts: Sequence[_Shapes], sent: ArrayRecord | None) -> _Shapes:
    """The layout that was sent, unless all of several clients agree on returning another."""
    wanted = _shapes(sent) if sent is not None else None
    if wanted is not None and (wanted in layouts or len(set(layouts)) != 1 or len(layouts) < 2):
        return wanted
    return layouts[0] if layouts else frozenset()


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
