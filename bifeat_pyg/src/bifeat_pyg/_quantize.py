"""quantize: the features of a Data or HeteroData replaced by their packed rows."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import N_KEYS, NodeStorage

from bifeat_pyg._errors import FeatureError, UnknownAttrError
from bifeat_pyg._fit import check_nan
from bifeat_pyg._rows import TensorSource
from bifeat_pyg._table import PackedTable
from bifeat_pyg.quantizers._base import Codec, Spec
from bifeat_pyg.quantizers.scalar import SQ

Graphs = TypeVar("Graphs", Data, HeteroData)

SUFFIX = "_codec"
# What a graph cannot do without, whatever `keep` says.
_STRUCTURE = ("edge_index", "adj_t", "adj", "num_nodes", "edge_label_index")


def quantize(
    data: Graphs,
    attrs: Sequence[str] = ("x",),
    spec: Spec | Mapping[str, Spec] | None = None,
    keep: Iterable[str] | None = None,
    *,
    nan: str = "error",
) -> Graphs:
    """Returns a shallow copy of a graph whose features are packed.

    Each named attribute becomes its packed rows, uint8 [N, row_bytes], and beside it stands its
    codec (`x` and `x_codec`). Loaders then sample and move packed rows; `QuantizedLoader`
    dequantizes what they yield. The graph itself is not changed, and shares everything else.

    Args:
        data: a Data or HeteroData. In a HeteroData every node and edge type that has the attribute
            is packed; each with a codec of its own.
        attrs: names of node or edge attributes, tensors or arrays with one row for each node or
            edge.
        spec: how; SQ(4) where not given, or a mapping from attribute names to specs.
        keep: names of other attributes to keep; all where None. Edges always stay.
        nan: "error", or "zero" to store zeros where values are NaN or infinite.

    Raises:
        UnknownAttrError: no such attribute.
        FeatureError: the features cannot be quantized as they are; NonFiniteError for NaN.

    Example:
        >>> packed = quantize(data, spec=SQ(4))
        >>> packed.x.dtype, packed.x_codec.columns == data.num_features
        (torch.uint8, True)
    """
    check_nan(nan)
    if not isinstance(data, (Data, HeteroData)):
        raise FeatureError(f"data must be a Data or HeteroData; got {type(data).__name__}")
    names: tuple[str, ...] = names_of(attrs)
    out = copy.copy(data)
    for name in names:
        holders = [store for store in out.stores if name in store]
        if not holders:
            held = sorted({key for store in out.stores for key in store})
            raise UnknownAttrError(f"no node or edge has an attribute {name!r}; there are: {held}")
        for store in holders:
            if isinstance(store.get(name + SUFFIX), Codec):
                raise FeatureError(f"{name!r} is packed already, by {store[name + SUFFIX].spec}")
            source = TensorSource(store[name], label(store._key, name))
            check_rows(data, store, name, source.rows)
            table = PackedTable.build(source, spec_for(spec, name), nan)
            store[name] = table.codes
            store[name + SUFFIX] = table.codec
    if keep is not None:
        kept = set(keep).union(names, (name + SUFFIX for name in names), _STRUCTURE)
        for store in out.stores:
            for key in [key for key in store if key not in kept]:
                del store[key]
    return out


def names_of(attrs: Sequence[str]) -> tuple[str, ...]:
    """Returns attribute names; one name alone is allowed too.

    Raises:
        FeatureError: they are no names, or name the edges themselves.
    """
    names = (attrs,) if isinstance(attrs, str) else attrs
    names = tuple(names) if isinstance(names, Iterable) else ()
    if not isinstance(attrs, Iterable) or not all(isinstance(name, str) for name in names):
        raise FeatureError(f"attrs is {attrs!r}; give names of attributes, e.g. ('x',)")
    for name in names:
        if name in _STRUCTURE:
            raise FeatureError(f"{name!r} says how the graph is built and cannot be packed")
    return names


def check_rows(data: Data | HeteroData, store: Any, name: str, rows: int) -> None:
    """Makes sure that features have one row for each node, as far as the graph tells.

    Only for names that PyG itself takes for one row a node: others may be of a graph or of one end
    of a bipartite one.

    Raises:
        FeatureError: there are fewer or more rows than nodes.
    """
    if name not in N_KEYS or not isinstance(store, NodeStorage):
        return
    nodes = store.get("num_nodes")
    least = 0
    for part in data.edge_stores if nodes is None else ():
        edge_index = part.get("edge_index")
        if isinstance(edge_index, Tensor) and edge_index.dim() == 2 and edge_index.numel():
            kinds = (None, None) if part._key is None else (part._key[0], part._key[-1])
            ends = [end for kind, end in zip(kinds, edge_index, strict=False) if kind == store._key]
            least = max([least, *(int(end.max()) + 1 for end in ends)])
    if rows < least or (nodes is not None and rows != nodes):
        there = f"at least {least}" if nodes is None else nodes
        raise FeatureError(
            f"{label(store._key, name)} has {rows} rows, but there are {there} nodes; features "
            "have one row for each"
        )


def spec_for(spec: Spec | Mapping[str, Spec] | None, name: str) -> Spec:
    """Returns the spec of one attribute."""
    if spec is None:
        return SQ(4)
    if isinstance(spec, Mapping):
        if name not in spec:
            raise UnknownAttrError(f"spec has no entry for {name!r}; it has {sorted(spec)}")
        spec = spec[name]
    if not isinstance(spec, Spec):
        raise FeatureError(
            f"spec is a {type(spec).__name__}; use SQ(...), VQ(...) or a quantizer of another "
            f"package"
        )
    return spec


def label(group: Any, name: str) -> str:
    """Returns how messages call an attribute."""
    return name if group is None else f"{group!r} {name}"


def codecs_of(store: Any) -> Iterator[tuple[str, Codec]]:
    """Yields (attribute, codec) of a storage that holds packed attributes."""
    for key in list(store):
        if isinstance(key, str) and key.endswith(SUFFIX):
            value = store[key]
            # Batches of graphs list what is not a tensor, once for each graph.
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], Codec):
                if any(other.fingerprint != value[0].fingerprint for other in value):
                    raise FeatureError(
                        f"graphs batched together were packed by different codecs ({key}); "
                        "quantize them with one, e.g. as one Data"
                    )
                value = value[0]
            if isinstance(value, Codec):
                yield key.removesuffix(SUFFIX), value
