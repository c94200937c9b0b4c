"""Input of any kind, turned into keys, a target and feature columns."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kingpin_ray._blocks import Block, group_counts, group_order, offsets_of, ranges
from kingpin_ray._errors import (
    EmptyDataError,
    InputError,
    MissingColumnError,
    ParameterError,
)
from kingpin_ray._hashes import row_hashes
from kingpin_ray._inputs import arrow_of, numeric_column
from kingpin_ray._keys import KeyTable, encode
from kingpin_ray._targets import target_classes, target_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


_BY_ROW = 128 << 20


@dataclass(frozen=True)
class Columns:
    """A table that hands out one column at a time.

    Attributes:
        names: every column, in order.
        n_rows: rows.
        get: the Arrow array of a column.
        plain: the NumPy array behind a column, or None where there is none.
    """

    names: tuple[Any, ...]
    n_rows: int
    get: Callable[[Any], Any]
    plain: Callable[[Any], Any] = lambda name: None

    def numbers(self, name: Any) -> NDArray[np.generic]:
        """Returns a feature column as a number array, NaN where it is missing.

        Raises:
            UnsupportedColumnError: the column is not numeric.
        """
        values = self.plain(name)
        if isinstance(values, np.ndarray) and values.dtype.isnative:
            if values.dtype.kind in "iuf":
                return values
            if values.dtype.kind == "b":
                return values.view(np.uint8)
        return numeric_column(self.get(name), name)


def columns_of(data: Any, *, once: bool = False) -> Columns:
    """Returns a view of a pandas frame or an Arrow table.

    Args:
        data: the frame or table.
        once: each column will be asked for once: those of a table that nobody else holds are let go
            one by one, so that columns that must be copied are not held twice.

    Raises:
        InputError: `data` is none of these, or has two columns of one name.
        MixedTypesError: reading a column finds values of several types.
    """
    if isinstance(data, (pa.Table, pa.RecordBatch)):
        table = data if isinstance(data, pa.Table) else pa.Table.from_batches([data])
        _no_twins(table.column_names)
        if once:
            left = dict(zip(table.column_names, table.columns, strict=True))
            return Columns(tuple(left), table.num_rows, left.pop)
        return Columns(tuple(table.column_names), table.num_rows, table.column)
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        _no_twins(list(data.columns))
        return Columns(
            tuple(data.columns),
            len(data),
            lambda name: arrow_of(data[name], f"column {name!r}"),
            lambda name: data[name].values,
        )
    raise InputError(
        f"data of type {type(data).__name__} is not understood; give a pandas DataFrame, an Arrow "
        "table, a Ray Dataset, a Parquet path or glob, or X, y and groups"
    )


def array_columns(X: NDArray[np.generic]) -> Columns:
    """Returns a view of an (N, D) array whose columns are named by their numbers."""
    return Columns(
        tuple(range(X.shape[1])),
        len(X),
        lambda j: arrow_of(X[:, j], f"column {j}"),
        lambda j: X[:, j],
    )


def _no_twins(names: Sequence[Any]) -> None:
    seen: set[Any] = set()
    for name in names:
        if name in seen:
            raise InputError(f"the data has two columns named {name!r}; rename one of them")
        seen.add(name)


@dataclass(frozen=True)
class Layout:
    """Which columns play which part.

    Attributes:
        by: key columns.
        target: the column to predict; None when it is given apart.
        features: columns of X, in order.
    """

    by: tuple[Any, ...]
    target: Any
    features: tuple[Any, ...]


def layout(
    names: Sequence[Any],
    by: Any,
    target: Any,
    features: Sequence[Any] | None,
    barred: Any = None,
) -> Layout:
    """Returns the parts of the columns.

    Args:
        names: every column of the data.
        by: key column, list of them, or None.
        target: the column to predict; None when it is given apart.
        features: columns of X; None for all others.
        barred: a column that need not be there and never is a feature: it holds the target too.

    Raises:
        MissingColumnError: a named column is not there.
        ParameterError: a column plays two parts, or no feature is left.
    """
    keys = tuple(by) if isinstance(by, (list, tuple)) else () if by is None else (by,)
    wanted = [("by", key) for key in keys]
    if target is not None:
        wanted.append(("target", target))
    wanted += [("features", name) for name in features or ()]
    there = set(names)
    for part, name in wanted:
        if name not in there:
            shown = ", ".join(repr(n) for n in list(names)[:20])
            raise MissingColumnError(
                f"{part}={name!r} is not a column of the data, which has {shown}"
                + (" ..." if len(names) > 20 else "")
            )
    if len(set(keys)) < len(keys):
        raise ParameterError(f"by={list(keys)!r} names a column twice")
    if target is not None and target in keys:
        raise ParameterError(f"target={target!r} is also in by={list(keys)!r}; use another column")
    if features is None:
        chosen = tuple(n for n in names if n not in (*keys, target, barred))
    else:
        chosen = tuple(features)
        for part, used in (("target", {target, barred}), ("by", set(keys))):
            both = [name for name in chosen if name in used]
            if both:
                raise ParameterError(f"features names {both[0]!r}, which is {part}; take it out")
        if len(set(chosen)) < len(chosen):
            raise ParameterError("features names a column twice; name each once")
    if not chosen:
        raise ParameterError("features: no column is left to train on; name at least one")
    return Layout(keys, target, chosen)


@dataclass(frozen=True)
class Frame:
    """Training data, its rows sorted by group through an index.

    Attributes:
        keys: the groups.
        columns: feature columns by position.
        y: (N,) float64, or int64 codes.
        classes: the sorted classes; None for regression.
        order: (kept rows,) row numbers in group order, rows without a target left out; int32 where
            that holds them.
        offsets: (G + 1,) where each group's rows begin in `order`.
        n_dropped: (G,) rows left out.
        seeds: (G,) uint64.
    """

    keys: KeyTable
    columns: Sequence[NDArray[np.generic]]
    y: NDArray[np.generic]
    classes: NDArray[Any] | None
    order: NDArray[np.signedinteger]
    offsets: NDArray[np.int64]
    n_dropped: NDArray[np.int64]
    seeds: NDArray[np.uint64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """(G,) usable rows of each group."""
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """float32 when that holds every column exactly, else float64."""
        small = all(
            column.dtype.itemsize <= 2 or column.dtype == np.float32 for column in self.columns
        )
        return np.dtype(np.float32 if small else np.float64)

    @functools.cached_property
    def _by_row(self) -> NDArray[np.floating] | None:
        """All features row by row, where that is small.

        Rows of a group lie anywhere in the data: one memory access for a row beats one for each of
        its columns.
        """
        if not self.columns or len(self.y) * len(self.columns) * self.dtype.itemsize > _BY_ROW:
            return None
        X = np.empty((len(self.y), len(self.columns)), self.dtype)
        for begin in range(0, len(X), 4096):
            for j, column in enumerate(self.columns):
                X[begin : begin + 4096, j] = column[begin : begin + 4096]
        return X

    def warm(self) -> None:
        """Makes what `block` keeps, before several threads ask for it at once."""
        self._by_row  # noqa: B018  (cached by being asked for)

    def matrix(self, rows: NDArray[np.int64]) -> NDArray[np.floating]:
        """Returns (len(rows), D) features."""
        if self._by_row is not None:
            return self._by_row.take(rows, axis=0)
        X = np.empty((len(rows), len(self.columns)), self.dtype)
        for j, column in enumerate(self.columns):
            X[:, j] = column[rows]
        return X

    def block(self, groups: NDArray[np.int64]) -> Block:
        """Returns the rows of some groups."""
        counts = self.counts[groups]
        rows = self.order[ranges(self.offsets[groups], counts)]
        return Block(
            X=self.matrix(rows),
            y=self.y[rows],
            offsets=offsets_of(counts),
            groups=groups,
            seeds=self.seeds[groups],
            n_classes=0 if self.classes is None else len(self.classes),
            n_dropped=self.n_dropped[groups],
            first=np.zeros(len(groups), np.int64),
        )

    def part(self, groups: NDArray[np.int64], number: int, parts: int) -> Block:
        """Returns the rows of some groups that worker `number` of `parts` holds."""
        counts = self.counts[groups]
        first = counts * number // parts
        held = counts * (number + 1) // parts - first
        rows = self.order[ranges(self.offsets[groups] + first, held)]
        return Block(
            X=self.matrix(rows),
            y=self.y[rows],
            offsets=offsets_of(held),
            groups=groups,
            seeds=self.seeds[groups],
            n_classes=0 if self.classes is None else len(self.classes),
            n_dropped=self.n_dropped[groups],
            first=first,
        )

    def class_counts(self) -> NDArray[np.int64]:
        """Returns (G, K) rows of each class; (G, 0) for regression."""
        classes = 0 if self.classes is None else len(self.classes)
        if not classes:
            return np.zeros((len(self.keys), 0), np.int64)
        cell = self._owners() * classes + self.y[self.order].astype(np.int64)
        return np.bincount(cell, minlength=len(self.keys) * classes).reshape(
            len(self.keys), classes
        )

    def row_sums(self) -> NDArray[np.uint64]:
        """Returns (G, K) sums of the hashes of each class's rows; (G, 1) for regression.

        They tell changed data apart, and depend neither on the order of rows nor on how these are
        split into parts. A regression row's hash is of its target too.
        """
        cell = self._owners()
        columns, classes = self.columns, 1
        if self.classes is None:
            columns = [self.y, *columns]
        else:
            classes = len(self.classes)
            cell = cell * classes + self.y[self.order].astype(np.int64)
        sums = np.zeros(len(self.keys) * classes, np.uint64)
        np.add.at(sums, cell, row_hashes(columns)[self.order])
        return sums.reshape(len(self.keys), classes)

    def _owners(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.keys)), self.counts)

    def sample_rows(
        self, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.floating], NDArray[np.generic]]:
        """Returns features and target of some usable rows, counted in the order of the data."""
        rows = positions
        if len(self.order) < len(self.y):
            kept = np.zeros(len(self.y), bool)
            kept[self.order] = True
            rows = np.flatnonzero(kept)[positions]
        return self.matrix(rows), self.y[rows]

    def only_class(self, group: int) -> int:
        """Returns the class of a group that holds one class only, else -1."""
        codes = np.unique(self.y[self.order[self.offsets[group] : self.offsets[group + 1]]])
        return int(codes[0]) if len(codes) == 1 else -1


def build_frame(
    data: Columns,
    parts: Layout,
    y: Any,
    groups: Any,
    classifier: bool,
    random_state: int,
    *,
    allow_empty: bool = False,
) -> Frame:
    """Returns the training data of a call to `fit`.

    Args:
        data: the features, and the keys and target unless these are given apart.
        parts: which column is what.
        y: Arrow array of the target, or None to take `parts.target`.
        groups: list of Arrow arrays of the keys, or None to take `parts.by`.
        classifier: whether the target holds classes.
        random_state: the seed of the run.
        allow_empty: whether data without a single target is taken.

    Raises:
        EmptyDataError: no row has a target.
    """
    if data.n_rows == 0 and not allow_empty:
        raise EmptyDataError("the data has 0 rows; at least one sample is required")
    key_columns = groups if groups is not None else [data.get(name) for name in parts.by]
    names = parts.by if groups is None else tuple(f"group{i}" for i in range(len(groups)))
    if not key_columns:
        key_columns, names = [pa.nulls(data.n_rows, pa.int8())], ("all",)
    for column in [*key_columns, *([] if y is None else [y])]:
        if len(column) != data.n_rows:
            raise InputError(
                f"inconsistent numbers of samples: X has {data.n_rows} rows, y or groups "
                f"{len(column)}; give one for each row"
            )
    ids, keys = encode(key_columns, [str(name) for name in names])
    target = y if y is not None else data.get(parts.target)
    name = parts.target if parts.target is not None else "y"
    classes: NDArray[Any] | None = None
    values: NDArray[np.generic]
    if classifier:
        values, classes = target_classes(target, name)
        kept = values >= 0
    else:
        values = target_values(target, name)
        kept = ~np.isnan(values)
    columns = [data.numbers(feature) for feature in parts.features]
    n_groups = len(keys)
    if not kept.any() and not allow_empty:
        raise EmptyDataError(
            f"target={name!r} is missing in all {data.n_rows} rows; there is nothing to train on"
        )
    dropped = np.zeros(n_groups, np.int64)
    if not kept.all():
        dropped = group_counts(ids[~kept], n_groups)
        ids = np.where(kept, ids, np.int32(-1))
    return Frame(
        keys=keys,
        columns=columns,
        y=values,
        classes=classes,
        order=group_order(ids, n_groups),
        offsets=offsets_of(group_counts(ids, n_groups)),
        n_dropped=dropped,
        seeds=keys.seeds(random_state),
    )
