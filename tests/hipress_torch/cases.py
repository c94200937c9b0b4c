"""The codecs every suite runs over."""

from typing import Any

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("onebit", {}),
    ("onebit", {"block": 64}),
    ("tbq", {}),
    ("tbq", {"tau": 4.0, "relative": False}),
    ("terngrad", {}),
    ("terngrad", {"bits": 4}),
    ("terngrad", {"bits": 8}),
    ("nbit", {}),
    ("nbit", {"bits": 2}),
    ("none", {}),
    ("fp16", {}),
    ("bf16", {}),
]
NAMES = [f"{name}-{options}" for name, options in CODECS]
