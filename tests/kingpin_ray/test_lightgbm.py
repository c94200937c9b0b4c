"""What the own kernel cannot do goes to LightGBM, and equals LightGBM called by hand."""

from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest

import kingpin_ray as kp
from kingpin_ray import GBDT, GroupedEstimator
from kingpin_ray._kernels import trees
from kingpin_ray.models import _gbdt
from tests.kingpin_ray.data import FEATURES, grouped_frame

pytestmark = pytest.mark.filterwarnings("ignore:Ignoring params argument:UserWarning")
COLUMNS = [*FEATURES, "kind", "weight"]


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = grouped_frame(n_groups=4, rows=(150, 250))
    frame["kind"] = rng.integers(0, 6, len(frame)).astype(float)
    frame["value"] += 20 * np.isin(frame.kind, [1, 4])
    frame["kind"] = frame.kind.where(rng.random(len(frame)) > 0.1)
    frame["weight"] = rng.exponential(size=len(frame))
    return frame


def fit(frame: pd.DataFrame, target: str, features: Any = COLUMNS, **spec: Any) -> GroupedEstimator:
    model = GBDT(n_estimators=8, num_leaves=6, **spec)
    return GroupedEstimator(
        model, "key", target, features, plan="local", random_state=0, fallback=None
    ).fit(frame)


def by_hand(
    rows: pd.DataFrame, target: str, options: dict[str, Any], weight: Any = None, **data: Any
) -> lightgbm.Booster:
    given = {"num_leaves": 6, "max_bin": 63, "verbosity": -1, "num_threads": 1, **options}
    X = rows[COLUMNS].to_numpy(copy=True)
    if weight is not None:
        X[:, 5] = 0
    table = lightgbm.Dataset(X, rows[target].to_numpy(float), weight=weight, **data)
    return lightgbm.train(given, table, 8)


CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("value", {"categorical_feature": ["kind"]}, {}, {"categorical_feature": [4]}),
    (
        "label",
        {"monotone_constraints": {"x0": 1, "x2": -1}},
        {"monotone_constraints": [1, 0, -1, 0, 0, 0]},
        {},
    ),
    ("value", {"monotone_constraints": [0, 1, 0, 0, 0, 0]},
     {"monotone_constraints": [0, 1, 0, 0, 0, 0]}, {}),
    ("value", {"weight_column": "weight"}, {}, {"weight": True}),
]  # fmt: skip


@pytest.mark.parametrize(("target", "spec", "options", "data"), CASES, ids=lambda v: str(v)[:30])
def test_equals_lightgbm_by_hand(
    frame: pd.DataFrame, target: str, spec: Any, options: Any, data: Any, tmp_path: Path
) -> None:
    objective = "binary" if target == "label" else "regression"
    model = fit(frame, target, objective=objective, **spec)
    for _, rows in frame.groupby("key"):
        extra = dict(data)
        if extra.pop("weight", False):
            extra["weight"] = rows.weight.to_numpy()
        theirs = by_hand(rows, target, {"objective": objective, **options}, **extra)
        raw = theirs.predict(rows[COLUMNS].to_numpy())
        mine = model.predict(rows) if target == "value" else model.predict_proba(rows)[:, 1]
        np.testing.assert_allclose(mine, raw, rtol=1e-9)
    model.save(tmp_path / "s")
    again = GroupedEstimator.load(tmp_path / "s")
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    assert again.model.get_params() == model.model.get_params()


def test_weights_are_no_feature_and_not_needed_to_predict(frame: pd.DataFrame) -> None:
    model = fit(frame, "value", objective="regression", weight_column="weight")
    expected = model.predict(frame)
    np.testing.assert_array_equal(model.predict(frame.drop(columns="weight")), expected)
    doubled = fit(frame.assign(weight=1.0), "value", objective="regression", weight_column="weight")
    assert not np.array_equal(doubled.predict(frame), expected)


def test_constraints_hold(frame: pd.DataFrame) -> None:
    model = fit(frame, "value", objective="regression", monotone_constraints={"x0": -1})
    row = frame[frame.key == "g001"].head(1)
    steps = pd.concat([row] * 50).assign(x0=np.linspace(frame.x0.min(), frame.x0.max(), 50))
    assert (np.diff(model.predict(steps)) <= 1e-12).all()


def test_groups_too_large_for_the_kernel_alone_go_to_lightgbm(
    frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trees.library() is None:
        pytest.skip("the tree kernel was not built here")
    sizes = frame.groupby("key").size()
    own = fit(frame, "value", objective="regression")
    monkeypatch.setattr(_gbdt, "_MOST_ROWS", int(sizes.median()))
    model = fit(frame, "value", objective="regression")
    for key, rows in frame.groupby("key"):
        payload = model._served.stack["trees"][model._served.keys.find(key)]
        large = sizes[key] > _gbdt._MOST_ROWS
        assert payload.startswith(b"tree\n") == large
        if large:
            theirs = by_hand(rows, "value", {"objective": "regression"})
            raw = theirs.predict(rows[COLUMNS].to_numpy())
            np.testing.assert_allclose(model.predict(rows), raw, rtol=1e-9)
        else:
            np.testing.assert_array_equal(model.predict(rows), own.predict(rows))


def test_a_group_with_unusable_codes_or_weights_is_recorded(frame: pd.DataFrame) -> None:
    bad = frame.copy()
    bad.loc[bad[bad.key == "g001"].index[3], "kind"] = -2.0
    bad.loc[bad[bad.key == "g002"].index[3], "kind"] = 1.5
    bad.loc[bad[bad.key == "g003"].index[3], "weight"] = np.nan
    model = fit(
        bad, "value", objective="regression", categorical_feature=["kind"], weight_column="weight"
    )
    errors = {row["key"]: row["error"] for row in model.results_.to_pylist()}
    assert errors["g000"] is None
    assert "whole numbers" in errors["g001"]
    assert "whole numbers" in errors["g002"]
    assert "weight_column" in errors["g003"]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"categorical_feature": ["nope"]}, kp.MissingColumnError, "categorical_feature='nope'"),
        ({"categorical_feature": "kind"}, kp.ParameterError, "give a list"),
        ({"weight_column": 9}, kp.MissingColumnError, "weight_column=9"),
        ({"monotone_constraints": [1]}, kp.ParameterError, "for each of the 6 features"),
        ({"monotone_constraints": {"x0": 2}}, kp.ParameterError, "give -1, 0 or 1"),
    ],
)
def test_columns_are_checked(
    frame: pd.DataFrame, spec: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(frame, "label", **spec)
