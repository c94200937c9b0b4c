"""Rows in group order: the form in which every trainer gets its data.

Shape legend: N rows, D features, G groups, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


# Rows that are sorted at a time.
_PIECE = 1 << 17


@dataclass(frozen=True)
class Block:
    """Whole groups, each one's rows next to each other.

    Attributes:
        X: (N, D) float32 or float64, C-contiguous.
        y: (N,) float64 values, or int64 class codes.
        offsets: (G + 1,) int64; group g owns rows offsets[g]:offsets[g + 1].
        groups: (G,) int64 ids in the key table.
        seeds: (G,) uint64, from the key and the user's seed.
        n_classes: classes in the whole data set; 0 for regression.
        n_dropped: (G,) int64 rows without a target, already taken away.
        first: (G,) int64 rows of the group that other blocks hold before these; 0 when whole.
    """

    X: NDArray[np.floating]
    y: NDArray[np.generic]
    offsets: NDArray[np.int64]
    groups: NDArray[np.int64]
    seeds: NDArray[np.uint64]
    n_classes: int
    n_dropped: NDArray[np.int64]
    first: NDArray[np.int64]

    @property
    def n_groups(self) -> int:
        """The number of groups."""
        return len(self.groups)

    @property
    def counts(self) -> NDArray[np.int64]:
        """(G,) rows of each group."""
        return np.diff(self.offsets)

    def group_of_row(self) -> NDArray[np.int64]:
        """Returns (N,) the position within this block of each row's group."""
        return np.repeat(np.arange(self.n_groups), self.counts)

    def ordinals(self) -> NDArray[np.int64]:
        """Returns (N,) the place of each row within its group, counted over all blocks."""
        start = self.offsets[:-1] - self.first
        return np.arange(len(self.y)) - np.repeat(start, self.counts)

    def select(self, positions: NDArray[np.int64]) -> Block:
        """Returns a block of some of the groups, in the order given."""
        if len(positions) == self.n_groups and (positions == np.arange(self.n_groups)).all():
            return self
        rows = ranges(self.offsets[positions], self.counts[positions])
        return Block(
            X=self.X[rows],
            y=self.y[rows],
            offsets=offsets_of(self.counts[positions]),
            groups=self.groups[positions],
            seeds=self.seeds[positions],
            n_classes=self.n_classes,
            n_dropped=self.n_dropped[positions],
            first=self.first[positions],
        )

    def keep(self, mask: NDArray[np.bool_]) -> Block:
        """Returns a block of the same groups with only the rows where `mask` holds."""
        counts = np.bincount(self.group_of_row()[mask], minlength=self.n_groups)
        return replace(self, X=self.X[mask], y=self.y[mask], offsets=offsets_of(counts))

    def class_counts(self) -> NDArray[np.int64]:
        """Returns (G, K) rows of each class in each group."""
        flat = self.group_of_row() * self.n_classes + self.y.astype(np.int64)
        size = self.n_groups * self.n_classes
        return np.bincount(flat, minlength=size).reshape(self.n_groups, self.n_classes)


def offsets_of(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Returns (G + 1,) running totals that begin with 0."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the numbers start, start + 1, ... of each range, one range after another."""
    shift = np.repeat(starts - offsets_of(counts)[:-1], counts)
    return np.arange(len(shift)) + shift


def group_counts(ids: NDArray[np.integer], n_groups: int) -> NDArray[np.int64]:
    """Returns (n_groups,) how often each number occurs; negative ones are left out."""
    counts = np.zeros(n_groups, np.int64)
    for begin in range(0, len(ids), max(_PIECE, n_groups)):
        piece = ids[begin : begin + max(_PIECE, n_groups)]
        counts += np.bincount(piece[piece >= 0], minlength=n_groups)
    return counts


def group_order(ids: NDArray[np.integer], n_groups: int) -> NDArray[np.signedinteger]:
    """Returns the row numbers sorted by group, rows of a group in their first order.

    Rows with a negative number are left out. Sorting costs more than training a linear model, so
    this counts instead of comparing: numpy's stable sort of 16-bit numbers is a radix sort, and two
    passes of it sort 32 bits. A piece at a time goes to its places: what is held beside the result
    is small.
    """
    start = offsets_of(group_counts(ids, n_groups))
    kind = np.int32 if len(ids) <= np.iinfo(np.int32).max else np.int64
    order = np.empty(start[-1], kind)
    free = start[:-1].copy()
    size = max(_PIECE, n_groups)
    for begin in range(0, len(ids), size):
        piece = ids[begin : begin + size]
        rows = np.arange(len(piece)) if (piece >= 0).all() else np.flatnonzero(piece >= 0)
        piece = piece[rows]
        by = np.argsort((piece & 0xFFFF).astype(np.uint16), kind="stable")
        if n_groups > 1 << 16:
            high = (piece[by] >> 16).astype(np.uint16)
            by = by[np.argsort(high, kind="stable")]
        counts = np.bincount(piece, minlength=n_groups)
        shift = np.repeat(free - offsets_of(counts)[:-1], counts)
        shift += np.arange(len(shift))
        order[shift] = rows[by] + begin
        free += counts
    return order


@dataclass(frozen=True)
class Bucket:
    """Groups of similar size, padded to the largest of them.

    Attributes:
        positions: (B,) positions of the groups within the block.
        width: rows of the largest.
    """

    positions: NDArray[np.int64]
    width: int


def buckets(
    counts: NDArray[np.int64], row_bytes: int, waste: float = 0.15, budget: int = 2 << 20
) -> Iterator[Bucket]:
    """Yields groups in order of size, so that padding wastes at most `waste` of the rows.

    Args:
        counts: (G,) rows of each group; empty groups are left out.
        row_bytes: bytes of one padded row in the trainer's arrays.
        waste: padding allowed, as a share of the padded rows.
        budget: bytes of one bucket. The default stays within a core's second-level cache, which
            was worth more than longer batches.
    """
    order = np.argsort(counts, kind="stable")
    order = order[counts[order] > 0]
    begin = 0
    while begin < len(order):
        room = budget // (row_bytes * int(counts[order[begin]]))
        sizes = counts[order[begin : begin + max(room, 1)]]
        filled = np.cumsum(sizes)
        padded = sizes * np.arange(1, len(sizes) + 1)
        fits = (filled >= (1 - waste) * padded) & (padded * row_bytes <= budget)
        stop = len(sizes) if fits.all() else max(int(np.argmin(fits)), 1)
        yield Bucket(order[begin : begin + stop], int(sizes[stop - 1]))
        begin += stop


def padded_rows(block: Block, bucket: Bucket) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns (B, width) row numbers of a bucket's groups and which of them are real rows."""
    column = np.arange(bucket.width)
    counts = block.counts[bucket.positions]
    real = column < counts[:, None]
    rows = block.offsets[bucket.positions][:, None] + np.where(real, column, 0)
    return rows, real
