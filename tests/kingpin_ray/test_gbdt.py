"""The tree kernel against LightGBM, and against itself in plain Python."""

import ctypes
import math
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kingpin_ray as kp
from kingpin_ray import GBDT, GroupedEstimator
from kingpin_ray._kernels import trees
from tests.kingpin_ray.data import FEATURES, grouped_frame

pytestmark = [
    pytest.mark.filterwarnings("ignore:Ignoring params argument:UserWarning"),
    pytest.mark.skipif(trees.library() is None, reason="the tree kernel was not built here"),
]


def config(**changes: Any) -> trees.TreeConfig:
    values = {"n_estimators": 20, "num_leaves": 15, "min_child_samples": 5,
              "early_stopping_rounds": 0, "learning_rate": 0.1, "reg_lambda": 0.0,
              "min_child_weight": 1e-3, **changes}  # fmt: skip
    return trees.TreeConfig(**values)


def sample(
    n: int, features: int = 5, seed: int = 0, missing: float = 0.2
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, features))
    signal = X[:, 0] * X[:, 1] + np.where(X[:, 2] > 0.3, 2.0, 0.0)
    X[:, 3] = np.round(X[:, 3])
    X[rng.random(X.shape) < missing] = np.nan
    return np.ascontiguousarray(X), signal + rng.normal(size=n)


def train(X: np.ndarray, y: np.ndarray, binary: bool, *configs: trees.TreeConfig) -> list[bytes]:
    n = np.array([len(y)])
    models, fitted = trees.train(X, y, np.array([0, len(y)]), n, 63, binary, configs)
    for model, scores in zip(models[0], fitted, strict=True):
        np.testing.assert_allclose(scores, trees.raw_scores(model, X), rtol=1e-5, atol=1e-4)
    return models[0]


def log_loss(y: np.ndarray, raw: np.ndarray) -> float:
    return float((np.logaddexp(0, raw) - y * raw).mean())


@pytest.mark.parametrize("binary", [True, False])
def test_held_out_loss_equals_lightgbm(binary: bool) -> None:
    gaps = []
    for seed in range(12):
        X, value = sample(1200, seed=seed)
        y = (value > 1).astype(float) if binary else value
        half = 700
        (mine,) = train(X[:half], y[:half], binary, config(n_estimators=60, min_child_samples=20))
        raw = trees.raw_scores(mine, X[half:])
        options = {
            "objective": "binary" if binary else "regression",
            "num_leaves": 15,
            "max_bin": 63,
            "verbosity": -1,
            "num_threads": 1,
        }
        booster = lightgbm.train(options, lightgbm.Dataset(X[:half], y[:half]), 60)
        other = booster.predict(X[half:], raw_score=True)
        if binary:
            gaps.append(log_loss(y[half:], raw) / log_loss(y[half:], other) - 1)
        else:
            gaps.append(((raw - y[half:]) ** 2).mean() / ((other - y[half:]) ** 2).mean() - 1)
    error = np.std(gaps) / math.sqrt(len(gaps))
    assert np.mean(gaps) < 2 * error + 0.005
    assert abs(np.mean(gaps)) < 0.05


@pytest.mark.parametrize("binary", [True, False])
def test_exported_models_predict_the_same_in_lightgbm(binary: bool) -> None:
    X, value = sample(500)
    y = (value > 1).astype(float) if binary else 1e4 + value
    (mine,) = train(X, y, binary, config())
    text = trees.to_lightgbm(mine, ["a", "b c", "d", "e", "f"], binary)
    booster = lightgbm.Booster(model_str=text)
    raw = np.zeros(len(X))
    trees.add_scores(mine, X, np.arange(len(X)), raw)
    np.testing.assert_allclose(booster.predict(X, raw_score=True), raw, rtol=1e-12)
    np.testing.assert_allclose(trees.raw_scores(mine, X), raw, rtol=1e-12)


@settings(max_examples=40)
@given(
    n=st.integers(2, 120),
    features=st.integers(1, 4),
    seed=st.integers(0, 999),
    leaves=st.integers(2, 12),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    binary=st.booleans(),
    minimum=st.integers(1, 10),
)
def test_training_scores_are_what_the_model_predicts(
    n: int, features: int, seed: int, leaves: int, missing: float, binary: bool, minimum: int
) -> None:
    rng = np.random.default_rng(seed)
    X = rng.choice([-np.inf, -1.5, -0.0, 0.0, 2.0, 2.0 + 1e-15, 1e300, np.inf], (n, features))
    X = np.where(rng.random(X.shape) < missing, np.nan, X)
    y = rng.integers(0, 2, n).astype(float) if binary else rng.normal(size=n)
    if binary:
        y[:2] = 0, 1
    setting = config(num_leaves=leaves, min_child_samples=minimum, n_estimators=8)
    (mine,) = train(np.ascontiguousarray(X), y, binary, setting)
    parsed = trees.parse(mine)
    assert 1 <= len(parsed) <= 8
    raw = trees.raw_scores(mine, X)
    assert np.isfinite(raw).all()
    for tree in parsed:
        assert len(tree.value) <= leaves
        assert sorted([*tree.left, *tree.right]) == sorted(
            [
                *range(1, len(tree.feature)),
                *(~np.arange(len(tree.value)) if len(tree.feature) else []),
            ]
        )
    # Boosting lowers the training loss, and never loses to the constant it began with.
    mean = y.mean()
    if binary:
        assert log_loss(y, raw) <= log_loss(y, np.full(n, np.log(mean / (1 - mean)))) + 1e-6
    else:
        assert ((raw - y) ** 2).mean() <= y.var() * (1 + 1e-5) + 1e-9


