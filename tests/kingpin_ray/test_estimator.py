"""The estimator in this process: inputs, bad groups, fallbacks, results."""

import datetime as dt
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.base import clone
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import check_estimator

import kingpin_ray as kp
from kingpin_ray import GroupedEstimator, Linear, Logistic, Ridge
from tests.kingpin_ray.data import FEATURES, grouped_frame


def fitted(frame: pd.DataFrame, model: Any = None, **options: Any) -> GroupedEstimator:
    options = {"by": "key", "target": "label", "features": FEATURES, "plan": "local", **options}
    return GroupedEstimator(model or Logistic(), **options).fit(frame)


def test_every_kind_of_input_gives_the_same_models(tmp_path: Any) -> None:
    frame = grouped_frame(n_groups=6)
    table = pa.Table.from_pandas(frame)
    half = len(frame) // 2
    pq.write_table(table.slice(0, half), tmp_path / "a.parquet")
    pq.write_table(table.slice(half), tmp_path / "b.parquet")
    expected = fitted(frame).predict_proba(frame)
    for data in (
        table,
        str(tmp_path / "*.parquet"),
        tmp_path,
        [tmp_path / "a.parquet", tmp_path / "b.parquet"],
    ):
        model = fitted(data)
        np.testing.assert_array_equal(model.predict_proba(frame), expected)
        np.testing.assert_array_equal(model.predict_proba(table), expected)
    X, y, groups = frame[FEATURES].to_numpy(), frame.label.to_numpy(), frame.key.to_numpy()
    arrays = GroupedEstimator(Logistic(), plan="local").fit(X, y, groups)
    np.testing.assert_array_equal(arrays.predict_proba(X, groups), expected)
    both = GroupedEstimator(Logistic(), by="key", features=FEATURES, plan="local")
    both.fit(frame, frame.label)
    np.testing.assert_array_equal(both.predict_proba(frame), expected)
    assert arrays.score(X, y, groups) == fitted(frame).score(frame)


@pytest.mark.parametrize("features", [None, FEATURES])
def test_the_target_is_no_feature_when_y_is_given_too(features: Any) -> None:
    frame = grouped_frame(n_groups=4).drop(columns=["value", "colour"])
    expected = fitted(frame, features=features)
    model = GroupedEstimator(
        Logistic(), by="key", target="label", features=features, plan="local"
    ).fit(frame, frame.label)
    assert model.feature_names_in_.tolist() == FEATURES
    np.testing.assert_array_equal(model.predict_proba(frame), expected.predict_proba(frame))
    # A frame without the target predicts the same.
    np.testing.assert_array_equal(
        model.predict_proba(frame.drop(columns="label")), expected.predict_proba(frame)
    )
    search = GridSearchCV(
        GroupedEstimator(Logistic(), by="key", target="label", features=features, plan="local"),
        {"min_rows": [2, 3]},
        cv=2,
    ).fit(frame, frame.label)
    assert search.best_estimator_.feature_names_in_.tolist() == FEATURES
    with pytest.raises(kp.ParameterError, match="features names 'label', which is target"):
        GroupedEstimator(Logistic(), "key", "label", [*FEATURES, "label"]).fit(frame, frame.label)


@pytest.mark.parametrize("two_dimensions", [False, True])
def test_masked_values_are_missing(two_dimensions: bool) -> None:
    frame = grouped_frame(n_groups=4)
    X, keys = frame[FEATURES].to_numpy(), frame.key.to_numpy()
    hidden = np.arange(len(frame)) % 5 == 0
    seen = ~hidden
    y = np.ma.masked_array(np.where(hidden, 1e9, frame.value), hidden)
    ridge = GroupedEstimator(Ridge(), plan="local")
    expected = clone(ridge).fit(X[seen], y.data[seen], keys[seen])
    model = clone(ridge).fit(X, y[:, None] if two_dimensions else y, keys)
    np.testing.assert_allclose(model.predict(X, keys), expected.predict(X, keys), rtol=1e-9)
    assert sum(model.results_.column("n_dropped").to_pylist()) == hidden.sum()
    # A masked label is no class, a masked key is the null group, a masked feature is NaN.
    label = np.ma.masked_array(np.where(hidden, 7, frame.label), hidden)
    classes = GroupedEstimator(Logistic(), plan="local").fit(X, label, keys).classes_
    assert classes.tolist() == [0, 1]
    group = np.ma.masked_array(keys.astype("U9"), keys == "g002")
    if two_dimensions:
        group = np.ma.stack([group, group], axis=1)
    assert clone(ridge).fit(X, frame.value, group).results_.column(0).null_count == 1
    first = np.ma.masked_array(X, np.zeros(X.shape, bool))
    first[np.flatnonzero(keys == "g001")[0], 0] = np.ma.masked
    found = clone(ridge).fit(first, frame.value, keys)
    assert found.results_.column("status").to_pylist().count("nan_features") == 1


