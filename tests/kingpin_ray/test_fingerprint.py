"""What tells a store that it is given other data: hashes of rows, summed by group."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kingpin_ray as kp
from kingpin_ray import GroupedEstimator, Logistic, Ridge
from kingpin_ray._frame import Frame, build_frame, columns_of, layout
from kingpin_ray._hashes import row_hashes
from kingpin_ray._shuffle import Shuffled
from tests.kingpin_ray.data import FEATURES, grouped_frame

ODD = 0x9E3779B97F4A7C15
WORD = 2**64 - 1


def plain_hash(row: list[float]) -> int:
    """The definition, one value at a time."""
    state = len(row)
    for value in row:
        value = np.nan if value != value else value + 0.0
        state = (state ^ int(np.float64(value).view(np.uint64))) * ODD & WORD
        state ^= state >> 32
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        state = (state ^ (state >> shift)) * factor & WORD
    return state


@given(st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=20))
def test_hashes_are_as_defined(rows: list[list[float]]) -> None:
    table = np.array(rows)
    expected = [plain_hash(row) for row in rows]
    assert row_hashes(list(table.T)).tolist() == expected
    assert row_hashes(list(table.T.astype(np.float32))).tolist() == expected


def test_hashes_of_many_rows_types_and_none() -> None:
    wide = np.arange(40_000)
    got = row_hashes([wide, (wide % 2 == 0).astype(np.uint8)])
    assert len(set(got.tolist())) == len(wide)
    assert int(got[33_333]) == plain_hash([33_333.0, 0.0])
    assert row_hashes([np.zeros(0)]).tolist() == []
    two = np.array([0.0, -0.0, np.nan, -np.nan])
    assert len(set(row_hashes([two]).tolist())) == 2


def frame_of(data: pd.DataFrame, target: str) -> Frame:
    parts = layout(list(data.columns), "key", target, FEATURES)
    return build_frame(columns_of(data), parts, None, None, target == "colour", 0)


CHANGES: dict[str, Any] = {
    "one feature doubled": lambda f: f.assign(x0=f.x0 * 2),
    "target negated": lambda f: f.assign(
        value=-f.value, colour=f.colour.replace({"red": "blue", "blue": "red"})
    ),
    "features swapped": lambda f: f.assign(x0=f.x1, x1=f.x0),
    "one cell": lambda f: f.assign(x3=np.where(f.index == 7, f.x3 + 1e-12, f.x3)),
    "a cell gone": lambda f: f.assign(x3=np.where(f.index == 7, np.nan, f.x3)),
    "rows of x0 in other order": lambda f: f.assign(x0=f.groupby("key").x0.transform("shift", 1)),
    "labels renamed": lambda f: f.assign(colour=f.colour.str.upper(), value=f.value + 1),
    "targets moved in a group": lambda f: f.assign(
        value=f.groupby("key").value.transform(lambda v: v.to_numpy()[::-1]),
        colour=f.groupby("key").colour.transform(lambda v: v.to_numpy()[::-1]),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("model", "target"), [(Ridge(), "value"), (Logistic(), "colour")])
def test_resume_refuses_changed_data(tmp_path: Any, model: Any, target: str, change: str) -> None:
    data = grouped_frame(n_groups=3, rows=(20, 21))  # an even number, where sums of bits cancel
    estimator = GroupedEstimator(
        model, "key", target, FEATURES, plan="local", random_state=0, progress=False
    )
    estimator.set_params(store=tmp_path / "s").fit(data)
    estimator.set_params(store=None)
    with pytest.raises(kp.StoreError, match="other data, model"):
        estimator.resume(tmp_path / "s", CHANGES[change](data))
    # The same rows in another order are the same data: Ray Datasets promise none.
    shuffled = data.sample(frac=1.0, random_state=3)
    estimator.resume(tmp_path / "s", shuffled)
    assert estimator.results_.num_rows == 3


class _Inline:
    """Runs what Ray would run in tasks at once, in this process."""

    exceptions = SimpleNamespace(RayTaskError=ZeroDivisionError)

    def remote(self, call: Any) -> Any:
        made = SimpleNamespace(remote=call)
        return SimpleNamespace(options=lambda **_: made)

    def get(self, values: Any) -> Any:
        return values


@pytest.mark.parametrize("target", ["value", "colour"])
def test_sums_do_not_depend_on_the_parts(target: str) -> None:
    data = grouped_frame(n_groups=5).sort_values(target, ignore_index=True)  # classes lie apart
    data.loc[::7, target] = None
    data["x1"] = np.arange(len(data))
    data.loc[:3, "x1"] = None  # integers in one part are numbers with NaN in another
    whole = frame_of(data, target)
    table = pa.Table.from_pandas(data, preserve_index=False)
    cut = [0, 3, 4, len(data) // 2, len(data)]
    parts = [table.slice(a, b - a) for a, b in pairwise(cut)]
    wanted = ["key", target, *FEATURES]
    spread = Shuffled(
        _Inline(), parts, wanted, layout(wanted, "key", target, FEATURES), target == "colour", 0
    )
    np.testing.assert_array_equal(spread.row_sums(), whole.row_sums())
    if target == "colour":
        for group in range(5):
            held = spread.block(np.array([group]))
            np.testing.assert_array_equal(
                np.bincount(held.y.astype(int), minlength=3), whole.class_counts()[group]
            )
    assert whole.row_sums().dtype == np.uint64
