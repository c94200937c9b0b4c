"""Batched Newton against scikit-learn, group by group."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from kingpin_ray import GroupedEstimator, Logistic
from kingpin_ray._blocks import Block, offsets_of
from kingpin_ray._kernels.newton import fit_logistic
from tests.kingpin_ray.data import FEATURES, grouped_frame


def block_of(X: np.ndarray, y: np.ndarray, counts: np.ndarray, n_classes: int) -> Block:
    zeros = np.zeros(len(counts), np.int64)
    return Block(
        X, y, offsets_of(counts), np.arange(len(counts)), zeros.astype(np.uint64), n_classes,
        zeros, zeros,
    )  # fmt: skip


def reference(C: float = 1.0, fit_intercept: bool = True) -> LogisticRegression:
    return LogisticRegression(
        C=C, fit_intercept=fit_intercept, solver="newton-cholesky", tol=1e-12, max_iter=500
    )


def objective(C: float, X: np.ndarray, y: np.ndarray, w: np.ndarray, b: float) -> float:
    z = X @ w + b
    return float(C * (np.logaddexp(0, z) - y * z).sum() + 0.5 * w @ w)


@pytest.mark.parametrize("target", ["label", "colour"])
@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_every_group_equals_scikit_learn(target: str, C: float, fit_intercept: bool) -> None:
    frame = grouped_frame(n_groups=12)
    model = GroupedEstimator(
        Logistic(C, fit_intercept=fit_intercept), "key", target, FEATURES, plan="local"
    ).fit(frame)
    assert len(model.estimators_) == 12
    for key, mine in model.estimators_.items():
        rows = frame[frame.key == key]
        theirs = reference(C, fit_intercept).fit(rows[FEATURES], rows[target])
        assert list(mine.classes_) == list(theirs.classes_)
        np.testing.assert_allclose(
            mine.predict_proba(rows[FEATURES]), theirs.predict_proba(rows[FEATURES]), atol=2e-6
        )
        # newton-cholesky itself stops early on badly scaled columns: compare what it minimises
        if target == "label":
            y = rows[target].to_numpy().astype(float)
            X = rows[FEATURES].to_numpy()
            best = objective(C, X, y, theirs.coef_[0], float(theirs.intercept_[0]))
            found = objective(C, X, y, mine.coef_[0], float(mine.intercept_[0]))
            assert found <= best * (1 + 1e-9) + 1e-9


def test_predictions_equal_the_exported_models() -> None:
    frame = grouped_frame(n_groups=8)
    model = GroupedEstimator(Logistic(), "key", "colour", FEATURES, plan="local").fit(frame)
    proba = model.predict_proba(frame)
    for key, mine in model.estimators_.items():
        at = (frame.key == key).to_numpy()
        np.testing.assert_allclose(proba[at], mine.predict_proba(frame[at][FEATURES]), atol=1e-12)
    assert (model.predict(frame) == model.classes_[proba.argmax(1)]).all()


def test_absent_classes_have_probability_zero() -> None:
    frame = grouped_frame(n_groups=5, rows=(60, 80))
    frame = frame[~((frame.key == "g001") & (frame.colour == "green"))]
    model = GroupedEstimator(Logistic(), "key", "colour", FEATURES, plan="local").fit(frame)
    at = (frame.key == "g001").to_numpy()
    proba = model.predict_proba(frame)
    assert (proba[at][:, 1] == 0).all()
    assert list(model.estimators_["g001"].classes_) == ["blue", "red"]
    np.testing.assert_allclose(proba.sum(1), 1)
    np.testing.assert_allclose(
        proba[at][:, [0, 2]],
        model.estimators_["g001"].predict_proba(frame[at][FEATURES]),
        atol=1e-12,
    )


def test_separable_groups_converge_without_a_penalty_limit() -> None:
    X = np.concatenate([np.linspace(-1, -0.1, 20), np.linspace(0.1, 1, 20)])[:, None]
    y = (X[:, 0] > 0).astype(np.int64)
    block = block_of(X, y, np.array([40]), 2)
    fit = fit_logistic(block, y, 2, [1.0, 1e6])
    assert fit.converged.all()
    theirs = reference(1.0).fit(X, y)
    np.testing.assert_allclose(fit.coef[0, 0, 0], theirs.coef_[0], rtol=1e-6)
    endless = fit_logistic(block, y, 2, [np.inf], max_iter=25)
    assert np.isfinite(endless.coef).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_constant_and_collinear_columns(dtype: type) -> None:
    rng = np.random.default_rng(1)
    base = rng.normal(size=(50, 2))
    X = np.column_stack([base, np.full(50, 7.0), base[:, 0] * 2]).astype(dtype)
    y = (base[:, 0] + rng.normal(size=50) > 0).astype(np.int64)
    fit = fit_logistic(block_of(X, y, np.array([50]), 2), y, 2, [1.0])
    theirs = reference().fit(X.astype(np.float64), y)
    np.testing.assert_allclose(fit.coef[0, 0, 0], theirs.coef_[0], atol=1e-5)
    assert fit.coef[0, 0, 0, 2] == 0


def test_weaker_penalties_start_warm_and_change_nothing() -> None:
    frame = grouped_frame(n_groups=6)
    ordered = frame.sort_values("key", kind="stable")
    counts = ordered.groupby("key").size().to_numpy()
    X, y = ordered[FEATURES].to_numpy(), ordered.label.to_numpy().astype(np.int64)
    block = block_of(X, y, counts, 2)
    together = fit_logistic(block, y, 2, [10.0, 0.1, 1.0])
    for at, C in enumerate([10.0, 0.1, 1.0]):
        alone = fit_logistic(block, y, 2, [C])
        # Tails of the C grid differ by what the stopping rule leaves open.
        np.testing.assert_allclose(together.coef[at], alone.coef[0], rtol=1e-5, atol=1e-9)


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(2, 40), min_size=1, max_size=12),
    features=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_batching_does_not_change_a_group(counts: list[int], features: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = sum(counts)
    X = rng.normal(size=(n, features)) * 10.0 ** rng.integers(-3, 4, features)
    y = np.concatenate([np.arange(c) % 2 for c in counts])
    block = block_of(X, y, np.array(counts), 2)
    whole = fit_logistic(block, y, 2, [1.0])
    for g in range(len(counts)):
        one = block.select(np.array([g]))
        alone = fit_logistic(one, one.y.astype(np.int64), 2, [1.0])
        np.testing.assert_allclose(whole.coef[0, g], alone.coef[0, 0], rtol=1e-6, atol=1e-9)
        rows = slice(block.offsets[g], block.offsets[g + 1])
        gradient = _gradient(X[rows], y[rows], whole.coef[0, g, 0], whole.intercept[0, g, 0])
        scale = np.abs(X[rows]).max(axis=0) * counts[g] + 1
        assert (np.abs(gradient[:-1]) <= 1e-5 * scale).all()
        assert abs(gradient[-1]) <= 1e-5 * counts[g]


def _gradient(X: np.ndarray, y: np.ndarray, w: np.ndarray, b: float) -> np.ndarray:
    p = 1 / (1 + np.exp(-(X @ w + b)))
    return np.append(X.T @ (p - y) + w, (p - y).sum())