def test_one_tree_is_the_exhaustive_best_split() -> None:
    X, y = sample(200, missing=0.0, seed=4)
    (mine,) = train(X, y, False, config(n_estimators=1, num_leaves=2, learning_rate=1.0))
    (tree,) = trees.parse(mine)
    best = min(
        (
            sum(((part - part.mean()) ** 2).sum() for part in (y[left], y[~left]))
            for j in range(X.shape[1])
            for cut in np.quantile(X[:, j], np.linspace(0.03, 0.97, 200))
            if (left := X[:, j] <= cut).sum() >= 5 and (~left).sum() >= 5
        ),
        default=np.inf,
    )
    left = X[:, tree.feature[0]] <= tree.threshold[0]
    found = sum(((part - part.mean()) ** 2).sum() for part in (y[left], y[~left]))
    assert found <= best * 1.02  # quantile bins may miss the exact cut by a little
    assert trees.raw_scores(mine, X)[left][0] == pytest.approx(y[left].mean(), rel=1e-5)


def test_settings_share_bins_and_change_nothing() -> None:
    X, y = sample(300)
    a, b = config(), config(num_leaves=4, learning_rate=0.3, early_stopping_rounds=3)
    both = train(X, y, False, a, b)
    assert both[0] == train(X, y, False, a)[0]
    assert both[1] == train(X, y, False, b)[0]
    assert ctypes.sizeof(trees.TreeConfig) == 40


def test_early_stopping_keeps_the_best_tree() -> None:
    X, y = sample(400)
    setting = config(n_estimators=300, learning_rate=0.3, early_stopping_rounds=10)
    model = trees.train(X, y, np.array([0, 400]), np.array([300]), 63, False, [setting])[0][0][0]
    losses = []
    parsed = trees.parse(model)
    long = trees.train(
        X, y, np.array([0, 400]), np.array([300]), 63, False,
        [config(n_estimators=len(parsed) + 10, learning_rate=0.3)],
    )[0][0][0]  # fmt: skip
    raw = np.zeros(100)
    for tree in trees.parse(long):
        node = np.array([_leaf(tree, row) for row in X[300:]])
        raw += tree.value[node]
        losses.append(((raw - y[300:]) ** 2).mean())
    assert int(np.argmin(losses)) == len(parsed) - 1


def _leaf(tree: trees.Tree, row: np.ndarray) -> int:
    node = 0
    while node >= 0:
        v = row[tree.feature[node]]
        left = tree.missing_left[node] if np.isnan(v) else v <= tree.threshold[node]
        node = int(tree.left[node] if left else tree.right[node])
    return ~node


@pytest.mark.parametrize("objective", ["binary", "multiclass", "regression"])
def test_groups_through_the_estimator(objective: str, tmp_path: Any) -> None:
    frame = grouped_frame(n_groups=5, rows=(100, 200))
    frame.loc[::7, "x1"] = np.nan
    target = {"binary": "label", "multiclass": "colour", "regression": "value"}[objective]
    spec = GBDT(n_estimators=10, num_leaves=4, objective=objective)
    model = GroupedEstimator(
        spec, "key", target, FEATURES, {"learning_rate": [0.05, 0.3]}, cv=2, plan="local",
        random_state=0,
    ).fit(frame)  # fmt: skip
    assert set(model.results_.column("status").to_pylist()) == {"ok"}
    for key, booster in model.estimators_.items():
        rows = frame[frame.key == key]
        raw = booster.predict(rows[FEATURES].to_numpy())
        if objective == "regression":
            np.testing.assert_allclose(model.predict(rows), raw, rtol=1e-9)
        else:
            proba = model.predict_proba(rows)
            np.testing.assert_allclose(proba[:, 1] if objective == "binary" else proba, raw)
    assert model.score(frame) > 0.5
    model.save(tmp_path / "s")
    again = GroupedEstimator.load(tmp_path / "s")
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))


def test_without_the_kernel_lightgbm_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = grouped_frame(n_groups=3, rows=(100, 150))
    spec = GBDT(n_estimators=10, num_leaves=4, early_stopping_rounds=3, validation_fraction=0.2)
    options: dict[str, Any] = {"plan": "local", "random_state": 0, "fallback": None}
    own = GroupedEstimator(spec, "key", "label", FEATURES, **options).fit(frame)
    monkeypatch.setattr(trees, "library", lambda: None)
    other = GroupedEstimator(spec, "key", "label", FEATURES, **options).fit(frame)
    assert other.estimators_["g000"].num_trees() <= 10
    assert abs(own.score(frame) - other.score(frame)) < 0.05
    # Models of the kernel still predict where it is absent.
    few = frame.head(5)
    np.testing.assert_allclose(
        own.predict_proba(few)[:, 1],
        [own.estimators_[k].predict(r[FEATURES].to_numpy())[0] for k, r in
         ((row.key, pd.DataFrame([row])) for _, row in few.iterrows())],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GBDT(num_leaves=1), "num_leaves=1"),
        (GBDT(max_bin=256), "at most 255"),
        (GBDT(learning_rate=0.0), "learning_rate=0.0"),
        (GBDT(objective="rank"), "choose one of binary"),
        (GBDT(validation_fraction=0.9), "validation_fraction=0.9"),
    ],
)
def test_bad_parameters_are_refused_in_words(spec: GBDT, message: str) -> None:
    with pytest.raises(kp.ParameterError, match=message):
        GroupedEstimator(spec, "key", "label", FEATURES).fit(grouped_frame(n_groups=2))
