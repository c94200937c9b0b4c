"""Groups split over workers give the models of whole groups."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kingpin_ray as kp
from kingpin_ray import GBDT, MLP, GroupedEstimator, Ridge, _costs, _gap
from kingpin_ray._session import ray_session
from tests.kingpin_ray.data import FEATURES, grouped_frame

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(500),  # a busy machine may be slow, never wrong
    # Ray 2.55 collects neither its Popen objects nor the /dev/null files it gave them.
    pytest.mark.filterwarnings("ignore:.*Popen.__del__:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*/dev/null:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_session(2) as connected:
        yield connected


def test_split_groups_equal_whole_ones(ray: Any) -> None:
    frame = grouped_frame(n_groups=9, rows=(3, 90))
    spec = MLP((8,), lr=0.01, batch_size=16, epochs=3)
    options: dict[str, Any] = {"cv": 2, "random_state": 4, "fallback": None}
    whole = GroupedEstimator(spec, "key", "colour", FEATURES, plan="local", **options).fit(frame)
    split = GroupedEstimator(spec, "key", "colour", FEATURES, plan="data", **options).fit(frame)
    assert set(split.results_.column("plan").to_pylist()) == {"data"}
    np.testing.assert_allclose(whole.predict_proba(frame), split.predict_proba(frame), atol=2e-3)


def test_only_giant_groups_are_split(ray: Any) -> None:
    frame = grouped_frame(n_groups=12, rows=(200, 300))
    frame.loc[frame.key > "g002", "key"] = "giant"
    model = GroupedEstimator(Ridge(), "key", "value", FEATURES, plan="grouped", random_state=0).fit(
        frame
    )
    plans = {row["key"]: row["plan"] for row in model.results_.to_pylist()}
    assert plans == {"g000": "task", "g001": "task", "g002": "task", "giant": "grouped"}
    here = GroupedEstimator(Ridge(), "key", "value", FEATURES, plan="local").fit(frame)
    np.testing.assert_allclose(model.predict(frame), here.predict(frame), rtol=1e-8)


def test_trees_are_never_split(ray: Any) -> None:
    frame = grouped_frame(n_groups=2)
    with pytest.raises(kp.ParameterError, match="GBDT needs whole groups"):
        GroupedEstimator(GBDT(), "key", "label", FEATURES, plan="data").fit(frame)
    model = GroupedEstimator(GBDT(n_estimators=5), "key", "label", FEATURES, plan="grouped").fit(
        frame
    )
    assert set(model.results_.column("plan").to_pylist()) == {"task"}


def test_calibration_measures_ray_and_its_sums(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_costs, "_measured", {})
    monkeypatch.setattr(_costs, "_measured_cluster", [])
    with pytest.raises(kp.ParameterError, match="num_actors=0"):
        kp.calibrate(Ridge(), n_features=3, num_actors=0)
    kp.calibrate(Ridge(), n_features=3, num_actors=2)
    costs = _costs.cluster_costs()
    assert costs != _costs.ClusterCosts()
    assert costs.start_s == _costs.ClusterCosts().start_s  # Ray ran already
    for name in ("running_s", "team_s", "exchange_s", "ship_s"):
        assert getattr(costs, name) > 0, name
    assert costs.byte_s >= 0


class DiesOnce(Ridge):
    """Takes one of the workers down in the middle of the first try."""

    name = "dies_once"

    def __init__(self, marker: str = "", alpha: float = 1.0, fit_intercept: bool = True) -> None:
        super().__init__(alpha, fit_intercept=fit_intercept)
        self.marker = marker

    def fit_split(self, block: Any, configs: Any, add: Any) -> Any:
        if block.first.any() and not Path(self.marker).exists():
            Path(self.marker).touch()
            os._exit(1)
        return super().fit_split(block, configs, add)


def test_a_lost_worker_is_replaced_and_the_step_done_again(ray: Any, tmp_path: Path) -> None:
    assert _gap.TIMEOUT_S <= 120
    frame = grouped_frame(n_groups=4)
    model = GroupedEstimator(
        DiesOnce(str(tmp_path / "died")), "key", "value", FEATURES, plan="data", random_state=0
    ).fit(frame)
    assert (tmp_path / "died").exists()
    here = GroupedEstimator(Ridge(), "key", "value", FEATURES, plan="local").fit(frame)
    np.testing.assert_allclose(model.predict(frame), here.predict(frame), rtol=1e-8)
