"""Plans, predictions of cost, and serving."""

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kingpin_ray import (
    GBDT,
    MLP,
    GroupedEstimator,
    Linear,
    Logistic,
    Ridge,
    _costs,
    _driver,
    _plan,
    calibrate,
)
from kingpin_ray._engine import Task
from tests.kingpin_ray.data import FEATURES, grouped_frame


def planned(
    model: Any, counts: list[int], workers: int, running: bool = False, configs: int = 1
) -> _plan.Assignment:
    task = Task(model, ({},) * configs, None, "r2", 2, "local")
    possible = _plan.walls(task, np.array(counts), 20, 0, workers, running)
    return _plan.assign("auto", possible)


# A ridge of 20 features costs 0.36 s for a million rows.
MILLION = 1_000_000
PLANS = [
    ("small data never starts Ray", Ridge(), [500] * 2000, 8, False, "local", 0),
    ("much work does", Ridge(), [MILLION] * 100, 8, False, "task", 0),
    ("one worker gains nothing", Ridge(), [MILLION] * 1000, 1, True, "local", 0),
    ("a giant is split", Ridge(), [100 * MILLION, *[MILLION] * 40], 8, True, "grouped", 1),
    ("two giants are", Ridge(), [90 * MILLION, 80 * MILLION, *[1000] * 9], 8, True, "grouped", 2),
    ("one group alone too", Ridge(), [100 * MILLION], 8, True, "data", 1),
    ("trees never", GBDT(objective="regression"), [2 * MILLION, MILLION], 8, True, "task", 0),
    ("half a worker's share is no giant", Ridge(), [MILLION] * 160, 8, True, "task", 0),
    ("networks pay for each step", MLP(), [50_000, *[5000] * 9], 2, True, "task", 0),
]


@pytest.mark.parametrize(
    ("model", "counts", "workers", "running", "plan", "split"),
    [case[1:] for case in PLANS],
    ids=[case[0] for case in PLANS],
)
def test_auto_takes_the_plan_that_ends_first(
    model: Any, counts: list[int], workers: int, running: bool, plan: str, split: int
) -> None:
    found = planned(model, counts, workers, running)
    assert (found.plan, found.split) == (plan, split)


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 50 * MILLION), min_size=1, max_size=30),
    workers=st.integers(1, 32),
    running=st.booleans(),
)
def test_auto_is_never_predicted_to_be_slower_than_whole_groups(
    counts: list[int], workers: int, running: bool
) -> None:
    task = Task(Logistic(), ({},), None, "accuracy", 2, "local")
    possible = _plan.walls(task, np.array(counts), 5, 2, workers, running)
    found = _plan.assign("auto", possible)
    assert found.seconds <= min(possible["local"].seconds, possible["task"].seconds)
    assert 0 <= found.split <= len(counts)
    assert (found.plan == "data") == (found.split == len(counts))


@pytest.mark.parametrize("model", [Linear(), Logistic(), GBDT(n_estimators=5)], ids=repr)
def test_calibration_is_measured_and_used(model: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_costs, "_measured", {})
    before = _costs.fit_seconds(model, np.array([1000]), 20, 1).sum()
    costs = calibrate(model, n_features=5)
    assert costs.row_s > 0
    assert costs.group_s > 0
    after = _costs.fit_seconds(model, np.array([1000]), 20, 1).sum()
    assert after == pytest.approx(1000 * costs.row_s * 24 + costs.group_s)
    assert after != before


def test_explain_sets_prediction_against_measurement() -> None:
    frame = grouped_frame(n_groups=30, rows=(3, 200))
    model = GroupedEstimator(
        Ridge(), "key", "value", FEATURES, {"alpha": [0.1, 1.0]}, cv=3, plan="local"
    ).fit(frame)
    *classes, whole = model.explain().to_pylist()
    assert sum(row["groups"] for row in classes) == whole["groups"] == 30
    assert sum(row["rows"] for row in classes) == whole["rows"] == len(frame)
    measured = sum(row["measured_seconds"] for row in classes)
    assert measured == pytest.approx(model.results_.column("seconds").to_numpy().sum())
    assert all(row["predicted_seconds"] > 0 for row in classes)
    assert {row["plan"] for row in classes} == {"local"}
    assert whole["plan"] == "whole run"
    assert whole["measured_seconds"] >= measured
    predicted = sum(row["predicted_seconds"] for row in classes)
    assert whole["predicted_seconds"] <= predicted * (1 + 1e-9)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver, "_CHUNK_ROWS", (300, 400))
    frame = grouped_frame(n_groups=40)
    for spec, target in (
        (Ridge(), "value"),
        (Logistic(), "colour"),
        (MLP((4,), epochs=1), "label"),
        (GBDT(n_estimators=3), "label"),
    ):
        runs = [
            GroupedEstimator(
                spec, "key", target, FEATURES, plan="local", num_actors=threads, random_state=0
            ).fit(frame)
            for threads in (1, 3)
        ]
        np.testing.assert_array_equal(*(run.predict(frame) for run in runs))
        assert runs[0].results_.drop(["seconds"]).equals(runs[1].results_.drop(["seconds"]))


def test_an_error_in_a_thread_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver, "_CHUNK_ROWS", (300, 400))

    def full(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(Ridge, "fit", full)
    model = GroupedEstimator(Ridge(), "key", "value", FEATURES, plan="local", num_actors=2)
    with pytest.raises(MemoryError, match="no memory"):
        model.fit(grouped_frame(n_groups=40))


def test_batches_of_every_format_get_predictions() -> None:
    frame = grouped_frame(n_groups=4)
    model = GroupedEstimator(Logistic(), "key", "label", FEATURES, plan="local").fit(frame)
    expected = model.predict(frame)
    call = pickle.loads(pickle.dumps(model.as_map_batches()))
    for batch in (
        frame,
        pa.Table.from_pandas(frame),
        {name: frame[name].to_numpy() for name in frame.columns},
    ):
        assert (call(batch).column("prediction").to_numpy(zero_copy_only=False) == expected).all()
    table = model.as_map_batches(proba=True)(frame)
    np.testing.assert_array_equal(
        table.column("proba_True").to_numpy(), model.predict_proba(frame)[:, 1]
    )
