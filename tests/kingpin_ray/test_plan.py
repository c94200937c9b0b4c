"""Plans, predictions of cost, and serving."""

import pickle

import numpy as np
import pyarrow as pa
import pytest

from kingpin_ray import GBDT, GroupedEstimator, Linear, Logistic, Ridge, _plan, calibrate
from tests.kingpin_ray.data import FEATURES, grouped_frame


def test_ray_is_started_only_where_it_saves_time() -> None:
    assert _plan.choose(1.0, ray_running=False, num_actors=8) == "local"
    assert _plan.choose(100.0, ray_running=False, num_actors=8) == "task"
    assert _plan.choose(3.0, ray_running=False, num_actors=2) == "local"
    assert _plan.choose(3.0, ray_running=True, num_actors=2) == "task"
    assert _plan.choose(1e9, ray_running=True, num_actors=1) == "local"


@pytest.mark.parametrize("model", [Linear(), Logistic(), GBDT(n_estimators=5)], ids=repr)
def test_calibration_is_measured_and_used(model: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "_measured", {})
    before = _plan.predicted_seconds(model, np.array([1000]), 20, 1)
    costs = calibrate(model, n_features=5)
    assert costs.row_s > 0
    assert costs.group_s > 0
    after = _plan.predicted_seconds(model, np.array([1000]), 20, 1)
    assert after == pytest.approx(1000 * costs.row_s * 24 + costs.group_s)
    assert after != before


def test_explain_sets_prediction_against_measurement() -> None:
    frame = grouped_frame(n_groups=30, rows=(3, 200))
    model = GroupedEstimator(
        Ridge(), "key", "value", FEATURES, {"alpha": [0.1, 1.0]}, cv=3, plan="local"
    ).fit(frame)
    table = model.explain()
    assert table.column("groups").to_numpy().sum() == 30
    assert table.column("rows").to_numpy().sum() == len(frame)
    measured = table.column("measured_seconds").to_numpy()
    assert measured.sum() == pytest.approx(model.results_.column("seconds").to_numpy().sum())
    assert (table.column("predicted_seconds").to_numpy() > 0).all()
    assert set(table.column("plan").to_pylist()) == {"local"}


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
