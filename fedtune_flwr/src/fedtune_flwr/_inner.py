"""The state of the wrapped strategies: moments, momentum, adapted norms.

Flower's strategies keep such state in attributes that hold arrays. They are found by what they
hold, so that strategies of other authors are resumed too; numbers are kept where they changed
since the strategy was made.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy

Manifest = list[dict[str, Any]]


def numbers(strategies: Sequence[Strategy]) -> list[dict[str, float | int | bool]]:
    """The attributes of each strategy that are plain numbers."""
    return [
        {k: v for k, v in vars(s).items() if isinstance(v, bool | int | float)} for s in strategies
    ]


def capture(
    strategies: Sequence[Strategy], before: Sequence[Mapping[str, float | int | bool]]
) -> tuple[Manifest, dict[str, np.ndarray]]:
    """What the strategies hold now: a description for JSON, and named arrays.

    Args:
        strategies: outermost first.
        before: what `numbers` returned when they were new.
    """
    manifest: Manifest = []
    arrays: dict[str, np.ndarray] = {}
    for level, (strategy, initial) in enumerate(zip(strategies, before, strict=True)):
        described: dict[str, Any] = {}
        for name, value in vars(strategy).items():
            if isinstance(value, bool | int | float):
                if name in initial and initial[name] != value:
                    described[name] = {"kind": "number", "value": value}
                continue
            found = _arrays(value)
            if found is None:
                continue
            kind, parts = found
            described[name] = {"kind": kind, "keys": list(parts)}
            for i, part in enumerate(parts.values()):
                arrays[f"inner:{level}:{name}:{i}"] = part
        manifest.append(described)
    return manifest, arrays


def restore(
    strategies: Sequence[Strategy], manifest: Manifest, arrays: Mapping[str, np.ndarray]
) -> None:
    """Puts back what `capture` found.

    Raises:
        LookupError, TypeError, AttributeError: the manifest is damaged, or an array that it names
            is missing.
        ValueError: there are more or fewer strategies than when it was captured.
    """
    for level, (strategy, described) in enumerate(zip(strategies, manifest, strict=True)):
        for name, entry in described.items():
            if entry["kind"] == "number":
                setattr(strategy, name, entry["value"])
                continue
            keys = entry["keys"]
            parts = [arrays[f"inner:{level}:{name}:{i}"] for i in range(len(keys))]
            value: Any
            if entry["kind"] == "record":
                value = ArrayRecord({k: Array(p) for k, p in zip(keys, parts, strict=True)})
            elif entry["kind"] == "dict":
                value = dict(zip(keys, parts, strict=True))
            else:
                value = parts if entry["kind"] == "list" else parts[0]
            setattr(strategy, name, value)


def _arrays(value: Any) -> tuple[str, dict[str, np.ndarray]] | None:
    """The kind of a value that holds arrays, and the arrays; None for anything else."""
    if isinstance(value, ArrayRecord):
        return "record", {k: a.numpy() for k, a in value.items()}
    if isinstance(value, np.ndarray):
        return "array", {"0": value}
    if isinstance(value, dict) and value:
        if all(isinstance(k, str) and isinstance(v, np.ndarray) for k, v in value.items()):
            return "dict", dict(value)
    elif isinstance(value, list) and value and all(isinstance(v, np.ndarray) for v in value):
        return "list", {str(i): v for i, v in enumerate(value)}
    return None
