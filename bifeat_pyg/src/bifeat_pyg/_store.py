"""QuantizedFeatureStore: a PyG FeatureStore whose features lie packed."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, HeteroData
from torch_geometric.data.feature_store import TensorAttr, _FieldStatus

from bifeat_pyg._dispatch import check_index
from bifeat_pyg._errors import FeatureError, LoaderError, NotAGraphError, UnknownAttrError
from bifeat_pyg._fit import as_float, check_nan
from bifeat_pyg._quantize import SUFFIX, check_rows, label, names_of, spec_for
from bifeat_pyg._report import Report, measure, table_report
from bifeat_pyg._rows import TensorSource, accepted
from bifeat_pyg._save import load, save
from bifeat_pyg._sources import open_source
from bifeat_pyg._table import PackedTable, row_index
from bifeat_pyg.quantizers._base import Codec, Spec

Key = tuple[str | None, str]

# What PyG's loaders ask a graph for first.
_OF_GRAPHS = ("edge_index", "adj_t", "num_nodes", "node_types", "edge_types", "node_stores")


class StoreAttr(TensorAttr):  # type: ignore[misc]
    """A TensorAttr that may hold an array as its index.

    PyG compares each field with `!=`, which for an array of several values is not a truth value
    (2.8.1: "truth value of an array ... is ambiguous").
    """

    def is_set(self, key: str) -> bool:
        """Returns whether a field was given."""
        return getattr(self, key) is not _FieldStatus.UNSET


class QuantizedFeatureStore(FeatureStore):  # type: ignore[misc]
    """Holds features packed, and other node attributes as they are.

    Use it as the first of the pair that PyG's loaders take: `NodeLoader((store, graph), ...)`. What
    `get_tensor` returns of a packed attribute are packed rows, uint8 [M, row_bytes]: that is what
    travels. `QuantizedLoader` dequantizes them; `fetch` gives floats directly.

    A homogeneous graph's attributes are in the group None, others in that of their node type.

    Example:
        >>> store = QuantizedFeatureStore.from_data(data, spec=SQ(4))
        >>> loader = QuantizedLoader(NodeLoader((store, data), sampler,
        input_nodes=data.train_mask))
    """

    def __init__(self) -> None:
        super().__init__(tensor_attr_cls=StoreAttr)
        # FeatureStore.__setattr__ is plain, but Data's is not: stay with ordinary attributes.
        self._tables: dict[Key, PackedTable] = {}
        self._plain: dict[Key, Tensor] = {}
        self._path: Path | None = None

    def __getattr__(self, name: str) -> Any:
        if name in _OF_GRAPHS:
            raise NotAGraphError(
                f"this loader takes a graph (it asks for {name}), not a QuantizedFeatureStore; "
                "give it quantize(data), or use NodeLoader or LinkLoader with (store, graph)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def from_data(
        cls,
        data: Data | HeteroData,
        attrs: Sequence[str] = ("x",),
        spec: Spec | Mapping[str, Spec] | None = None,
        keep: Iterable[str] | None = None,
        *,
        nan: str = "error",
    ) -> "QuantizedFeatureStore":
        """Returns a store of a graph's node attributes, those named packed.

        Args:
            data: a Data or HeteroData; one that `quantize` returned is taken as it is.
            attrs: node attributes to pack.
            spec: see `quantize`.
            keep: names of other node attributes (y, masks, time) to hold; all where None.
            nan: see `quantize`.

        Raises:
            UnknownAttrError: no node has such an attribute.
            LoaderError: it is an attribute of edges, which PyG's loaders cannot fetch from a store.
            FeatureError: see `quantize`.
        """
        check_nan(nan)
        if not isinstance(data, (Data, HeteroData)):
            raise FeatureError(f"data must be a Data or HeteroData; got {type(data).__name__}")
        names = names_of(attrs)
        wanted = None if keep is None else set(keep)
        store = cls()
        for name in (*names, *(wanted or ())):
            _refuse_edges(data, name)
        for part in data.node_stores:
            for name in list(part):
                value = part[name]
                if name in names:
                    source = TensorSource(value, label(part._key, name))
                    check_rows(data, part, name, source.rows)
                    codec = part.get(name + SUFFIX)
                    if isinstance(codec, Codec):
                        table = PackedTable(value, codec, torch.float32)
                    else:
                        table = PackedTable.build(source, spec_for(spec, name), nan)
                    store._tables[part._key, name] = table
                elif part.is_node_attr(name) and (wanted is None or name in wanted):
                    store._plain[part._key, name] = accepted(value, name)
        for name in names:
            if not any(held == name for _, held in store._tables):
                held = sorted({key for part in data.node_stores for key in part})
                raise UnknownAttrError(f"no node has an attribute {name!r}; there are: {held}")
        return store

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> "QuantizedFeatureStore":
        """Returns a store that `save` or `quantize_file` wrote, its codes mapped, not read.

        Processes that open it, or inherit it, share one copy of the codes in the system's cache. It
        cannot be written through: `put_tensor` with an index is refused.

        Args:
            path: the folder.
            verify: also read all codes and compare their checksum; parameters are always compared.

        Raises:
            FormatError: it is no store, or incomplete; VersionError, of another version.
            ChecksumError: bytes were changed.
            SpecError: a quantizer it needs is not installed.
        """
        store = cls()
        store._path = Path(path).absolute()
        store._tables, store._plain = load(store._path, verify)
        return store

    def save(self, path: str | Path) -> None:
        """Writes the store into a new folder, which appears when it is complete.

        Raises:
            StorageError: something is there already, or it cannot be written.
        """
        save(Path(path).absolute(), self._tables, self._plain)

    def fetch(
        self,
        group_name: str | None,
        attr_name: str,
        index: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Returns rows of a packed attribute as floats, [M, *row shape].

        Args:
            group_name: node type, None in a homogeneous graph.
            attr_name: e.g. "x".
            index: None, int, slice, bool mask or integers.
            dtype: of the result.

        Raises:
            UnknownAttrError: it is not there, or not packed.
            RowIndexError: an index is outside.
            SpecError: `dtype` is not a float dtype.
        """
        return self.table(group_name, attr_name).fetch(index, dtype)

    def codec(self, group_name: str | None, attr_name: str) -> Codec:
        """Returns the codec of a packed attribute.

        Raises:
            UnknownAttrError: it is not there, or not packed.
        """
        return self.table(group_name, attr_name).codec

    def table(self, group_name: str | None, attr_name: str) -> PackedTable:
        """Returns the packed table of an attribute.

        Raises:
            UnknownAttrError: it is not there, or not packed.
        """
        try:
            return self._tables[group_name, attr_name]
        except KeyError:
            raise UnknownAttrError(self._missing(group_name, attr_name)) from None

    def codecs(self) -> dict[Key, Codec]:
        """Returns all codecs by (node type, attribute)."""
        return {key: table.codec for key, table in self._tables.items()}

    def report(self, against: Mapping[Key, Any] | None = None, *, progress: bool = False) -> Report:
        """Returns bytes, ratio and error of every packed attribute; prints as a table.

        The errors are those of the packing, where it is known. They can be measured anew against
        features, e.g. those of a later date, or where a packed Data was taken as it was.

        Args:
            against: by (node type, attribute), features as for `quantize_file`, of as many rows.
            progress: show a bar on a terminal while features are read.

        Raises:
            UnknownAttrError: there is no such packed attribute.
            FeatureError: the features cannot be read, or have another shape; NonFiniteError for
                NaN.
        """
        measured = {
            key: measure(self.table(*key), open_source(features, label(*key)), progress)
            for key, features in (against or {}).items()
        }
        return Report(
            tuple(
                table_report(*key, table, measured.get(key, table.errors))
                for key, table in self._tables.items()
            )
        )

    # What FeatureStore asks for

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        key = (attr.group_name, attr.attr_name)
        values = accepted(tensor, label(*key))
        table = self._tables.get(key)
        if attr.index is None:
            if table is not None:
                raise FeatureError(f"{label(*key)} is packed; remove it first to hold other values")
            # A reference, not a copy: features may be large.
            self._plain[key] = values
            return True
        if table is None and key not in self._plain:
            return False
        count = table.rows if table is not None else self._plain[key].shape[0]
        index = row_index(attr.index, count)
        if table is None:
            self._plain[key][index] = values.to(self._plain[key].dtype)
            return True
        rows = as_float(values.reshape(-1, table.codec.columns), 0, "error", label(*key))
        if self._path is not None:
            raise FeatureError(
                f"{label(*key)} is mapped from {self._path} and is not written in place; quantize "
                "the changed features into another folder"
            )
        table.codes[index, : table.codec.row_bytes] = table.codec.encode(rows)
        return True

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        key = (attr.group_name, attr.attr_name)
        if key in self._tables:
            return self._tables[key].gather(attr.index)
        if key not in self._plain:
            raise UnknownAttrError(self._missing(*key))
        tensor = self._plain[key]
        index = row_index(attr.index, tensor.shape[0])
        return tensor[index if isinstance(index, slice) else check_index(index, tensor.shape[0])]

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        key = (attr.group_name, attr.attr_name)
        found = self._tables.pop(key, None) is not None
        return self._plain.pop(key, None) is not None or found

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        key = (attr.group_name, attr.attr_name)
        if key in self._tables:
            table = self._tables[key]
            return table.rows, table.codec.row_bytes
        return tuple(self._plain[key].shape) if key in self._plain else None

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Returns a fresh TensorAttr for everything held; loaders write into them."""
        return [StoreAttr(group_name=g, attr_name=a) for g, a in (*self._tables, *self._plain)]

    def _missing(self, group: str | None, name: str) -> str:
        held = [label(*key) for key in (*self._tables, *self._plain)]
        return f"the store holds no {label(group, name)}; it holds: {', '.join(held) or 'nothing'}"

    def __getstate__(self) -> dict[str, Any]:
        # To a process that is spawned goes the path, not the mapping: it maps the same pages.
        state = self.__dict__.copy()
        if self._path is not None:
            state["_tables"] = state["_plain"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._path is not None:
            self._tables, self._plain = load(self._path, verify=False)

    def __len__(self) -> int:
        return len(self._tables) + len(self._plain)

    def __repr__(self) -> str:
        parts = [f"{label(*k)}: {t.rows} x {t.codec.columns}" for k, t in self._tables.items()]
        return f"{type(self).__name__}({', '.join(parts)})"


def _refuse_edges(data: Data | HeteroData, name: str) -> None:
    if any(name in part for part in data.edge_stores) and (
        isinstance(data, HeteroData) or data.is_edge_attr(name)
    ):
        raise LoaderError(
            f"{name!r} is an attribute of edges. Loaders that read from a feature store index "
            "everything by node, also edge attributes, and would return wrong rows. Use "
            f"quantize(data, attrs=({name!r},)) and pass the Data itself to the loader, or join "
            f"by batch.e_id"
        )