def test_bad_groups_are_recorded_and_served_by_the_fallback() -> None:
    frame = grouped_frame(n_groups=6, rows=(30, 40))
    frame.loc[frame.key == "g001", "label"] = True
    frame.loc[frame[frame.key == "g002"].index[3], "x1"] = np.nan
    frame.loc[frame[frame.key == "g003"].index[3], "x1"] = np.inf
    frame = frame.drop(frame[frame.key == "g004"].index[3:])
    frame["label"] = frame.label.astype("boolean")
    frame.loc[frame[frame.key == "g005"].index[:5], "label"] = pd.NA
    model = fitted(frame, min_rows=5)
    rows = {row["key"]: row for row in model.results_.to_pylist()}
    assert {key: row["status"] for key, row in rows.items()} == {
        "g000": "ok",
        "g001": "single_class",
        "g002": "nan_features",
        "g003": "nan_features",
        "g004": "too_few_rows",
        "g005": "ok",
    }
    assert rows["g005"]["n_dropped"] == 5
    assert rows["g005"]["n_rows"] == (frame.key == "g005").sum() - 5
    assert "impute" in rows["g002"]["error"]
    assert set(model.estimators_) == {"g000", "g005"}
    with pytest.raises(kp.UnknownGroupError, match="no model of its own"):
        model.estimators_["g001"]

    whole = frame[frame.label.notna() & np.isfinite(frame[FEATURES]).all(axis=1)]
    pooled = LogisticRegression(solver="newton-cholesky", tol=1e-10, max_iter=500).fit(
        whole[FEATURES], whole.label.astype(bool)
    )
    at = frame[frame.key == "g004"].assign(key="never seen")
    np.testing.assert_allclose(
        model.predict_proba(at), pooled.predict_proba(at[FEATURES]), atol=1e-6
    )


def test_on_bad_skip_and_raise() -> None:
    frame = grouped_frame(n_groups=4)
    frame.loc[frame.key == "g001", "label"] = True
    with pytest.raises(kp.BadGroupError, match=r"1 of 4 groups .*'g001' \(single_class"):
        fitted(frame, on_bad="raise")
    model = fitted(frame, on_bad="skip")
    with pytest.raises(kp.UnknownGroupError, match="'g001', which was skipped"):
        model.predict(frame)
    unseen = frame[frame.key != "g001"].replace({"key": {"g002": "new"}})
    assert len(model.predict(unseen)) == len(unseen)


def test_without_a_fallback_one_class_is_a_constant_and_unseen_groups_raise() -> None:
    frame = grouped_frame(n_groups=4)
    frame.loc[frame.key == "g001", "label"] = True
    model = fitted(frame, fallback=None)
    at = frame[frame.key == "g001"]
    assert (model.predict_proba(at) == [0.0, 1.0]).all()
    with pytest.raises(kp.UnknownGroupError, match="'new', which has no model"):
        model.predict(at.assign(key="new"))


