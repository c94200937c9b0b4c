"""Reads a graph, however PyG holds it, into compressed columns for the sampler."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData

from bifeat_pyg._errors import LoaderError
from bifeat_pyg._sampling import Columns, compress

EdgeType = tuple[str, str, str]
# The one edge type, and node type "", of a graph without types.
ONLY: EdgeType = ("", "", "")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Graph:
    """Edges of every type in compressed columns.

    Attributes:
        hetero: whether the graph has types; without, they are `ONLY` and "".
        columns: by edge type.
        node_counts: by node type.
        node_time: int64 time of nodes by node type; empty unless time lies on nodes.
        temporal: whether neighbours must not be later than their seed.
    """

    hetero: bool
    columns: dict[EdgeType, Columns]
    node_counts: dict[str, int]
    node_time: dict[str, Tensor]
    temporal: bool


def read_graph(source: Any, time_attr: str | None) -> Graph:
    """Returns the graph of a Data, HeteroData, GraphStore or (FeatureStore, GraphStore).

    Raises:
        LoaderError: it holds no edges, or not the time that was asked for.
    """
    features: FeatureStore | None = None
    if isinstance(source, (tuple, list)) and len(source) == 2:
        features, source = source
    if not isinstance(source, GraphStore):
        raise LoaderError(
            f"the sampler needs a Data, HeteroData, GraphStore or (FeatureStore, GraphStore); got "
            f"{type(source).__name__}"
        )
    if features is None and isinstance(source, FeatureStore):
        features = source
    edges = _edges(source)
    hetero = isinstance(source, HeteroData) or ONLY not in edges
    counts = _node_counts(source, features, edges)
    node_time: dict[str, Tensor] = {}
    edge_time: dict[EdgeType, Tensor] = {}
    if time_attr is not None:
        node_time, edge_time = _time(source, features, time_attr, counts, edges)
    columns = {}
    for kind, edge_index in edges.items():
        time = edge_time.get(kind)
        if kind[0] in node_time:
            _inside(kind, edge_index, counts)
            time = node_time[kind[0]][edge_index[0].long().cpu()]
        columns[kind] = compress(edge_index, counts[kind[0]], counts[kind[-1]], time)
    return Graph(hetero, columns, counts, node_time, time_attr is not None)


def _edges(store: GraphStore) -> dict[EdgeType, Tensor]:
    if not store.get_all_edge_attrs():
        raise LoaderError("the graph has no edges; set edge_index (or put one into the GraphStore)")
    for part in store.edge_stores if isinstance(store, (Data, HeteroData)) else ():
        edge_index = part.get("edge_index")
        shape = list(edge_index.shape) if isinstance(edge_index, Tensor) else []
        if edge_index is not None and (len(shape) != 2 or shape[0] != 2):
            got = shape if isinstance(edge_index, Tensor) else type(edge_index).__name__
            raise LoaderError(f"edge_index must be integers [2, edges]; got {got}")
    row, col, _ = store.coo()
    if not isinstance(row, dict):
        row, col = {ONLY: row}, {ONLY: col}
    for kind, ends in [*row.items(), *col.items()]:
        if ends.dtype not in _INTEGERS:
            raise LoaderError(
                f"edges{'' if kind == ONLY else f' {kind}'} are {ends.dtype}; node numbers are "
                "integers: convert with .long()"
            )
    return {kind: torch.stack((row[kind], col[kind])) for kind in row}


def _node_counts(
    store: GraphStore, features: FeatureStore | None, edges: dict[EdgeType, Tensor]
) -> dict[str, int]:
    if isinstance(store, Data):
        return {"": int(store.num_nodes or 0)}
    if isinstance(store, HeteroData):
        return {kind: int(store[kind].num_nodes or 0) for kind in store.node_types}
    counts: dict[str, int] = {}
    for attr in store.get_all_edge_attrs():
        if attr.size is not None:
            kind = attr.edge_type or ONLY
            for end, size in ((kind[0], attr.size[0]), (kind[-1], attr.size[1])):
                if size is not None:
                    counts[end] = max(counts.get(end, 0), int(size))
    for attr in features.get_all_tensor_attrs() if features is not None else ():
        size = features.get_tensor_size(attr) if features is not None else None
        group = attr.group_name or ""
        if size and isinstance(group, str):
            counts.setdefault(group, int(size[0]))
    for kind, edge_index in edges.items():
        for end, ids in ((kind[0], edge_index[0]), (kind[-1], edge_index[1])):
            if end not in counts:
                counts[end] = int(ids.max()) + 1 if ids.numel() else 0
    return counts


def _time(
    store: GraphStore,
    features: FeatureStore | None,
    name: str,
    counts: dict[str, int],
    edges: dict[EdgeType, Tensor],
) -> tuple[dict[str, Tensor], dict[EdgeType, Tensor]]:
    nodes: dict[str, Tensor] = {}
    on_edges: dict[EdgeType, Tensor] = {}
    if isinstance(store, Data):
        if name in store and store.is_node_attr(name):
            nodes[""] = store[name]
        elif name in store and store.is_edge_attr(name):
            on_edges[ONLY] = store[name]
    elif isinstance(store, HeteroData):
        nodes = {kind: store[kind][name] for kind in store.node_types if name in store[kind]}
        on_edges = {kind: store[kind][name] for kind in edges if name in store[kind]}
    if features is not None and not nodes and not on_edges:
        for attr in features.get_all_tensor_attrs():
            if attr.attr_name == name:
                attr.index = None
                nodes[attr.group_name or ""] = features.get_tensor(attr)
    if bool(nodes) == bool(on_edges):
        found = "both nodes and edges hold" if nodes else "neither nodes nor edges hold"
        raise LoaderError(f"time_attr is {name!r}, but {found} such an attribute")
    for kind, time in nodes.items():
        if time.dim() != 1 or time.numel() != counts[kind] or time.is_floating_point():
            raise LoaderError(
                f"time of nodes {kind!r} must be integers [{counts[kind]}]; got {time.dtype} "
                f"{list(time.shape)}"
            )
    return nodes, on_edges


def _inside(kind: EdgeType, edge_index: Tensor, counts: dict[str, int]) -> None:
    source = edge_index[0]
    if source.numel() and (int(source.min()) < 0 or int(source.max()) >= counts[kind[0]]):
        raise LoaderError(
            f"edges {kind} name source nodes {int(source.min())} to {int(source.max())}; there are "
            f"{counts[kind[0]]}"
        )
