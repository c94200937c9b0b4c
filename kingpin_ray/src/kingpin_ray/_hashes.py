"""Hashes of numbers and rows that are the same on every machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_ODD = np.uint64(0x9E3779B97F4A7C15)
# Rows hashed at a time, so that what is between two steps stays in the cache.
_CHUNK = 16384


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_hashes(columns: Sequence[NDArray[np.generic]]) -> NDArray[np.uint64]:
    """Returns (N,) a hash of each row of some numeric columns of N values.

    Values count as the float64 that models see: the type of a column does not matter, all NaN are
    alike and so are both zeros.
    """
    out = np.empty(len(columns[0]), np.uint64)
    for begin in range(0, len(out), _CHUNK):
        end = min(begin + _CHUNK, len(out))
        state = np.full(end - begin, len(columns), np.uint64)
        for column in columns:
            values = column[begin:end].astype(np.float64) + 0.0  # -0.0 becomes 0.0
            values[np.isnan(values)] = np.nan
            state = (state ^ values.view(np.uint64)) * _ODD
            state ^= state >> np.uint64(32)
        out[begin:end] = mix(state)
    return out
