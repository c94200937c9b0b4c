"""How much memory is free, and giving back what was freed."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import pyarrow as pa


def available_memory() -> int:
    """Returns the bytes of memory that are free; a guess of 4 GiB where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4 << 30


@functools.cache
def _trim() -> Any:
    """Returns glibc's malloc_trim, or None on other systems."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def give_back() -> None:
    """Has Arrow and the C library return freed memory to the system, in about a millisecond.

    Both keep what large arrays took for the next ones of the same kind; after keys were coded and
    rows sorted none will come, and it is a good part of the data.
    """
    pa.default_memory_pool().release_unused()
    trim = _trim()
    if trim is not None:
        trim(0)
