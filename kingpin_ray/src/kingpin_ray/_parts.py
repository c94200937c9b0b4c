"""Training data that is read in parts: what a part tells of itself, and all parts put together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kingpin_ray._blocks import offsets_of
from kingpin_ray._errors import EmptyDataError
from kingpin_ray._frame import Frame, Layout, build_frame, columns_of
from kingpin_ray._keys import KeyTable, encode
from kingpin_ray._source import Part, read_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block


@dataclass(frozen=True)
class Summary:
    """What the driver learns of a part.

    Attributes:
        keys: key table of the part.
        counts: (groups,) usable rows.
        n_dropped: (groups,) rows without a target.
        classes: classes of the part; None for regression.
        class_counts: what `Frame.class_counts` returns.
        row_sums: what `Frame.row_sums` returns.
        bytes_read: bytes taken from files.
    """

    keys: KeyTable
    counts: NDArray[np.int64]
    n_dropped: NDArray[np.int64]
    classes: NDArray[Any] | None
    class_counts: NDArray[np.int64]
    row_sums: NDArray[np.uint64]
    bytes_read: int


def load_part(
    part: Part | pa.Table, columns: list[str], layout: Layout, classifier: bool, random_state: int
) -> tuple[Summary, Frame]:
    """Returns a part's summary and its rows, in group order through an index."""
    bytes_read = 0
    if isinstance(part, Part):
        table, bytes_read = read_part(part, columns)
    else:
        table = part.select(columns)
    frame = build_frame(
        columns_of(table), layout, None, None, classifier, random_state, allow_empty=True
    )
    summary = Summary(
        frame.keys,
        frame.counts,
        frame.n_dropped,
        frame.classes,
        frame.class_counts(),
        frame.row_sums(),
        bytes_read,
    )
    return summary, frame


class Parts(ABC):
    """The groups of all parts under common numbers; where the rows are is for subclasses to know.

    Args:
        summaries: of the parts, in the order of the data.
        layout: which column is what.
        classifier: whether the target holds classes.
        random_state: the seed of the run.

    Attributes:
        keys: the groups.
        counts: (G,) usable rows.
        n_dropped: (G,) rows without a target.
        seeds: (G,) uint64.
        classes: the sorted classes; None for regression.
        bytes_read: bytes taken from files.

    Raises:
        EmptyDataError: no row has a target.
    """

    def __init__(
        self, summaries: Sequence[Summary], layout: Layout, classifier: bool, random_state: int
    ) -> None:
        stacked = pa.concat_tables([s.keys.table for s in summaries], promote_options="permissive")
        ids, self.keys = encode(stacked.columns, summaries[0].keys.names)
        bounds = offsets_of(np.array([len(s.keys) for s in summaries]))
        self._ids = [ids[bounds[p] : bounds[p + 1]] for p in range(len(summaries))]
        self._part_counts = [s.counts for s in summaries]
        groups = len(self.keys)
        self.counts = np.bincount(
            ids, np.concatenate([s.counts for s in summaries]), groups
        ).astype(np.int64)
        self.n_dropped = np.bincount(
            ids, np.concatenate([s.n_dropped for s in summaries]), groups
        ).astype(np.int64)
        self._rows = offsets_of(np.array([int(s.counts.sum()) for s in summaries]))
        if not self._rows[-1]:
            raise EmptyDataError(
                f"target={layout.target!r} is missing in all rows; there is nothing to train on"
            )
        self.seeds = self.keys.seeds(random_state)
        self.classes: NDArray[Any] | None = None
        self._codes: list[NDArray[np.int64] | None] = [None] * len(summaries)
        self._class_counts = np.zeros((groups, 0), np.int64)
        self._row_sums = np.zeros((groups, 1), np.uint64)
        if classifier:
            self._merge_classes(summaries)
        else:
            for part_ids, summary in zip(self._ids, summaries, strict=True):
                self._row_sums[part_ids] += summary.row_sums
        self.bytes_read = sum(s.bytes_read for s in summaries)

    def _merge_classes(self, summaries: Sequence[Summary]) -> None:
        known = [s.classes for s in summaries if s.classes is not None and len(s.classes)]
        self.classes = np.unique(np.concatenate(known))
        shape = (len(self.keys), len(self.classes))
        self._class_counts = np.zeros(shape, np.int64)
        self._row_sums = np.zeros(shape, np.uint64)
        for p, summary in enumerate(summaries):
            assert summary.classes is not None
            code = np.searchsorted(self.classes, summary.classes)
            self._codes[p] = np.append(code, -1)  # -1 stays -1
            cells = np.ix_(self._ids[p], code)
            self._class_counts[cells] += summary.class_counts
            self._row_sums[cells] += summary.row_sums

    def row_sums(self) -> NDArray[np.uint64]:
        """Returns what `Frame.row_sums` returns for the same rows."""
        return self._row_sums

    def only_class(self, group: int) -> int:
        """Returns the class of a group that holds one class only, else -1."""
        present = np.flatnonzero(self._class_counts[group])
        return int(present[0]) if len(present) == 1 else -1

    def _by_part(self, positions: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yields each part that holds some of the usable rows, and which of its own these are."""
        for p in range(len(self._ids)):
            low, high = self._rows[p], self._rows[p + 1]
            mine = positions[(positions >= low) & (positions < high)] - low
            if len(mine):
                yield p, mine

    @abstractmethod
    def sample_rows(
        self, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.floating], NDArray[np.generic]]:
        """Returns features and target of some usable rows, counted over all parts in order."""

    @abstractmethod
    def block(self, groups: NDArray[np.int64]) -> Block:
        """Returns the rows of some groups, or as much of them as records a failure."""
