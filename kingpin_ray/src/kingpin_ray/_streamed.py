"""Parquet files larger than memory, of which only sufficient statistics are kept.

Each part is read once, its rows are added to the statistics of their groups, and let go. Memory
holds one part and the statistics. Should these outgrow their share of memory (very many groups,
many features, many folds), the rows of the parts still to come wait on the disk, as in `_spill`,
and join the statistics of a few groups at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from kingpin_ray._keys import encode
from kingpin_ray._spill import Spilled
from kingpin_ray._sums import Cells, Sums, cell_bytes, cells_of, parts_of, unusable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kingpin_ray._folds import Split
    from kingpin_ray._frame import Frame, Layout
    from kingpin_ray._keys import KeyTable
    from kingpin_ray._source import Part


class Streamed(Spilled):
    """Training data as statistics; stands in for a `Frame`, but has no rows to give.

    Args:
        folder: an empty folder that is removed after the run.
        parts: row groups of files.
        columns: columns to read.
        layout: which column is what.
        random_state: the seed of the run.
        split: how rows of a group are held out.
        budget: bytes that the statistics may take.

    Raises:
        EmptyDataError: no row has a target.
        ResourceError: the disk is full.
    """

    def __init__(
        self,
        folder: str,
        parts: Iterable[Part],
        columns: list[str],
        layout: Layout,
        random_state: int,
        split: Split | None,
        budget: int,
    ) -> None:
        self._split = split
        self._known: KeyTable | None = None
        self._place = np.zeros(0, np.int64)
        self._rows_of = np.zeros(0, np.int64)
        self._missing = np.zeros(0, np.int64)
        self._cells = Cells.zeros(0, len(layout.features))
        self._most = budget // (cell_bytes(len(layout.features)) * parts_of(split))
        super().__init__(folder, parts, columns, layout, False, random_state)
        assert self._known is not None
        # Groups that were met only after the statistics had outgrown their share have no place.
        self._at: NDArray[np.int64] = np.full(len(self.keys), -1)
        self._at[self.keys.lookup(self._known.table.columns)] = self._place

    def _keep(self, part: int, frame: Frame) -> None:
        if self._on_disk or not self._take(frame):
            super()._keep(part, frame)

    def _take(self, frame: Frame) -> bool:
        """Adds the rows of a part to the statistics; returns False if these would be too many."""
        known, new = self._known, frame.keys
        if known is None:
            table, before = new.table, 0
        else:
            before = len(known)
            table = pa.concat_tables([known.table, new.table], promote_options="permissive")
        ids, everyone = encode(table.columns, new.names)
        if known is not None and len(everyone) > max(self._most, before):
            return False
        place = np.full(len(everyone), -1)
        place[ids[:before]] = self._place
        fresh = np.flatnonzero(place < 0)
        place[fresh] = before + np.arange(len(fresh))
        self._known, self._place = everyone, place
        self._grow(len(everyone))
        at = place[ids[before:]]
        block = replace(frame.block(np.arange(len(new))), first=self._rows_of[at])
        there, cells = cells_of(block, self._split)
        parts = parts_of(self._split)
        self._cells.merge(at[there // parts] * parts + there % parts, cells)
        self._rows_of[at] += block.counts
        self._missing[at] += unusable(block)
        return True

    def _grow(self, groups: int) -> None:
        have = len(self._rows_of)
        if groups <= have:
            return
        room = max(groups, have + have // 4)  # not a copy of everything for each new key
        self._cells = self._cells.grown(room * parts_of(self._split))
        self._rows_of = np.append(self._rows_of, np.zeros(room - have, np.int64))
        self._missing = np.append(self._missing, np.zeros(room - have, np.int64))

    def sums(self, groups: NDArray[np.int64]) -> Sums:
        """Returns the statistics of some groups."""
        parts, at = parts_of(self._split), self._at[groups]
        held = np.flatnonzero(at >= 0)
        cells = Cells.zeros(len(groups) * parts, self._cells.mean.shape[1] - 1)
        missing, before = np.zeros((2, len(groups)), np.int64)
        missing[held], before[held] = self._missing[at[held]], self._rows_of[at[held]]
        here = (held[:, None] * parts + np.arange(parts)).reshape(-1)
        there = (at[held][:, None] * parts + np.arange(parts)).reshape(-1)
        cells.rows[here] = self._cells.rows[there]
        cells.mean[here] = self._cells.mean[there]
        cells.scatter[here] = self._cells.scatter[there]
        if self._on_disk:
            rest = self.block(groups, before)
            cells.merge(*cells_of(rest, self._split))
            missing += unusable(rest)
        return Sums(cells, groups, self.counts[groups], self.n_dropped[groups], missing)

    def overall(self) -> Sums:
        """Returns the statistics of all rows as one group."""
        total = Cells.zeros(1, self._cells.mean.shape[1] - 1)
        for begin in range(0, len(self.keys), 4096):
            groups = np.arange(begin, min(begin + 4096, len(self.keys)))
            total.merge(np.zeros(1, np.int64), self.sums(groups).cells.together())
        rows = total.rows.astype(np.int64)
        nothing = np.zeros(1, np.int64)
        return Sums(total, nothing, rows, nothing, nothing)
