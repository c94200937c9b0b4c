"""Parquet files larger than memory, trained in this process: rows wait on the disk by group.

Each part is read once, sorted by group, and written to a temporary folder as plain arrays that are
mapped, not read: a chunk of groups takes its own rows of every part. Memory holds one part, one
chunk, and the keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._blocks import Block, offsets_of, ranges
from kingpin_ray._errors import ResourceError
from kingpin_ray._parts import Parts, Summary, load_part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kingpin_ray._frame import Frame, Layout
    from kingpin_ray._source import Part


class Spilled(Parts):
    """Training data on the local disk; stands in for a `Frame`.

    Args:
        folder: an empty folder that is removed after the run.
        parts: row groups of files.
        columns: columns to read.
        layout: which column is what.
        classifier: whether the target holds classes.
        random_state: the seed of the run.

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
        classifier: bool,
        random_state: int,
    ) -> None:
        self._folder = Path(folder)
        self._on_disk: list[int] = []
        summaries: list[Summary] = []
        for part in parts:
            summary, frame = load_part(part, columns, layout, classifier, random_state)
            self._keep(len(summaries), frame)
            summaries.append(summary)
        super().__init__(summaries, layout, classifier, random_state)
        self._features = len(layout.features)
        self._offsets = [offsets_of(counts) for counts in self._part_counts]

    def _keep(self, part: int, frame: Frame) -> None:
        """Writes the rows of a part, in group order."""
        self._on_disk.append(part)
        arrays = {"X": frame.matrix(frame.order), "y": frame.y[frame.order], "row": frame.order}
        try:
            for name, values in arrays.items():
                np.save(self._folder / f"{part}-{name}.npy", values)
        except OSError as error:
            raise ResourceError(
                f"rows cannot be spilled to {str(self._folder)!r} ({error.strerror or error}); "
                "free some disk space, or set TMPDIR to a folder on a larger disk"
            ) from error

    def _map(self, part: int, name: str) -> NDArray[Any]:
        return np.asarray(np.load(self._folder / f"{part}-{name}.npy", mmap_mode="r"))

    def warm(self) -> None:
        """Does nothing: no state is made when blocks are read."""

    def block(self, groups: NDArray[np.int64], first: NDArray[np.int64] | None = None) -> Block:
        """Returns the rows of some groups that are on the disk, in the order of the files.

        Args:
            groups: which.
            first: (groups,) rows that are elsewhere and come before these; None for none.
        """
        place = np.full(len(self.keys), -1)
        place[groups] = np.arange(len(groups))
        xs, ys, owners = [], [], []
        for p in self._on_disk:
            ids = self._ids[p]
            local = np.flatnonzero(place[ids] >= 0)
            counts = self._part_counts[p][local]
            rows = ranges(self._offsets[p][local], counts)
            if not len(rows):
                continue
            xs.append(self._map(p, "X")[rows])
            ys.append(self._labels(p, self._map(p, "y")[rows]))
            owners.append(np.repeat(place[ids[local]], counts))
        owner = np.concatenate([np.zeros(0, np.int64), *owners])
        order = np.argsort(owner, kind="stable")
        return Block(
            X=np.concatenate(xs)[order] if xs else np.zeros((0, self._features)),
            y=np.concatenate(ys)[order] if ys else np.zeros(0),
            offsets=offsets_of(np.bincount(owner, minlength=len(groups))),
            groups=groups,
            seeds=self.seeds[groups],
            n_classes=0 if self.classes is None else len(self.classes),
            n_dropped=self.n_dropped[groups],
            first=np.zeros(len(groups), np.int64) if first is None else first,
        )

    def _labels(self, part: int, y: NDArray[Any]) -> NDArray[Any]:
        codes = self._codes[part]
        return y if codes is None else codes[y.astype(np.int64)]

    def sample_rows(
        self, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.floating], NDArray[np.generic]]:
        """Returns features and target of some usable rows, counted in the order of the data."""
        xs, ys = [], []
        for p, mine in self._by_part(positions):
            at = np.argsort(self._map(p, "row"), kind="stable")[mine]
            xs.append(self._map(p, "X")[at])
            ys.append(self._labels(p, self._map(p, "y")[at]))
        return np.concatenate(xs), np.concatenate(ys)
