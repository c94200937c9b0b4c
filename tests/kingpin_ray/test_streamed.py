"""Linear models of Parquet files larger than memory: statistics of the rows, the rows let go."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kingpin_ray import GroupedEstimator, Linear, Logistic, Ridge, _prepare
from kingpin_ray._blocks import Block, offsets_of
from kingpin_ray._folds import Split
from kingpin_ray._source import Files
from kingpin_ray._spill import Spilled
from kingpin_ray._streamed import Streamed
from kingpin_ray._sums import Cells, Sums, cells_of
from tests.kingpin_ray.data import FEATURES, grouped_frame


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_prepare, "_MEMORY_SHARE", 1 << 60)
    monkeypatch.setattr(_prepare, "_SPILL_BYTES", 10_000)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The data of the runs, as they were made."""
    made: list[Any] = []
    for kind in (Spilled, Streamed):
        monkeypatch.setattr(
            _prepare, kind.__name__, lambda *a, kind=kind: (made.append(kind(*a)), made[-1])[1]
        )
    return made


@pytest.fixture
def parquet(tmp_path: Path) -> tuple[pd.DataFrame, str]:
    """Groups that come and go, of 1 to 120 rows; missing targets, NaN and collinear features."""
    frame = grouped_frame(n_groups=40, rows=(1, 120))
    frame.loc[frame.index % 17 == 0, "value"] = np.nan
    frame.loc[frame[frame.key == "g005"].index[:2], "x1"] = np.nan
    frame.loc[frame[frame.key == "g006"].index[-1:], "x0"] = np.inf
    of = frame.key == "g007"
    frame.loc[of, "x2"] = frame.x0[of] * 2
    frame.loc[frame.key == "g008", "x3"] = 5.0
    frame.loc[frame.key == "g009", "value"] = np.nan
    late = frame[frame.key > "g030"]
    frame = pd.concat([frame[frame.key <= "g030"], late], ignore_index=True)
    table = pa.Table.from_pandas(frame, preserve_index=False)
    pq.write_table(table.slice(0, 700), tmp_path / "a.parquet", row_group_size=150)
    pq.write_table(table.slice(700), tmp_path / "b.parquet", row_group_size=300)
    return frame, str(tmp_path / "*.parquet")


CASES: list[tuple[Any, dict[str, Any]]] = [
    (Linear(), {}),
    (Ridge(fit_intercept=False), {}),
    (Ridge(), {"param_grid": {"alpha": [0.01, 1.0, 100.0]}, "cv": 3}),
    (Ridge(), {"param_grid": {"alpha": [0.5, 2.0], "fit_intercept": [True, False]}, "cv": 0.25,
               "scoring": "neg_mean_squared_error"}),
    (Ridge(), {"param_grid": {"alpha": [0.0, 3.0]}, "cv": 2}),
]  # fmt: skip


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize(
    ("spec", "options"), CASES, ids=["linear", "origin", "folds", "hold-out", "no penalty"]
)
@pytest.mark.parametrize("room", [1 << 30, 30_000, 0], ids=["all", "some", "one part"])
def test_statistics_give_the_models_of_rows_in_memory(
    parquet: tuple[pd.DataFrame, str],
    used: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    spec: Any,
    options: dict[str, Any],
    room: int,
) -> None:
    frame, path = parquet
    monkeypatch.setattr(_prepare, "available_memory", lambda: room)
    options = {"random_state": 1, "min_rows": 3, "plan": "local", **options}
    there = GroupedEstimator(spec, "key", "value", FEATURES, **options).fit(path)
    (data,) = used
    assert isinstance(data, Streamed)
    assert bool(data._on_disk) == (room < 1 << 30)
    here = GroupedEstimator(spec, "key", "value", FEATURES, **options).fit(frame)
    drop = ["seconds", "score"]
    assert there.results_.drop(drop).equals(here.results_.drop(drop))
    assert {"ok", "nan_features", "too_few_rows"} <= set(here.results_.column("status").to_pylist())
    scores = [m.results_.column("score").to_numpy(zero_copy_only=False) for m in (there, here)]
    np.testing.assert_allclose(*scores, rtol=1e-6, atol=1e-9)
    assert there.best_params_ == here.best_params_
    rows = pd.concat([frame, frame.head(50).assign(key="new")])
    rows = rows[np.isfinite(rows[FEATURES]).all(axis=1)]
    np.testing.assert_allclose(there.predict(rows), here.predict(rows), rtol=1e-7, atol=1e-7)
    needed = Files(path, ["key", "value", *FEATURES]).column_bytes()
    assert needed <= there.bytes_read_ <= 1.01 * needed


