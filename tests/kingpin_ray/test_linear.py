"""Least squares from Gram matrices against scikit-learn, group by group."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from sklearn.linear_model import Ridge as SkRidge
from sklearn.model_selection import GridSearchCV, PredefinedSplit

from kingpin_ray import GroupedEstimator, Linear, Ridge
from kingpin_ray._folds import fold_of_row, parse_cv
from kingpin_ray._kernels import least_squares as ls
from tests.kingpin_ray.data import FEATURES, grouped_frame


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("alpha", [None, 0.0, 1e-6, 1.0, 1e4])
def test_every_group_equals_scikit_learn(alpha: float | None, fit_intercept: bool) -> None:
    frame = grouped_frame(n_groups=10)
    if alpha is None:
        mine, _theirs = Linear(fit_intercept=fit_intercept), LinearRegression
        host = LinearRegression(fit_intercept=fit_intercept)
    else:
        mine = Ridge(alpha, fit_intercept=fit_intercept)
        host = SkRidge(alpha, fit_intercept=fit_intercept, solver="svd")
    model = GroupedEstimator(mine, "key", "value", FEATURES, plan="local").fit(frame)
    for key, fitted in model.estimators_.items():
        rows = frame[frame.key == key]
        host.fit(rows[FEATURES], rows.value)
        np.testing.assert_allclose(fitted.coef_, host.coef_, rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(
            fitted.predict(rows[FEATURES]), host.predict(rows[FEATURES]), rtol=1e-8, atol=1e-8
        )


@pytest.mark.parametrize("case", ["constant", "collinear", "few rows", "one row"])
def test_rank_deficient_groups_get_the_least_norm(case: str) -> None:
    rng = np.random.default_rng(3)
    rows = {"constant": 30, "collinear": 30, "few rows": 3, "one row": 1}[case]
    X = rng.normal(size=(rows, 4))
    if case == "constant":
        X[:, 1] = 1e6 / 3
    if case == "collinear":
        X[:, 1] = -3 * X[:, 0]
    frame = pd.DataFrame(X, columns=FEATURES).assign(key="a", value=rng.normal(size=rows))
    model = GroupedEstimator(
        Linear(), "key", "value", FEATURES, plan="local", min_rows=1, fallback=None
    ).fit(frame)
    theirs = LinearRegression().fit(X, frame.value)
    np.testing.assert_allclose(model.estimators_["a"].coef_, theirs.coef_, atol=1e-8)
    np.testing.assert_allclose(model.predict(frame), theirs.predict(X), atol=1e-8)


def test_grid_chooses_what_grid_search_chooses() -> None:
    frame = grouped_frame(n_groups=8, rows=(15, 40))
    grid = {"alpha": [1e-3, 1.0, 30.0, 1e3]}
    model = GroupedEstimator(
        Ridge(), "key", "value", FEATURES, grid, cv=5, plan="local", random_state=7
    ).fit(frame)
    results = model.results_.to_pandas()
    for g, key in enumerate(sorted(frame.key.unique())):
        rows = frame[frame.key == key]
        folds = _folds(len(rows), int(model._served.keys.seeds(7)[g]))
        search = GridSearchCV(SkRidge(solver="svd"), grid, cv=PredefinedSplit(folds))
        search.fit(rows[FEATURES], rows.value)
        assert model.best_params_[key] == search.best_params_
        mine = results[(results.key == key) & results.fold.notna()]
        for f in range(5):
            ours = mine[mine.fold == f].sort_values("config").score.to_numpy()
            theirs = search.cv_results_[f"split{f}_test_score"]
            np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(
            model.estimators_[key].coef_, search.best_estimator_.coef_, rtol=1e-7
        )


def _folds(n: int, seed: int) -> np.ndarray:
    from tests.kingpin_ray.test_logistic import block_of

    block = block_of(np.zeros((n, 1)), np.zeros(n), np.array([n]), 0)
    block = type(block)(**{**vars(block), "seeds": np.array([seed], np.uint64)})
    split = parse_cv(5, 1)
    assert split is not None
    return fold_of_row(block, split)


@pytest.mark.parametrize("scoring", ["r2", "neg_mean_squared_error", "neg_root_mean_squared_error"])
def test_scores_from_grams_equal_scores_from_rows(scoring: str) -> None:
    from kingpin_ray.models._base import GroupModel

    class RowByRow(Ridge):
        search = GroupModel.search

    frame = grouped_frame(n_groups=6)
    runs = [
        GroupedEstimator(
            model, "key", "value", FEATURES, {"alpha": [0.0, 1.0]}, cv=0.25, scoring=scoring,
            plan="local", random_state=1,
        ).fit(frame)
        for model in (Ridge(), RowByRow())
    ]  # fmt: skip
    first, second = (run.results_.column("score").to_numpy() for run in runs)
    np.testing.assert_allclose(first, second, rtol=1e-8)


@settings(max_examples=50)
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=15),
    features=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_grams_equal_a_plain_loop(counts: list[int], features: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(sum(counts), features)).astype(np.float32)
    y = rng.normal(size=sum(counts))
    offsets = np.append(0, np.cumsum(counts))
    shift = ls.group_means(X, y, offsets)
    got = ls.grams(X, y, offsets, shift)
    for g in range(len(counts)):
        rows = slice(offsets[g], offsets[g + 1])
        z = np.column_stack([X[rows].astype(float), y[rows]]) - shift[g]
        z = np.column_stack([z, np.ones(counts[g])])
        np.testing.assert_allclose(got[g], z.T @ z, atol=1e-9)
