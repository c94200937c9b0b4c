"""Keys of every type, composite ones, nulls, and look-ups."""

import datetime as dt
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kingpin_ray import UnsupportedColumnError, _blocks
from kingpin_ray._blocks import buckets, group_counts, group_order, offsets_of, ranges
from kingpin_ray._keys import encode, rebuild

TYPES: dict[str, list[Any]] = {
    "string": ["b", "a", "b", None, "é"],
    "int": [3, -1, 3, None, 2**53 + 1],
    "float": [0.5, float("nan"), 0.5, None, -0.0],
    "bool": [True, False, True, None, False],
    "date": [dt.date(2013, 1, 1), dt.date(2012, 1, 1), None, dt.date(2013, 1, 1), None],
    "timestamp": [dt.datetime(2013, 1, 1, 5), None, dt.datetime(2013, 1, 1, 4), None, None],
}


@pytest.mark.parametrize("name", list(TYPES))
def test_each_type_round_trips(name: str) -> None:
    column = pa.array(TYPES[name])
    ids, keys = encode([column], ["k"])
    back = keys.keys()
    for value, group in zip(column.to_pylist(), ids, strict=True):
        missing = value is None or value != value
        assert back[group] is None if missing else back[group] == value
        assert keys.find(value) == group
    assert (keys.lookup([column]) == ids).all()
    known = [key for key in back if key is not None]
    assert known == sorted(known)
    assert back.index(None) == len(back) - 1
    again = rebuild(keys.names, keys.levels, keys.combos)
    assert again.keys() == back


def test_nan_and_none_are_one_group_and_minus_zero_is_zero() -> None:
    ids, keys = encode([pa.array([float("nan"), None, -0.0, 0.0], from_pandas=False)], ["k"])
    assert ids.tolist() == [1, 1, 0, 0]
    assert keys.keys() == [0.0, None]


def test_categories_are_keys_by_their_values() -> None:
    column = pa.Array.from_pandas(pd.Categorical(["b", "a", "b"], categories=["c", "b", "a"]))
    ids, keys = encode([column], ["k"])
    assert keys.keys() == ["a", "b"]
    assert ids.tolist() == [1, 0, 1]


def test_unseen_and_foreign_keys() -> None:
    _, keys = encode([pa.array([1, 2, 2]), pa.array(["x", "x", "y"])], ["a", "b"])
    assert keys.keys() == [(1, "x"), (2, "x"), (2, "y")]
    got = keys.lookup([pa.array([1, 1, 3, 2], pa.int32()), pa.array(["x", "y", "x", None])])
    assert got.tolist() == [0, -1, -1, -1]
    assert keys.find((1, "y")) == keys.find(1) == keys.find(("x", 1)) == -1
    with pytest.raises(UnsupportedColumnError, match="trained with int64 keys"):
        keys.lookup([pa.array(["one"]), pa.array(["x"])])


def test_nested_columns_are_refused() -> None:
    with pytest.raises(UnsupportedColumnError, match="cannot be a group key"):
        encode([pa.array([[1], [2]])], ["k"])


@given(
    rows=st.lists(
        st.tuples(st.none() | st.integers(-3, 3), st.none() | st.text(max_size=2)), min_size=1
    )
)
def test_composite_keys_agree_with_a_dictionary(rows: list[tuple[Any, Any]]) -> None:
    columns = [
        pa.array([a for a, _ in rows], pa.int64()),
        pa.array([b for _, b in rows], pa.string()),
    ]
    ids, keys = encode(columns, ["a", "b"])
    assert [keys.key(int(g)) for g in ids] == rows
    assert len(keys) == len(set(rows))
    assert (keys.lookup(columns) == ids).all()


def test_seeds_depend_on_the_key_alone() -> None:
    _, few = encode([pa.array(["a", "c"])], ["k"])
    _, many = encode([pa.array(["a", "b", "c"])], ["k"])
    assert few.seeds(1).tolist() == many.seeds(1)[[0, 2]].tolist()
    assert (few.seeds(1) != few.seeds(2)).all()


@given(st.lists(st.integers(-1, 5), max_size=60), st.booleans(), st.sampled_from([7, 1 << 17]))
def test_group_order_is_a_stable_sort(ids: list[int], wide: bool, piece: int) -> None:
    group = np.array(ids, np.int32)
    group[group > 0] *= 50_000 if wide else 1
    groups = 250_001 if wide else 6
    with mock.patch.object(_blocks, "_PIECE", piece):
        got = group_order(group, groups)
        counts = group_counts(group, groups)
    kept = np.flatnonzero(group >= 0)
    assert got.tolist() == kept[np.argsort(group[kept], kind="stable")].tolist()
    assert counts.tolist() == np.bincount(group[kept], minlength=groups).tolist()


@given(st.lists(st.integers(0, 300), min_size=1, max_size=80), st.integers(64, 1 << 14))
def test_buckets_hold_each_group_once_and_waste_little(counts: list[int], budget: int) -> None:
    sizes = np.array(counts)
    seen: list[int] = []
    for bucket in buckets(sizes, 8, budget=budget):
        held = sizes[bucket.positions]
        assert held.max() == bucket.width
        if len(held) > 1:
            assert held.sum() >= 0.85 * bucket.width * len(held) - 1e-9
            assert bucket.width * len(held) * 8 <= budget
        seen += bucket.positions.tolist()
    assert sorted(seen) == np.flatnonzero(sizes).tolist()


def test_ranges() -> None:
    counts = np.array([2, 0, 3])
    assert offsets_of(counts).tolist() == [0, 2, 2, 5]
    assert ranges(np.array([10, 0, 4]), counts).tolist() == [10, 11, 4, 5, 6]
