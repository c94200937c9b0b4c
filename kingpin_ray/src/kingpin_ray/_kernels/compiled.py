"""Finds the compiled kernels; everything they do is done without them too, only slower."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any


@functools.cache
def load(name: str) -> Any:
    """Returns a compiled kernel by name, or None where it was not built."""
    suffix = ".dll" if sys.platform == "win32" else ".so"
    path = Path(__file__).with_name(f"{name}{suffix}")
    if not path.exists():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # built for another machine
        return None