def test_parents_serve_before_the_global_model() -> None:
    frame = grouped_frame(n_groups=6, rows=(30, 40))
    frame["state"] = np.where(frame.key < "g003", "north", "south")
    few = frame[frame.key == "g000"].index[2:]
    model = GroupedEstimator(
        Ridge(), ["state", "key"], "value", FEATURES, min_rows=5, fallback="parent", plan="local"
    ).fit(frame.drop(few))
    from sklearn.linear_model import Ridge as SkRidge

    north = frame.drop(few)[lambda f: f.state == "north"]
    host = SkRidge(solver="svd").fit(north[FEATURES], north.value)
    for at in (
        frame[frame.key == "g000"],
        frame[frame.key == "g001"].assign(key="new"),
    ):
        np.testing.assert_allclose(model.predict(at), host.predict(at[FEATURES]), rtol=1e-7)
    nowhere = frame.head(5).assign(state="west")
    assert np.isfinite(model.predict(nowhere)).all()
    with pytest.raises(kp.ParameterError, match="at least two key columns"):
        fitted(frame, fallback="parent")


def test_keys_may_be_composite_null_dates_or_numbers() -> None:
    frame = grouped_frame(n_groups=6)
    day = pd.to_datetime("2013-01-01") + pd.to_timedelta(frame.key.str[1:].astype(int), "D")
    frame["day"] = day.dt.date
    frame["n"] = frame.key.str[1:].astype(int)
    frame.loc[frame.key == "g005", ["day", "n"]] = None
    expected = fitted(frame, Ridge(), target="value").predict(frame)
    for by in ("day", "n", ["n", "day"]):
        model = fitted(frame, Ridge(), by=by, target="value")
        np.testing.assert_allclose(model.predict(frame), expected, rtol=1e-9)
    assert fitted(frame, by="day").estimators_[dt.date(2013, 1, 2)] is not None
    assert None in fitted(frame, by="n").estimators_
    assert (2, dt.date(2013, 1, 3)) in fitted(frame, by=["n", "day"]).estimators_


def test_any_scikit_learn_estimator_runs_group_by_group() -> None:
    frame = grouped_frame(n_groups=5)
    tree = DecisionTreeClassifier(max_depth=3, max_features=2)
    model = fitted(frame, tree, target="colour", random_state=3)
    again = fitted(frame.iloc[::-1], tree, target="colour", random_state=3)
    assert (model.predict(frame) == again.predict(frame)).mean() > 0.95
    for key, mine in model.estimators_.items():
        rows = frame[frame.key == key]
        theirs = clone(tree).set_params(random_state=mine.random_state)
        theirs.fit(rows[FEATURES].to_numpy(), rows.colour)
        np.testing.assert_array_equal(
            model.predict(rows), theirs.predict(rows[FEATURES].to_numpy())
        )
        assert list(mine.classes_) == ["blue", "green", "red"]


class _Fragile(LinearRegression):
    def fit(self, X: Any, y: Any) -> Any:
        if len(y) < 25:
            raise RuntimeError("cannot stand small groups")
        return super().fit(X, y)


def test_a_group_that_raises_does_not_end_the_run() -> None:
    frame = grouped_frame(n_groups=8, rows=(20, 30))
    model = fitted(frame, _Fragile(), target="value")
    sizes = frame.groupby("key").size()
    for row in model.results_.to_pylist():
        small = sizes[row["key"]] < 25
        assert row["status"] == ("error" if small else "ok")
        if small:
            assert row["error"] == "RuntimeError: cannot stand small groups"
    assert np.isfinite(model.predict(frame)).all()


class _Explosive(Ridge):
    """A batched model that refuses a whole block because of one group."""

    def fit(self, block: Any, configs: Any) -> Any:
        if (block.counts == 13).any():
            raise ValueError("unlucky")
        return super().fit(block, configs)


def test_a_block_that_raises_is_halved_until_the_culprit_stands_alone() -> None:
    frame = grouped_frame(n_groups=9, rows=(20, 30))
    frame = frame.drop(frame[frame.key == "g004"].index[13:])
    model = fitted(frame, _Explosive(), target="value")
    status = {row["key"]: row["status"] for row in model.results_.to_pylist()}
    assert status.pop("g004") == "error"
    assert set(status.values()) == {"ok"}
    plain = fitted(frame, Ridge(), target="value")
    others = frame[frame.key != "g004"]
    np.testing.assert_allclose(model.predict(others), plain.predict(others), rtol=1e-9)