@pytest.mark.usefixtures("small_memory")
def test_what_needs_rows_is_spilled(parquet: tuple[pd.DataFrame, str], used: list[Any]) -> None:
    _, path = parquet
    mean = GroupedEstimator(
        Ridge(), "key", "value", FEATURES, plan="local", scoring="neg_mean_absolute_error"
    )
    mean.fit(path)
    GroupedEstimator(Logistic(), "key", "label", FEATURES, plan="local", min_rows=5).fit(path)
    assert [type(data) for data in used] == [Spilled, Spilled]


@pytest.mark.usefixtures("small_memory")
def test_a_stored_run_resumes_from_statistics(
    parquet: tuple[pd.DataFrame, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kingpin_ray import _driver, _estimator

    monkeypatch.setattr(_driver, "_CHUNK_ROWS", (300, 400))
    monkeypatch.setattr(_estimator, "SEGMENT_EVERY_S", 0.0)
    real, done = _driver.fit_sums, []

    def dies(*args: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(1)
        return real(*args)

    def run(name: str) -> GroupedEstimator:
        return GroupedEstimator(
            Ridge(), "key", "value", FEATURES, plan="local", random_state=0, num_actors=1,
            store=tmp_path / name,
        )  # fmt: skip

    monkeypatch.setattr(_driver, "fit_sums", dies)
    with pytest.raises(KeyboardInterrupt):
        run("cut").fit(parquet[1])
    monkeypatch.setattr(_driver, "fit_sums", real)
    run("cut").resume(tmp_path / "cut")
    run("whole").fit(parquet[1])
    for name in ("models.arrow", "groups.arrow", "keys.arrow"):
        first, second = (tmp_path / run / name for run in ("cut", "whole"))
        assert first.read_bytes() == second.read_bytes(), name


def block_of(X: np.ndarray, y: np.ndarray, counts: list[int], first: Any = None) -> Block:
    groups = len(counts)
    none = np.zeros(groups, np.int64)
    return Block(
        X, y, offsets_of(np.array(counts)), np.arange(groups), np.arange(groups, dtype=np.uint64),
        0, none, none if first is None else first,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    folds=st.sampled_from([None, Split(3, 3), Split(1, 4)]),
    kind=st.sampled_from([np.float32, np.float64]),
    offset=st.sampled_from([0.0, 1e6]),
    seed=st.integers(0, 9),
)
def test_however_the_rows_are_cut_the_statistics_are_those_of_the_whole(
    rows: int, cuts: list[int], folds: Any, kind: Any, offset: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    X = (rng.normal(size=(rows, 3)) + offset).astype(kind)
    y = rng.normal(size=rows) - offset
    there, whole = cells_of(block_of(X, y, [rows]), folds)
    parts = 1 if folds is None else folds.n_folds + (folds.period > folds.n_folds)
    found = Cells.zeros(parts, 3)
    edges = sorted({0, rows, *(c for c in cuts if c < rows)})
    for low, high in itertools.pairwise(edges):
        part = block_of(X[low:high], y[low:high], [high - low], np.array([low]))
        found.merge(*cells_of(part, folds))
    np.testing.assert_array_equal(found.rows[there], whole.rows)
    assert found.rows.sum() == rows
    np.testing.assert_allclose(found.mean[there], whole.mean, rtol=1e-12, atol=1e-12)
    # Plain definition, in exact enough arithmetic: nothing may cancel beside a large offset.
    z = np.concatenate([X.astype(np.longdouble), y[:, None].astype(np.longdouble)], axis=1)
    z -= z.mean(axis=0)
    np.testing.assert_allclose(
        found.together().scatter[0], (z.T @ z).astype(float), rtol=1e-7, atol=1e-6
    )


@pytest.mark.parametrize("free", [True, False])
def test_grams_of_statistics_are_those_of_the_rows(free: bool) -> None:
    from kingpin_ray._folds import fold_of_row
    from kingpin_ray._kernels import least_squares as ls

    rng = np.random.default_rng(0)
    counts = [30, 7, 12]
    X, y = rng.normal(size=(49, 4)) + 3, rng.normal(size=49)
    block, split = block_of(X, y, counts), Split(3, 3)
    cells = Cells.zeros(9, 4)
    cells.merge(*cells_of(block, split))
    none = np.zeros(3, np.int64)
    sums = Sums(cells, np.arange(3), np.array(counts), none, none).select(np.array([2, 0, 1]))
    shift, grams = sums.grams(free)
    want = ls.fold_grams(X, y, block.offsets, free, fold_of_row(block, split), 3)
    np.testing.assert_allclose(shift, want[0][[2, 0, 1]], atol=1e-12)
    np.testing.assert_allclose(grams, want[1][[2, 0, 1]], atol=1e-9)
