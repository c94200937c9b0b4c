"""Parquet files or a Ray Dataset, read by Ray tasks in parts and handed on chunk by chunk.

No row passes through the driver. Each task reads its own row groups once, columns pruned, and tells
the driver its keys; the driver numbers the groups of all parts, cuts the chunks, and each part is
split by chunk into Ray's object store (which spills to disk when memory is short). Tasks have no
state, so Ray itself repeats a part that is lost with a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._blocks import Block, group_order, offsets_of
from kingpin_ray._parts import Parts, Summary, load_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kingpin_ray._driver import Chunk
    from kingpin_ray._frame import Frame, Layout


def split_part(
    frame: Frame,
    group_ids: NDArray[np.int64],
    codes: NDArray[np.int64] | None,
    chunk_of_group: NDArray[np.int64],
    n_chunks: int,
) -> Any:
    """Returns, for each chunk, the group ids, features and target of the part's rows in it."""
    local = np.repeat(np.arange(len(frame.keys)), frame.counts)
    rows = np.argsort(frame.order, kind="stable")  # back to the order of the file
    row_number, group = frame.order[rows], group_ids[local[rows]]
    chunk = chunk_of_group[group]
    order = np.argsort(chunk, kind="stable")
    bounds = offsets_of(np.bincount(chunk, minlength=n_chunks))
    pieces = []
    for c in range(n_chunks):
        at = order[bounds[c] : bounds[c + 1]]
        y = frame.y[row_number[at]]
        if codes is not None:
            y = codes[y.astype(np.int64)]
        pieces.append((group[at], frame.matrix(row_number[at]), y))
    return pieces[0] if n_chunks == 1 else pieces


def take_part(
    frame: Frame, positions: NDArray[np.int64], codes: NDArray[np.int64] | None
) -> tuple[NDArray[np.floating], NDArray[np.generic]]:
    """Returns features and target of some of the part's usable rows, counted in file order."""
    rows = np.sort(frame.order)[positions]
    y = frame.y[rows]
    return frame.matrix(rows), y if codes is None else codes[y.astype(np.int64)]


@dataclass(frozen=True)
class Header:
    """What a worker must know of a chunk beside its pieces; fields as in `Block`."""

    groups: NDArray[np.int64]
    seeds: NDArray[np.uint64]
    n_dropped: NDArray[np.int64]
    n_classes: int
    first: NDArray[np.int64]
    features: int


def join_pieces(header: Header, pieces: Sequence[Any]) -> Block:
    """Returns the block of a chunk from its pieces, rows in the order of the files."""
    if not pieces:  # more workers than parts
        nothing = np.zeros((0, header.features)), np.zeros(0)
        pieces = [(np.zeros(0, np.int64), *nothing)]
    ids = np.concatenate([piece[0] for piece in pieces])
    X = np.concatenate([piece[1] for piece in pieces])
    y = np.concatenate([piece[2] for piece in pieces])
    place = np.full(int(max(header.groups.max(), ids.max(initial=0))) + 1, -1)
    place[header.groups] = np.arange(len(header.groups))
    local = place[ids]
    wanted = local >= 0
    if not wanted.all():
        local, X, y = local[wanted], X[wanted], y[wanted]
    order = group_order(local, len(header.groups))
    return Block(
        X=X[order],
        y=y[order],
        offsets=offsets_of(np.bincount(local, minlength=len(header.groups))),
        groups=header.groups,
        seeds=header.seeds,
        n_classes=header.n_classes,
        n_dropped=header.n_dropped,
        first=header.first,
    )


class Shuffled(Parts):
    """Training data that lives in Ray's object store; stands in for a `Frame` on the driver.

    Args:
        ray: the module, connected.
        parts: row groups of files, or references to Arrow tables.
        columns: columns to read.
        layout: which column is what.
        classifier: whether the target holds classes.
        random_state: the seed of the run.

    Raises:
        EmptyDataError: no row has a target.
    """

    def __init__(
        self,
        ray: Any,
        parts: Sequence[Any],
        columns: list[str],
        layout: Layout,
        classifier: bool,
        random_state: int,
    ) -> None:
        self._ray = ray
        load = ray.remote(load_part).options(num_returns=2, num_cpus=1)
        pairs = [load.remote(part, columns, layout, classifier, random_state) for part in parts]
        self._frames = [frame for _, frame in pairs]
        try:
            summaries: list[Summary] = ray.get([summary for summary, _ in pairs])
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        super().__init__(summaries, layout, classifier, random_state)
        self._features = len(layout.features)
        self._pieces: list[list[Any]] = []

    @property
    def scattered(self) -> bool:
        """Whether the parts are split by chunk already."""
        return bool(self._pieces)

    def scatter(self, chunks: Sequence[Chunk]) -> None:
        """Splits every part by chunk; the parts themselves are let go."""
        chunk_of_group = np.full(len(self.keys), len(chunks))
        for c, chunk in enumerate(chunks):
            chunk_of_group[chunk.groups] = c
        # Groups that are done already (after a resume) go to a last piece that nobody takes.
        n = len(chunks) + bool((chunk_of_group == len(chunks)).any())
        split = self._ray.remote(split_part).options(num_returns=n, num_cpus=1)
        shared = self._ray.put(chunk_of_group)
        columns = []
        for frame, ids, codes in zip(self._frames, self._ids, self._codes, strict=True):
            refs = split.remote(frame, ids, codes, shared, n)
            columns.append([refs] if n == 1 else refs)
        self._pieces = [list(row) for row in zip(*columns, strict=True)]
        self._number = {chunk.number: c for c, chunk in enumerate(chunks)}

    def arguments(self, chunk: Chunk, number: int = 0, of: int = 1) -> tuple[Any, ...]:
        """Returns what `fit_pieces` takes for a chunk, after the task.

        Args:
            chunk: its groups.
            number: which of the workers that share the chunk; each holds the rows of some parts.
            of: how many share it.
        """
        begin = len(self._ids) * number // of
        end = len(self._ids) * (number + 1) // of
        before = np.zeros(len(self.keys), np.int64)
        for p in range(begin):
            before[self._ids[p]] += self._part_counts[p]
        header = Header(
            chunk.groups,
            self.seeds[chunk.groups],
            self.n_dropped[chunk.groups],
            0 if self.classes is None else len(self.classes),
            before[chunk.groups],
            self._features,
        )
        return (header, *self._pieces[self._number[chunk.number]][begin:end])

    def block(self, groups: NDArray[np.int64]) -> Block:
        """Returns groups without their rows: enough to record that they failed."""
        counts = self.counts[groups]
        classes = 0 if self.classes is None else len(self.classes)
        y: NDArray[np.generic] = np.zeros(int(counts.sum()))
        if classes:
            held = self._class_counts[groups]
            y = np.repeat(np.tile(np.arange(classes), len(groups)), held.reshape(-1))
        return Block(
            np.zeros((len(y), 0)),
            y,
            offsets_of(counts),
            groups,
            self.seeds[groups],
            classes,
            self.n_dropped[groups],
            np.zeros(len(groups), np.int64),
        )

    def sample_rows(
        self, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.floating], NDArray[np.generic]]:
        """Returns features and target of some usable rows, counted over all parts in order."""
        take = self._ray.remote(take_part).options(num_cpus=1)
        found = self._ray.get(
            [
                take.remote(self._frames[p], mine, self._codes[p])
                for p, mine in self._by_part(positions)
            ]
        )
        return np.concatenate([x for x, _ in found]), np.concatenate([y for _, y in found])