def test_results_have_a_row_per_group_configuration_and_fold() -> None:
    frame = grouped_frame(n_groups=5)
    model = fitted(frame, param_grid={"C": [0.1, 1.0]}, cv=3, scoring="neg_log_loss")
    results = model.results_.to_pandas()
    assert len(results) == 5 * (2 * 3 + 1)
    assert list(results.columns) == [
        "key", "config", "params", "fold", "status", "n_rows", "n_dropped", "score", "seconds",
        "plan", "error",
    ]  # fmt: skip
    for key, rows in results.groupby("key"):
        mean = rows[rows.fold.notna()].groupby("config").score.mean()
        final = rows[rows.fold.isna()].iloc[0]
        assert final.config == mean.idxmax()
        assert final.score == pytest.approx(mean.max())
        assert model.best_params_[key] == {"C": [0.1, 1.0][int(final.config)]}
    assert (results.plan == "local").all()


def test_random_search_draws_settings_by_seed(tmp_path: Any) -> None:
    from scipy.stats import loguniform

    frame = grouped_frame(n_groups=5)
    search = {"param_grid": {"alpha": loguniform(1e-3, 1e3)}, "n_iter": 6, "cv": 3}
    options = {"target": "value", "random_state": 3, **search}
    model = fitted(frame, Ridge(), store=tmp_path / "s", **options)
    settings = model._served.configs
    assert len(settings) == 6
    assert all(1e-3 <= setting["alpha"] <= 1e3 for setting in settings)
    assert fitted(frame, Ridge(), **options)._served.configs == settings
    other = fitted(frame, Ridge(), **{**options, "random_state": 4})
    assert other._served.configs != settings
    # The draws are tried as a grid of the same settings is.
    grid = [{name: [value] for name, value in setting.items()} for setting in settings]
    same = fitted(frame, Ridge(), target="value", random_state=3, cv=3, param_grid=grid)
    assert same.results_.drop(["seconds"]).equals(model.results_.drop(["seconds"]))
    again = GroupedEstimator.load(tmp_path / "s")
    assert again.best_params_ == model.best_params_
    assert len(again.explain()) > 0
    few = fitted(frame, Ridge(), target="value", param_grid={"alpha": [1, 2]}, n_iter=9, cv=2)
    assert len(few._served.configs) == 2


def test_key_columns_named_like_result_columns_stay_apart() -> None:
    frame = grouped_frame(n_groups=3).rename(columns={"key": "score"})
    model = fitted(frame, by="score")
    assert model.results_.column("by_score").to_pylist() == ["g000", "g001", "g002"]


