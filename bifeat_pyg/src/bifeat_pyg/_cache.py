"""CachedRows: the most used packed rows kept on the device that trains."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from bifeat_pyg import _dispatch
from bifeat_pyg._errors import LoaderError, UnknownAttrError
from bifeat_pyg._quantize import SUFFIX
from bifeat_pyg._store import QuantizedFeatureStore
from bifeat_pyg._table import PackedTable, row_index
from bifeat_pyg.quantizers._base import Codec


@dataclass
class CacheCounts:
    """How many rows were asked for, and how many of them lay in the cache."""

    rows: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of rows that did not cross the bus; 0 before the first."""
        return self.hits / self.rows if self.rows else 0.0


class CachedRows:
    """Gives rows of a packed table, those of high degree from a copy on the device.

    A static cache as in PaGraph and BiFeat: rows are chosen once, by degree, and stay packed, so
    the same device memory holds 8 to 64 times more of them than it would hold as floats. Other rows
    are gathered on the host and copied packed.

    Args:
        source: a `QuantizedFeatureStore`, or a Data or node storage that `quantize` packed.
        degree: how often each row is wanted, [N]: the out-degree of nodes, or counts of a first
            epoch.
        rows: how many to keep, if not by `budget_bytes`.
        budget_bytes: device memory for codes and for the index of where rows lie (4 bytes a row).
        device: where the cache lies and results are given.
        group_name: node type, None in a homogeneous graph.
        attr_name: attribute.

    Attributes:
        counts: hits so far, a `CacheCounts`.

    Raises:
        LoaderError: `degree` does not fit, neither or both of `rows` and `budget_bytes` are given,
            or the budget does not even hold the index.
        UnknownAttrError: no such packed attribute.

    Example:
        >>> cached = CachedRows(store, degree(edge_index[0]), budget_bytes=1 << 30, device="cuda")
        >>> loader = QuantizedLoader(bare_loader, device="cuda", rows=cached)
    """

    def __init__(
        self,
        source: Any,
        degree: Tensor,
        *,
        rows: int | None = None,
        budget_bytes: int | None = None,
        device: torch.device | str = "cpu",
        group_name: str | None = None,
        attr_name: str = "x",
    ) -> None:
        self._table = _table_of(source, group_name, attr_name)
        self.group_name, self.attr_name = group_name, attr_name
        self.device = torch.device(device)
        count = self._table.rows
        if not isinstance(degree, Tensor):
            raise LoaderError(
                f"degree is a {type(degree).__name__}; pass a tensor of {count} numbers"
            )
        if degree.dim() != 1 or degree.numel() != count or degree.is_complex():
            raise LoaderError(
                f"degree must have one number for each of the {count} rows; got "
                f"{degree.dtype} {list(degree.shape)}"
            )
        kept = _how_many(rows, budget_bytes, count, self._table.codec.row_bytes)
        if bool(degree.isnan().any()):
            raise LoaderError(
                f"degree holds {int(degree.isnan().sum())} NaN; give 0 for rows that nobody wants"
            )
        chosen = degree.cpu().argsort(descending=True, stable=True)[:kept]
        # -1: not in the cache
        self._place = torch.full((count,), -1, dtype=torch.int32, device=self.device)
        self._place[chosen.to(self.device)] = torch.arange(
            kept, dtype=torch.int32, device=self.device
        )
        self._codes = self._table.gather(chosen).to(self.device)
        self.counts = CacheCounts()

    @property
    def codec(self) -> Codec:
        """The codec of the rows."""
        return self._table.codec

    @property
    def cached_rows(self) -> int:
        """How many rows lie in the cache."""
        return int(self._codes.shape[0])

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on the device: codes and index."""
        return self._codes.numel() + 4 * self._place.numel()

    def gather(self, index: Any) -> Tensor:
        """Returns packed rows on the device, uint8 [M, row_bytes].

        Raises:
            RowIndexError: an index is outside the table.
        """
        wanted = row_index(index, self._table.rows)
        if isinstance(wanted, slice):
            wanted = torch.arange(self._table.rows)[wanted]
        wanted = _dispatch.check_index(wanted, self._table.rows)
        place = self._place[wanted.to(self.device)]
        missing = (place < 0).nonzero().flatten()
        self.counts.rows += wanted.numel()
        self.counts.hits += wanted.numel() - missing.numel()
        if self.cached_rows == 0:
            return self._table.gather(wanted.cpu()).to(self.device)
        out = self._codes.index_select(0, place.clamp_min(0).long())
        if missing.numel():
            rows = self._table.gather(wanted.to(missing.device)[missing].cpu())
            out.index_copy_(0, missing, rows.to(self.device, non_blocking=True))
        return out

    def fetch(self, index: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns rows as floats on the device, [M, *row shape].

        Raises:
            RowIndexError: an index is outside the table.
            SpecError: `dtype` is not a float dtype.
        """
        return self.codec.decode(self.gather(index), dtype)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.cached_rows} of {self._table.rows} rows on "
            f"{self.device}, {self.cache_bytes} bytes)"
        )


def _table_of(source: Any, group: str | None, attr: str) -> PackedTable:
    if isinstance(source, QuantizedFeatureStore):
        return source.table(group, attr)
    if group is not None and (not isinstance(source, HeteroData) or group not in source.node_types):
        held = source.node_types if isinstance(source, HeteroData) else "none"
        raise UnknownAttrError(f"there is no node type {group!r}; there are: {held}")
    part = source[group] if group is not None else source
    codec = part.get(attr + SUFFIX) if isinstance(part, Data) or hasattr(part, "get") else None
    if not isinstance(codec, Codec):
        raise UnknownAttrError(
            f"{type(source).__name__} holds no packed {attr!r}; pass a QuantizedFeatureStore or "
            "what quantize returned"
        )
    return PackedTable(part[attr], codec, torch.float32)


def _how_many(rows: int | None, budget: int | None, count: int, row_bytes: int) -> int:
    if (rows is None) == (budget is None):
        raise LoaderError("give rows or budget_bytes, one of them")
    for name, value in (("rows", rows), ("budget_bytes", budget)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise LoaderError(f"{name} is {value!r}; it must be a whole number")
    if rows is not None:
        if rows < 0:
            raise LoaderError(f"rows is {rows}; it must not be negative")
        return min(rows, count)
    left = (budget or 0) - 4 * count
    if left < 0:
        raise LoaderError(
            f"budget_bytes is {budget}; the index of {count} rows alone takes {4 * count}"
        )
    return min(count, left // max(row_bytes, 1))
