"""QuantizedLoader: any loader of packed batches, yielding float ones."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

from bifeat_pyg._cache import CachedRows
from bifeat_pyg._errors import LoaderError
from bifeat_pyg._quantize import SUFFIX, codecs_of
from bifeat_pyg._store import QuantizedFeatureStore
from bifeat_pyg.quantizers._base import Codec


class QuantizedLoader:
    """Wraps a loader: moves its batches packed, then dequantizes them where they arrive.

    Works around any iterable of Data, HeteroData or Batch (or lists and tuples of them) whose
    features `quantize` packed, or that come from a `QuantizedFeatureStore`. What crosses between
    processes and to the device are packed rows; the floats exist once, in the process and on the
    device that train. Other attributes of the loader are reached through this object.

    Args:
        loader: e.g. a NodeLoader, NeighborLoader, DataLoader or PrefetchLoader.
        device: where batches go; they stay where they are when None.
        dtype: of the dequantized features.
        prefetch: on a CUDA device, copy the next batch on a stream of its own while this one is
            used.
        store: where the codecs are, if the loader reads from a store that it does not show as
            `loader.data[0]`.
        rows: caches to take features from, by `batch.n_id`; the batches then need no features of
            their own (keep them out of the Data or store that the loader reads).

    Raises:
        LoaderError: `loader` cannot be iterated, the device is not there, or another argument is
            not of its kind. While iterating: PyG's own sampler lacks its compiled library.

    Example:
        >>> for batch in QuantizedLoader(loader, device="cuda"):
        ...     out = model(batch.x, batch.edge_index)
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        prefetch: bool = True,
        *,
        store: QuantizedFeatureStore | None = None,
        rows: CachedRows | Sequence[CachedRows] = (),
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise LoaderError(
                f"loader is a {type(loader).__name__}, which cannot be iterated; pass a PyG "
                "loader or any iterable of Data"
            )
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise LoaderError(f"dtype is {dtype!r}; features are dequantized to a float dtype")
        if store is not None and not isinstance(store, QuantizedFeatureStore):
            raise LoaderError(f"store is a {type(store).__name__}; pass a QuantizedFeatureStore")
        caches = (rows,) if isinstance(rows, CachedRows) else rows
        if not isinstance(caches, Sequence) or not all(isinstance(c, CachedRows) for c in caches):
            raise LoaderError(f"rows is {rows!r}; pass a CachedRows, or several")
        self.loader = loader
        try:
            self.device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise LoaderError(f"device is {device!r}, which torch does not know: {error}") from None
        if self.device is not None and self.device.type == "cuda" and not torch.cuda.is_available():
            raise LoaderError(f"device is {self.device}, but torch sees no CUDA device here")
        self.dtype = dtype
        self.prefetch = prefetch
        self._rows = tuple(caches)
        self._store = store if store is not None else _find_store(loader)

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches()
        if self.device is not None and self.device.type == "cuda" and self.prefetch:
            moved = self._prefetched(batches)
        else:
            moved = (self._moved(batch) for batch in batches)
        for batch in moved:
            yield self._dequantized(batch)

    def _batches(self) -> Iterator[Any]:
        try:
            yield from self.loader
        except ImportError as error:
            # PyG's samplers find out at the first batch, also in a worker.
            if "pyg-lib" not in str(error) and "torch-sparse" not in str(error):
                raise
            raise LoaderError(
                f"{error}. Without them use ours: NodeLoader(data, CSCNeighborSampler(data, "
                "num_neighbors=[10, 5]), ...), and LinkLoader alike"
            ) from error

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Only for what this object lacks; guarded, because unpickling asks before `loader` is
        # there.
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader}, device={self.device}, dtype={self.dtype})"

    def _moved(self, batch: Any) -> Any:
        if self.device is None or batch is None:
            return batch
        if isinstance(batch, (list, tuple)):
            return type(batch)(self._moved(part) for part in batch)
        return batch.to(self.device)

    def _prefetched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches on the device, the copy of the next one under way."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        ahead: list[Any] = []
        for batch in batches:
            with torch.cuda.stream(stream):
                ahead.append(_copied(batch, self.device))
            if len(ahead) == 2:
                yield _received(ahead.pop(0), stream, self.device)
        while ahead:
            yield _received(ahead.pop(0), stream, self.device)

    def _dequantized(self, batch: Any) -> Any:
        if isinstance(batch, (list, tuple)):
            return type(batch)(self._dequantized(part) for part in batch)
        if not isinstance(batch, (Data, HeteroData)):
            # A PrefetchLoader gives one None for an empty loader; others may carry extras.
            return batch
        # The batch may be an object that the user keeps and iterates again.
        batch = copy.copy(batch)
        for part in batch.stores:
            found = dict(codecs_of(part))
            for name in found:
                del part[name + SUFFIX]
            found.update(self._from_store(part))
            for name, codec in found.items():
                if part.get(name) is not None:
                    part[name] = codec.decode(part[name], self.dtype)
            for cached in self._rows:
                if part._key == cached.group_name and "n_id" in part:
                    part[cached.attr_name] = cached.fetch(part.n_id, self.dtype)
        return batch

    def _from_store(self, part: Any) -> Mapping[str, Codec]:
        if self._store is None:
            return {}
        kind = part._key
        return {name: c for (group, name), c in self._store.codecs().items() if group == kind}


def _copied(batch: Any, device: Any) -> Any:
    if isinstance(batch, (list, tuple)):
        return type(batch)(_copied(part, device) for part in batch)
    if not isinstance(batch, (Data, HeteroData)):
        return batch
    return batch.pin_memory().to(device, non_blocking=True)


def _received(batch: Any, stream: Any, device: Any) -> Any:
    current = torch.cuda.current_stream(device)
    current.wait_stream(stream)
    _record(batch, current)
    return batch


def _record(batch: Any, stream: Any) -> None:
    # Without it the allocator could give the batch's memory to the next copy while it is still
    # read.
    if isinstance(batch, (list, tuple)):
        for part in batch:
            _record(part, stream)
    elif isinstance(batch, (Data, HeteroData)):
        batch.record_stream(stream)


def _find_store(loader: Any) -> QuantizedFeatureStore | None:
    """Returns the store that a loader, or one that it wraps, reads from."""
    seen = 0
    while loader is not None and seen < 8:
        data = getattr(loader, "data", None)
        if isinstance(data, (tuple, list)) and data and isinstance(data[0], QuantizedFeatureStore):
            return data[0]
        loader = getattr(loader, "loader", None)
        seen += 1
    return None
