"""The codecs every suite runs over; those traced into a program, and all."""

from typing import Any

PROGRAMS: list[tuple[str, dict[str, Any]]] = [
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
CODECS = [
    *PROGRAMS,
    ("graddrop", {"ratio": 0.02}),
    ("graddrop", {"ratio": 0.3}),
    ("dgc", {"ratio": 0.02}),
]
# Shares and chunks that the sparse Triton kernels are interpreted with.
SPARSE = [(0.02, 64), (0.4, 128)]
NAMES = [f"{name}-{options}" for name, options in CODECS]
