"""Group keys: any number of columns, any plain type, null as its own group, in sorted order."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kingpin_ray._errors import UnsupportedColumnError
from kingpin_ray._memory import give_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_DENSE_LIMIT = 1 << 22


def one_chunk(column: Any) -> pa.Array:
    """Returns a column as one contiguous array; what lies in one chunk already is not copied."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def plain_column(column: Any, name: str) -> pa.Array:
    """Returns one contiguous array whose equal keys are equal values: NaN is null, -0.0 is 0.0."""
    array = one_chunk(column)
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.cast(kind.value_type)
        kind = array.type
    if pa.types.is_floating(kind):
        array = array.cast(pa.float64())
        values = array.to_numpy(zero_copy_only=False) + 0.0
        return pa.array(values, from_pandas=True)
    if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        return array.cast(pa.int64())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view():
        return array.cast(pa.large_string())
    plain = (
        pa.types.is_boolean(kind)
        or pa.types.is_uint64(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_time(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_null(kind)
    )
    if not plain:
        raise UnsupportedColumnError(
            f"by={name!r}: a column of type {kind} cannot be a group key; "
            "use strings, numbers, booleans, dates or categories"
        )
    return array


@dataclass(frozen=True)
class KeyTable:
    """The distinct keys of a data set, sorted, nulls last; a group's id is its row.

    Attributes:
        names: the key columns.
        table: one row a group.
        levels: the sorted distinct values of each column.
        combos: (G,) int64, each group's levels packed in mixed radix, ascending.
    """

    names: tuple[str, ...]
    table: pa.Table
    levels: tuple[pa.Array, ...]
    combos: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def key(self, group: int) -> Any:
        """Returns the key of a group: a plain value for one column, a tuple for several."""
        values = tuple(self.table.column(j)[group].as_py() for j in range(len(self.names)))
        return values[0] if len(values) == 1 else values

    def keys(self) -> list[Any]:
        """Returns every key, by group id."""
        columns = [self.table.column(j).to_pylist() for j in range(len(self.names))]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def lookup(self, columns: Sequence[Any]) -> NDArray[np.int64]:
        """Returns the group id of each row, -1 for a key that is not in the table.

        Args:
            columns: one Arrow array per key column.

        Raises:
            UnsupportedColumnError: a column cannot be read as the type the key had in training.
        """
        packed: NDArray[np.int64] | None = None
        known: NDArray[np.bool_] | None = None
        for name, column, level in zip(self.names, columns, self.levels, strict=True):
            array = plain_column(column, name)
            if array.type != level.type:
                try:
                    array = array.cast(level.type)
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                    raise UnsupportedColumnError(
                        f"by={name!r}: keys of type {array.type}, but the models were trained with "
                        f"{level.type} keys; convert the column"
                    ) from error
            found = pc.index_in(array, value_set=level, skip_nulls=False)
            code = pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)
            good = code >= 0
            known = good if known is None else known & good
            packed = code if packed is None else packed * len(level) + code
        assert packed is not None
        assert known is not None
        at = np.searchsorted(self.combos, packed)
        at = np.minimum(at, len(self.combos) - 1)
        return np.where(known & (self.combos[at] == packed), at, -1)

    def find(self, key: Any) -> int:
        """Returns the group id of one key, -1 when there is none."""
        values = key if len(self.names) > 1 else (key,)
        if not isinstance(values, tuple) or len(values) != len(self.names):
            return -1
        packed = 0
        for value, level in zip(values, self.levels, strict=True):
            code = _place(value, level)
            if code < 0:
                return -1
            packed = packed * len(level) + code
        at = int(np.searchsorted(self.combos, packed))
        return at if at < len(self.combos) and self.combos[at] == packed else -1

    def seeds(self, random_state: int) -> NDArray[np.uint64]:
        """Returns (G,) a seed per group that depends on its key and `random_state` alone."""
        salt = str(random_state).encode()
        digest = (
            hashlib.blake2b(repr(key).encode(), digest_size=8, key=salt).digest()
            for key in self.keys()
        )
        return np.frombuffer(b"".join(digest), dtype="<u8").astype(np.uint64)


def encode(columns: Sequence[Any], names: Sequence[str]) -> tuple[NDArray[np.int32], KeyTable]:
    """Returns the group id of each row and the table of keys.

    Args:
        columns: one Arrow array per key column, all of one length.
        names: their names.

    Raises:
        UnsupportedColumnError: a column's type cannot be a key.
    """
    packed: NDArray[np.integer] | None = None
    levels: list[pa.Array] = []
    span = 1
    for name, column in zip(names, columns, strict=True):
        coded = plain_column(column, name).dictionary_encode(null_encoding="encode")
        order = pc.sort_indices(coded.dictionary).to_numpy()
        level = coded.dictionary.take(pa.array(order))
        # One column has no more keys than rows; several are packed into 64 bits.
        rank = np.empty(len(order), np.int32 if len(columns) == 1 else np.int64)
        rank[order] = np.arange(len(order))
        code: NDArray[Any] = (
            rank[coded.indices.to_numpy(zero_copy_only=False)] if len(coded) else rank[:0]
        )
        span *= max(len(level), 1)
        if span > 2**62:
            raise UnsupportedColumnError(
                f"by={list(names)}: the key columns have {span} possible combinations, more than "
                "2**62; join some of them into one column first"
            )
        packed = code if packed is None else packed * len(level) + code
        levels.append(level)
    assert packed is not None
    del coded, code
    give_back()
    if len(levels) == 1:  # each level has a row
        return packed.astype(np.int32, copy=False), _table(
            tuple(names), tuple(levels), np.arange(len(levels[0]))
        )
    combos, ids = _compress(packed, span)
    return ids, _table(tuple(names), tuple(levels), combos)


def _place(value: Any, level: pa.Array) -> int:
    """Returns where a value is in a sorted level, -1 when it is not; no hash table is built."""
    known = len(level) - level.null_count
    if value is None or value != value:  # NaN is null
        return known if level.null_count else -1
    if isinstance(value, np.generic):
        value = value.item()
    try:
        at = bisect_left(range(known), value, key=lambda i: level[i].as_py())
        found = at < known and level[at].as_py() == value
    except TypeError:  # a key of another type is in no table
        return -1
    return at if found else -1


def _compress(
    packed: NDArray[np.integer], span: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns the combinations that occur, ascending, and which of them each row has."""
    if span > max(_DENSE_LIMIT, 4 * len(packed)):
        combos, ids = np.unique(packed, return_inverse=True)
        return combos, ids.astype(np.int32)
    seen = np.zeros(span, bool)
    seen[packed] = True
    combos = np.flatnonzero(seen)
    renumber = np.cumsum(seen, dtype=np.int32) - np.int32(1)
    return combos, renumber[packed]


def _table(
    names: tuple[str, ...], levels: tuple[pa.Array, ...], combos: NDArray[np.int64]
) -> KeyTable:
    columns: list[pa.Array] = []
    rest = combos
    for level in reversed(levels):
        rest, code = np.divmod(rest, max(len(level), 1))
        columns.append(level.take(pa.array(code)))
    # Two key columns may share a name in the data; the table keeps them apart by position.
    unique = [f"{i}" for i in range(len(names))]
    return KeyTable(
        names, pa.table(dict(zip(unique, reversed(columns), strict=True))), levels, combos
    )


def rebuild(
    names: Sequence[str], levels: Sequence[pa.Array], combos: NDArray[np.int64]
) -> KeyTable:
    """Returns the KeyTable of the parts that a store keeps."""
    return _table(tuple(names), tuple(levels), combos)