BAD_INPUT = [
    ({"by": "nope"}, kp.MissingColumnError, "by='nope' is not a column"),
    ({"target": "nope"}, kp.MissingColumnError, "target='nope'"),
    ({"features": ["x0", "nope"]}, kp.MissingColumnError, "features='nope'"),
    ({"features": ["x0", "label"]}, kp.ParameterError, "features names 'label', which is target"),
    ({"features": ["x0", "key"]}, kp.ParameterError, "features names 'key', which is by"),
    ({"features": ["x0", "x0"]}, kp.ParameterError, "twice"),
    ({"features": []}, kp.ParameterError, "no column is left"),
    ({"features": ["x0", "colour"]}, kp.UnsupportedColumnError, "'colour' is of type"),
    ({"by": ["key", "key"]}, kp.ParameterError, "names a column twice"),
    ({"by": "label"}, kp.ParameterError, "also in by"),
    ({"scoring": "r2"}, kp.UnknownScoringError, "not known for a classifier; choose one of acc"),
    ({"scoring": "nope"}, kp.UnknownScoringError, "choose one of"),
    ({"plan": "nope"}, kp.ParameterError, "plan='nope': choose one of"),
    ({"on_bad": "nope"}, kp.ParameterError, "on_bad='nope'"),
    ({"fallback": "nope"}, kp.ParameterError, "fallback='nope'"),
    ({"min_rows": 0}, kp.ParameterError, "min_rows=0"),
    ({"num_actors": 0}, kp.ParameterError, "num_actors=0"),
    ({"cv": 1}, kp.ParameterError, "cv=1"),
    ({"cv": 0.7}, kp.ParameterError, "cv=0.7"),
    ({"cv": "x"}, kp.ParameterError, "cv='x'"),
    ({"param_grid": {"D": [1]}}, kp.ParameterError, "has no parameter 'D'; it has C"),
    ({"param_grid": {"C": [0]}}, kp.ParameterError, r"Logistic\(C=0\)"),
    ({"param_grid": {"C": 3}}, kp.ParameterError, "param_grid"),
    ({"model": Logistic}, kp.ParameterError, r"give an object, Logistic\(\)"),
    ({"model": "logistic"}, kp.ParameterError, "neither a model"),
    ({"model": Logistic(max_iter=0)}, kp.ParameterError, "max_iter=0"),
    ({"model": Ridge(-1), "target": "value"}, kp.ParameterError, "alpha=-1"),
    ({"target": "value"}, kp.UnsupportedColumnError, "continuous"),
    ({"model": Linear(), "target": "colour"}, kp.UnsupportedColumnError, "must be numeric"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_INPUT)
def test_bad_input_is_refused_in_words(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    frame = grouped_frame(n_groups=3)
    with pytest.raises(error, match=message):
        fitted(frame, **options)


def test_bad_data_is_refused_in_words(tmp_path: Any) -> None:
    frame = grouped_frame(n_groups=3)
    with pytest.raises(kp.EmptyDataError, match="0 rows"):
        fitted(frame.head(0))
    with pytest.raises(kp.EmptyDataError, match="missing in all"):
        fitted(frame.assign(value=np.nan), Linear(), target="value")
    mixed = frame.assign(x0=[1, "a"] * (len(frame) // 2) + [1] * (len(frame) % 2))
    with pytest.raises(kp.MixedTypesError, match="'x0' holds values of several types"):
        fitted(mixed)
    twins = pd.concat([frame, frame[["x0"]]], axis=1)
    with pytest.raises(kp.InputError, match="two columns named 'x0'"):
        fitted(twins)
    with pytest.raises(kp.InputError, match="no Parquet file is at"):
        fitted(str(tmp_path / "*.parquet"))
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(kp.InputError, match="cannot be read as Parquet"):
        fitted(tmp_path / "bad.parquet")
    pq.write_table(pa.Table.from_pandas(frame), tmp_path / "c.parquet")
    pq.write_table(pa.Table.from_pandas(frame.assign(x0="1")), tmp_path / "d.parquet")
    with pytest.raises(kp.MixedTypesError, match=r"'x0' is double in .*c\.parquet"):
        fitted([tmp_path / "c.parquet", tmp_path / "d.parquet"])
    with pytest.raises(kp.InputError, match="is not understood"):
        GroupedEstimator(Linear(), by="k", target="t").fit({"k": [1], "t": [2]}, [1])
    with pytest.raises(kp.InputError, match="one for each"):
        GroupedEstimator(Linear()).fit(np.eye(4), np.arange(4), [1, 2, 3])
    with pytest.raises(kp.ParameterError, match="requires y"):
        GroupedEstimator(Linear(), by="key").fit(frame)
    model = fitted(frame)
    with pytest.raises(kp.MissingColumnError, match="'x2'"):
        model.predict(frame.drop(columns="x2"))
    with pytest.raises(AttributeError, match="predict_proba"):
        fitted(frame, Linear(), target="value").predict_proba(frame)


@pytest.mark.parametrize("model", [Linear(), Ridge(), Logistic()], ids=repr)
def test_scikit_learns_own_checks_pass(model: Any) -> None:
    estimator = GroupedEstimator(model, plan="local", random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some checks provoke convergence and conversion warnings
        results = check_estimator(estimator, on_fail=None, on_skip=None)
    failed = {r["check_name"]: str(r["exception"]) for r in results if r["status"] == "failed"}
    assert not failed
    assert len(results) > 50


def test_small_data_never_imports_ray() -> None:
    code = """
import sys
from kingpin_ray import GroupedEstimator, Ridge
from tests.kingpin_ray.data import grouped_frame
model = GroupedEstimator(Ridge(), by="key", target="value", features=["x0"]).fit(grouped_frame())
assert model.plan_ == "local"
heavy = {"ray", "torch", "lightgbm", "pandas.plotting"} & set(sys.modules)
assert not heavy - {"pandas.plotting"}, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
