"""The numpy statement of neighbour sampling; `kernels.cpu` does the same, edge for edge, in C.

Every random number is a pure function of a key, of the frontier node that draws and of the
how-manieth draw it is. So both give the same subgraph, and no state has to be kept or shared.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bifeat_pyg._errors import LoaderError
from bifeat_pyg.kernels import cpu

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Columns:
    """Edges of one type in compressed columns: those into node v lie at colptr[v] to colptr[v + 1].

    Attributes:
        colptr: int64 [targets + 1].
        row: int64 [E], source of each edge.
        edge_id: int64 [E], position of each edge in the graph's own order.
        time: int64 [E], ascending within each column, or None.
        sources: number of source nodes.
    """

    colptr: Tensor
    row: Tensor
    edge_id: Tensor
    time: Tensor | None
    sources: int


def compress(edge_index: Tensor, sources: int, targets: int, time: Tensor | None = None) -> Columns:
    """Returns edges in compressed columns, each column in the graph's order or by time.

    Args:
        edge_index: integers [2, E], sources above, targets below.
        sources: number of source nodes.
        targets: number of target nodes.
        time: of each edge [E], or None.

    Raises:
        LoaderError: an edge names a node that does not exist.
    """
    edge_index = edge_index.to(device="cpu", dtype=torch.long)
    order = None
    if time is not None:
        # A stable sort by time first: the counting sort by target keeps it within each column.
        order = time.cpu().sort(stable=True).indices
        edge_index = edge_index[:, order]
    if cpu.available():
        bad, colptr, row, edge_id = cpu.compressed_columns(edge_index, sources, targets)
    else:
        source, target = edge_index
        outside = (source < 0) | (source >= sources) | (target < 0) | (target >= targets)
        bad = int(outside.nonzero()[0]) if bool(outside.any()) else -1
        if bad < 0:
            edge_id = target.sort(stable=True).indices
            row = source[edge_id]
            colptr = torch.zeros(targets + 1, dtype=torch.long)
            colptr[1:] = torch.bincount(target, minlength=targets).cumsum(0)
    if bad >= 0:
        raise LoaderError(
            f"edge {bad} goes from node {int(edge_index[0, bad])} to {int(edge_index[1, bad])}, "
            f"but "
            f"there are {sources} source and {targets} target nodes; set num_nodes, or mend the "
            f"edges"
        )
    if order is not None:
        edge_id = order[edge_id]
    sorted_time = None if time is None else time.cpu()[edge_id].long()
    return Columns(colptr, row, edge_id, sorted_time, sources)


def mix(value: int) -> int:
    """Returns 64 well-mixed bits of an integer (the finalizer of splitmix64)."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _draw(key: int, who: np.ndarray, which: int, bound: np.ndarray) -> np.ndarray:
    """Returns numbers below `bound` (< 2**32), int64, one for each drawing node."""
    counter = (who.astype(np.uint64) << np.uint64(20)) + np.uint64(which + 1)
    z = np.uint64(key) + counter * _GOLDEN
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return ((z >> np.uint64(32)) * bound.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


class NodeTable:
    """Numbers nodes in order of first appearance; the numpy counterpart of `cpu.NodeTable`."""

    def __init__(self, nodes: int, disjoint: bool) -> None:
        self._nodes = max(nodes, 1)
        self._disjoint = disjoint
        self._node = np.empty(0, dtype=np.int64)
        self._batch = np.empty(0, dtype=np.int64)
        self._keys = np.empty(0, dtype=np.int64)  # ascending
        self._local = np.empty(0, dtype=np.int64)  # of each key

    def __len__(self) -> int:
        return len(self._node)

    def seed(self, node: Tensor, batch: Tensor | None) -> None:
        """Numbers the seeds in their order; one that comes twice is found by its first number."""
        self._node = node.numpy().copy()
        self._batch = np.zeros_like(self._node) if batch is None else batch.numpy().copy()
        self._keys, self._local = np.unique(self._key(self._node, self._batch), return_index=True)

    def read(self, start: int = 0) -> tuple[Tensor, Tensor | None]:
        """Returns the nodes numbered `start` and up, and their seeds in disjoint use."""
        batch = torch.from_numpy(self._batch[start:].copy()) if self._disjoint else None
        return torch.from_numpy(self._node[start:].copy()), batch

    def hop(
        self,
        colptr: Tensor,
        row: Tensor,
        frontier: Tensor,
        batch: Tensor | None,
        first: int,
        k: int,
        *,
        replace: bool,
        last: bool,
        key: int,
        time: Tensor | None,
        bound: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws up to k in-neighbours (all for k < 0) of each frontier node and numbers them.

        Args:
            colptr: int64 [targets + 1], see `Columns`.
            row: int64 [E].
            frontier: int64 [F], nodes whose local numbers are first, first + 1, ...
            batch: int64 [F], the seed each belongs to, in disjoint use.
            first: local number of the first frontier node.
            k: neighbours to draw.
            replace: whether a neighbour may be drawn twice.
            last: take the k latest instead of drawing.
            key: of the random numbers.
            time: int64 [E], ascending in each column.
            bound: int64 [F], latest time allowed for each frontier node.

        Returns:
            local source, local destination and position in `row`, int64, in order of the frontier.
        """
        begin, end = colptr[frontier].numpy(), colptr[frontier + 1].numpy()
        degree = end - begin
        if time is not None and bound is not None:
            times, bounds = time.numpy(), bound.numpy()
            degree = np.array(
                [
                    np.searchsorted(times[b:e], t, side="right")
                    for b, e, t in zip(begin, end, bounds, strict=True)
                ],
                dtype=np.int64,
            )
        who = first + np.arange(len(frontier))
        whole = (k < 0) | ((last or not replace) & (k >= degree))
        taken = np.where(whole, degree, np.where(degree > 0, max(k, 0), 0))
        column = np.repeat(np.arange(len(frontier)), taken)
        # place of each edge among those of its own frontier node
        place = np.arange(len(column)) - np.repeat(taken.cumsum() - taken, taken)
        edge = begin[column] + place
        drawn = ~whole & (degree > 0)
        if last:
            skip = drawn[column]
            edge[skip] += (degree - k)[column][skip]
        elif k > 0 and drawn.any():
            picks = np.empty((int(drawn.sum()), k), dtype=np.int64)
            drawer, of = who[drawn], degree[drawn]
            for j in range(k):
                if replace:
                    picks[:, j] = _draw(key, drawer, j, of)
                    continue
                # Floyd: a pick that was made before gives way to the newest candidate.
                newest = of - k + j
                pick = _draw(key, drawer, j, newest + 1)
                again = (picks[:, :j] == pick[:, None]).any(axis=1)
                picks[:, j] = np.where(again, newest, pick)
            edge[drawn[column]] = (begin[drawn][:, None] + picks).ravel()
        seed = np.zeros(len(edge), dtype=np.int64)
        if batch is not None:
            seed = batch.numpy()[column]
        local = self._number(row.numpy()[edge], seed)
        return torch.from_numpy(local), torch.from_numpy(who[column]), torch.from_numpy(edge)

    def _key(self, node: np.ndarray, batch: np.ndarray) -> np.ndarray:
        return batch * self._nodes + node if self._disjoint else node

    def _number(self, node: np.ndarray, batch: np.ndarray) -> np.ndarray:
        keys, position, inverse = np.unique(
            self._key(node, batch), return_index=True, return_inverse=True
        )
        place = np.searchsorted(self._keys, keys)
        known = np.zeros(len(keys), dtype=bool)
        inside = place < len(self._keys)
        known[inside] = self._keys[place[inside]] == keys[inside]
        local = np.empty(len(keys), dtype=np.int64)
        local[known] = self._local[place[known]]
        fresh = np.flatnonzero(~known)
        by_appearance = fresh[np.argsort(position[fresh])]
        local[by_appearance] = len(self._node) + np.arange(len(fresh))
        self._node = np.concatenate((self._node, node[position[by_appearance]]))
        self._batch = np.concatenate((self._batch, batch[position[by_appearance]]))
        order = np.argsort(np.concatenate((self._keys, keys[fresh])), kind="stable")
        self._local = np.concatenate((self._local, local[fresh]))[order]
        self._keys = np.concatenate((self._keys, keys[fresh]))[order]
        return local[inverse.reshape(-1)]


def node_table(nodes: int, disjoint: bool, room: int) -> "NodeTable | cpu.NodeTable":
    """Returns a table in C where it is available, else one in numpy."""
    return cpu.NodeTable(room, disjoint) if cpu.available() else NodeTable(nodes, disjoint)
