"""CSCNeighborSampler: PyG's neighbour sampling without a compiled extension to install."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    NumNeighbors,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from bifeat_pyg._errors import LoaderError
from bifeat_pyg._graph import Graph, read_graph
from bifeat_pyg._sampling import Columns, mix, node_table

EdgeType = tuple[str, str, str]
Neighbors = Sequence[int] | Mapping[EdgeType, Sequence[int]]


class CSCNeighborSampler(BaseSampler):  # type: ignore[misc]
    """Samples neighbourhoods for `NodeLoader` and `LinkLoader`; needs no compiled extension.

    Semantics are those of `torch_geometric.sampler.NeighborSampler`: for each hop and edge type, up
    to k in-neighbours of every node that the hop before added; nodes are numbered in order of first
    appearance, seeds first.

    Args:
        data_or_graph_store: a Data, a HeteroData, a GraphStore, or a pair (FeatureStore,
            GraphStore).
        num_neighbors: neighbours of each hop, -1 for all; a mapping from edge types where they
            differ.
        replace: whether a neighbour may be drawn twice.
        subgraph_type: "directional" (the drawn edges), "bidirectional" (and their reverses) or
            "induced" (all edges among the drawn nodes).
        disjoint: one subgraph of its own for each seed; `batch` then says which. Always so with
            time.
        temporal_strategy: "uniform" draws among neighbours no later than the seed, "last" takes the
            latest of them.
        time_attr: name of the node or edge attribute that holds time (int64); only for a Data or
            HeteroData, or a pair whose FeatureStore holds it.
        seed: None draws from torch's generator, as PyG does, so `torch.manual_seed` fixes a run. A
            number makes each subgraph a function of the seed and its own input nodes alone, however
            many workers there are.

    Raises:
        LoaderError: the graph has no edges stored, an edge names a missing node, or arguments do
            not fit it.

    Example:
        >>> sampler = CSCNeighborSampler(data, num_neighbors=[10, 5])
        >>> loader = NodeLoader(data, sampler, batch_size=128, shuffle=True)
    """

    def __init__(
        self,
        data_or_graph_store: Data | HeteroData | GraphStore | tuple[FeatureStore, GraphStore],
        num_neighbors: Neighbors | NumNeighbors = (10, 5),
        *,
        replace: bool = False,
        subgraph_type: Literal["directional", "bidirectional", "induced"] = "directional",
        disjoint: bool = False,
        temporal_strategy: Literal["uniform", "last"] = "uniform",
        time_attr: str | None = None,
        seed: int | None = None,
    ) -> None:
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise LoaderError(f"seed is {seed!r}; it must be a whole number, or None")
        _allowed("subgraph_type", subgraph_type, ("directional", "bidirectional", "induced"))
        _allowed("temporal_strategy", temporal_strategy, ("uniform", "last"))
        self._graph: Graph = read_graph(data_or_graph_store, time_attr)
        if not isinstance(num_neighbors, NumNeighbors):
            num_neighbors = _as_neighbors(num_neighbors)
        self._hops = self._neighbors(num_neighbors)
        self.num_neighbors = num_neighbors
        self.replace = replace
        self.subgraph_type = subgraph_type
        self.disjoint = disjoint or self._graph.temporal
        self.temporal_strategy = temporal_strategy
        self.seed = seed

    @property
    def is_hetero(self) -> bool:
        """Whether the graph has node and edge types."""
        return self._graph.hetero

    @property
    def edge_permutation(self) -> None:
        """None: edges are given in the graph's own order already."""
        return None

    def sample_from_nodes(
        self, index: NodeSamplerInput, **kwargs: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        """Returns the subgraph around seed nodes."""
        return self._finish(node_sample(index, self._sample))

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        """Returns the subgraph around the ends of seed edges and of sampled non-edges."""
        counts = self._graph.node_counts
        nodes = counts if self.is_hetero else counts[""]
        time = self._graph.node_time
        node_time = time if self.is_hetero else time.get("")
        return self._finish(
            edge_sample(index, self._sample, nodes, self.disjoint, node_time, neg_sampling)
        )

    def _finish(
        self, out: SamplerOutput | HeteroSamplerOutput
    ) -> SamplerOutput | HeteroSamplerOutput:
        return out.to_bidirectional() if self.subgraph_type == "bidirectional" else out

    def _neighbors(self, num_neighbors: NumNeighbors) -> dict[EdgeType, list[int]]:
        types = list(self._graph.columns)
        if not self.is_hetero:
            values = num_neighbors.get_values()
            if isinstance(values, dict):
                raise LoaderError(
                    "num_neighbors is given for edge types, but the graph has none; give one list"
                )
            hops = {types[0]: list(values)}
        else:
            try:
                hops = {k: list(v) for k, v in num_neighbors.get_values(types).items()}
            except ValueError as error:
                raise LoaderError(f"num_neighbors does not fit the graph: {error}") from None
        for counts in hops.values():
            if not all(isinstance(k, int) and -1 <= k < 1 << 20 for k in counts):
                raise LoaderError(
                    f"num_neighbors is {counts}; each must be a whole number from -1 (all) to 2**20"
                )
        return hops

    def _sample(
        self,
        seed: Tensor | dict[str, Tensor],
        seed_time: Tensor | dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> SamplerOutput | HeteroSamplerOutput:
        seeds = seed if isinstance(seed, dict) else {"": seed}
        times = {"": seed_time} if isinstance(seed_time, Tensor) else seed_time
        walk = _Walk(self, {k: v.long().contiguous() for k, v in seeds.items()}, times)
        node, batch, counts = walk.nodes()
        row, col, edge = walk.induced() if self.subgraph_type == "induced" else walk.edges()
        edges = None if self.subgraph_type == "induced" else walk.edge_counts
        if self.is_hetero:
            return HeteroSamplerOutput(
                node=node,
                row=row,
                col=col,
                edge=edge,
                batch=batch if self.disjoint else None,
                num_sampled_nodes=counts if edges is not None else None,
                num_sampled_edges=edges,
            )
        only = next(iter(self._graph.columns))
        return SamplerOutput(
            node=node[""],
            row=row[only],
            col=col[only],
            edge=edge[only],
            batch=batch[""] if self.disjoint else None,
            num_sampled_nodes=counts[""] if edges is not None else None,
            num_sampled_edges=edges[only] if edges is not None else None,
        )


class _Walk:
    """One sampling: the node tables, and what each hop added."""

    def __init__(
        self,
        sampler: CSCNeighborSampler,
        seeds: dict[str, Tensor],
        times: Mapping[str, Tensor] | None,
    ) -> None:
        graph = sampler._graph
        self._graph = graph
        self._disjoint = sampler.disjoint
        key = _key(sampler.seed, seeds)
        # Seeds of all types share one numbering: each is the root of a subgraph of its own.
        roots: dict[str, Tensor] = {}
        first = 0
        root_time: list[Tensor] = []
        for kind, node in seeds.items():
            _check_seeds(node, graph.node_counts[kind], kind)
            roots[kind] = torch.arange(first, first + node.numel())
            first += node.numel()
            if graph.temporal:
                root_time.append(_times(kind, node, times, graph))
        self._root_time = torch.cat(root_time) if graph.temporal else None
        # Room for what two hops of some neighbours find; tables grow beyond it by doubling.
        room = 64 * first
        self._tables = {
            kind: node_table(count, self._disjoint, min(room, count))
            for kind, count in graph.node_counts.items()
        }
        self._counts: dict[str, list[int]] = {kind: [0] for kind in graph.node_counts}
        for kind, node in seeds.items():
            self._tables[kind].seed(node, roots[kind] if self._disjoint else None)
            self._counts[kind] = [node.numel()]
        self._found: dict[EdgeType, list[tuple[Tensor, Tensor, Tensor]]] = {
            kind: [] for kind in graph.columns
        }
        self.edge_counts: dict[EdgeType, list[int]] = {kind: [] for kind in graph.columns}
        begin = dict.fromkeys(graph.node_counts, 0)
        for hop in range(max((len(k) for k in sampler._hops.values()), default=0)):
            frontier = {kind: self._tables[kind].read(begin[kind]) for kind in graph.node_counts}
            start = {kind: len(table) for kind, table in self._tables.items()}
            for number, (relation, columns) in enumerate(graph.columns.items()):
                k = sampler._hops[relation][hop]
                node, batch = frontier[relation[-1]]
                made = self._hop(
                    sampler, relation, columns, node, batch, begin[relation[-1]], k,
                    mix(key + (hop << 32) + number),
                )  # fmt: skip
                self.edge_counts[relation].append(made)
            begin = start
            for kind, table in self._tables.items():
                self._counts[kind].append(len(table) - start[kind])

    def _hop(
        self,
        sampler: CSCNeighborSampler,
        kind: EdgeType,
        columns: Columns,
        frontier: Tensor,
        batch: Tensor | None,
        first: int,
        k: int,
        key: int,
    ) -> int:
        if frontier.numel() == 0 or k == 0:
            return 0
        bound = None
        if columns.time is not None and self._root_time is not None and batch is not None:
            bound = self._root_time[batch]
        row, col, place = self._tables[kind[0]].hop(
            columns.colptr,
            columns.row,
            frontier,
            batch,
            first,
            k,
            replace=sampler.replace,
            last=sampler.temporal_strategy == "last" and bound is not None,
            key=key,
            time=columns.time if bound is not None else None,
            bound=bound,
        )
        self._found[kind].append((row, col, columns.edge_id[place]))
        return row.numel()

    def nodes(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, list[int]]]:
        """Returns nodes, the root of each (in disjoint use), and how many each hop added."""
        node: dict[str, Tensor] = {}
        roots: dict[str, Tensor] = {}
        for kind, table in self._tables.items():
            node[kind], batch = table.read()
            if batch is not None:
                roots[kind] = batch
        return node, roots, self._counts

    def edges(self) -> tuple[dict[Any, Tensor], dict[Any, Tensor], dict[Any, Tensor]]:
        """Returns local source, local destination and edge id of the drawn edges."""
        empty = torch.empty(0, dtype=torch.long)
        parts = [
            {
                kind: torch.cat([f[part] for f in found]) if found else empty
                for kind, found in self._found.items()
            }
            for part in range(3)
        ]
        return parts[0], parts[1], parts[2]

    def induced(self) -> tuple[dict[Any, Tensor], dict[Any, Tensor], dict[Any, Tensor]]:
        """Returns all edges among the nodes (in disjoint use, among those of one root)."""
        parts: tuple[dict[Any, Tensor], dict[Any, Tensor], dict[Any, Tensor]] = ({}, {}, {})
        nodes = {kind: table.read() for kind, table in self._tables.items()}
        for kind, columns in self._graph.columns.items():
            node, batch = nodes[kind[-1]]
            degree = columns.colptr[node + 1] - columns.colptr[node]
            col = torch.repeat_interleave(torch.arange(node.numel()), degree)
            begin = torch.repeat_interleave(degree.cumsum(0) - degree, degree)
            place = columns.colptr[node][col] + torch.arange(col.numel()) - begin
            source = columns.row[place]
            others, other_batch = nodes[kind[0]]
            if batch is not None and other_batch is not None:
                source = batch[col] * columns.sources + source
                others = other_batch * columns.sources + others
            # A stable sort: a seed that comes twice is found under its first number.
            ordered, order = others.sort(stable=True)
            at = torch.searchsorted(ordered, source).clamp_max(max(ordered.numel() - 1, 0))
            kept = (
                ordered[at] == source if ordered.numel() else torch.zeros_like(source).bool()
            ).nonzero().flatten()  # fmt: skip
            parts[0][kind], parts[1][kind] = order[at[kept]], col[kept]
            parts[2][kind] = columns.edge_id[place[kept]]
        return parts


def _as_neighbors(given: Any) -> NumNeighbors:
    if isinstance(given, Mapping):
        if all(isinstance(kind, tuple) and len(kind) == 3 for kind in given) and all(
            isinstance(counts, Sequence) for counts in given.values()
        ):
            return NumNeighbors(dict(given))
    elif isinstance(given, Sequence) and not isinstance(given, str):
        return NumNeighbors(list(given))
    raise LoaderError(
        f"num_neighbors is {given!r}; give one number for each hop, e.g. [10, 5], or such a list "
        "for each edge type (source, relation, target)"
    )


def _key(seed: int | None, seeds: dict[str, Tensor]) -> int:
    if seed is None:
        return int(torch.randint(0, 1 << 62, (1,)).item())
    key = mix(seed)
    for node in seeds.values():
        # A hash of the whole input: order, count and values.
        weights = torch.arange(1, node.numel() + 1) * 0x9E3779B97F4A7C1
        key = mix(key ^ int((node * weights).sum().item()) ^ node.numel())
    return key


def _check_seeds(node: Tensor, count: int, kind: str) -> None:
    if node.numel() and (int(node.min()) < 0 or int(node.max()) >= count):
        of = f" of type {kind!r}" if kind else ""
        raise LoaderError(
            f"seed nodes{of} range from {int(node.min())} to {int(node.max())}; the graph has "
            f"nodes 0 to {count - 1}"
        )


def _times(kind: str, node: Tensor, times: Mapping[str, Tensor] | None, graph: Graph) -> Tensor:
    if times is not None and times.get(kind) is not None:
        return times[kind].long()
    if kind in graph.node_time:
        return graph.node_time[kind][node].long()
    raise LoaderError(
        "the seeds have no time: pass input_time (NodeLoader) or edge_label_time (LinkLoader), "
        "which time on edges needs"
    )


def _allowed(name: str, got: object, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise LoaderError(f"{name} is {got!r}; allowed are {', '.join(map(repr, allowed))}")
