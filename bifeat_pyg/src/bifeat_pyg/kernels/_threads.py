"""Shares of rows on as many threads as torch is allowed: ctypes lets go of the interpreter's lock.

Threads live for one call only. A pool would outlive it, and a process that a DataLoader then forks
would inherit its locks without its threads.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_BYTES = 4 << 20  # what a thread must write to be worth starting, some 50 us
_ROWS = 64  # shares are multiples of this, so that each starts on a whole line of the caches


def share(call: Callable[[int, int], T], rows: int, row_bytes: int) -> list[T]:
    """Returns `call(start, stop)` of consecutive shares of the rows, in their order.

    Args:
        call: works on rows start to stop; runs beside others.
        rows: how many there are.
        row_bytes: what a row costs, as bytes written.
    """
    threads = min(torch.get_num_threads(), rows * row_bytes // _BYTES)
    if threads < 2:
        return [call(0, rows)]
    size = -(-rows // threads // _ROWS) * _ROWS
    starts = range(0, rows, size)
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(call, start, min(start + size, rows)) for start in starts[1:]]
        first = call(0, min(size, rows))
        return [first, *(other.result() for other in others)]
