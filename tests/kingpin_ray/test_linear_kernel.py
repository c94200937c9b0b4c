"""The compiled linear trainer against the same mathematics in NumPy."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kingpin_ray import GroupedEstimator, Linear, Logistic, Ridge
from kingpin_ray._blocks import Block, offsets_of
from kingpin_ray._kernels import least_squares, linear_kernel, newton
from tests.kingpin_ray.data import FEATURES, grouped_frame

pytestmark = pytest.mark.skipif(
    linear_kernel.library() is None, reason="the linear kernel was not built here"
)
SHAPES = st.tuples(
    st.lists(st.integers(0, 140), min_size=1, max_size=6),
    st.integers(1, 27),
    st.integers(0, 99),
    st.sampled_from([np.float32, np.float64]),
)


def rows(counts: list[int], features: int, seed: int, dtype: Any) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(sum(counts), features)) * 10.0 ** rng.integers(-3, 4, features)
    X += 10.0 ** rng.integers(-2, 5, features)
    X[:, 0] = np.where(rng.random() < 0.3, 5.0, X[:, 0])
    return np.ascontiguousarray(X, dtype), rng.normal(size=len(X)) + 7, offsets_of(np.array(counts))


@settings(max_examples=60)
@given(shape=SHAPES, parts=st.integers(1, 5), free=st.booleans())
def test_grams_equal_numpy(shape: Any, parts: int, free: bool) -> None:
    X, y, offsets = rows(*shape)
    folds = np.random.default_rng(1).integers(0, parts, len(y))
    got = least_squares.fold_grams(X, y, offsets, free, folds, parts)
    whole = least_squares.centred_grams(X, y, offsets, free)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_kernel, "library", lambda: None)
        want = least_squares.fold_grams(X, y, offsets, free, folds, parts)
        plain = least_squares.centred_grams(X, y, offsets, free)
    for mine, other in zip([*got, *whole], [*want, *plain], strict=True):
        # Entries of one Gram differ by many orders; rounding is relative to its columns.
        size = np.sqrt(np.abs(np.einsum("...ii->...i", other))) if other.ndim > 2 else other
        if other.ndim > 2:
            scale = size[..., :, None] * size[..., None, :] + 1e-300
            # Sums of centred columns are zero but for rounding of the columns themselves.
            largest = np.abs(X).max(initial=1.0).astype(float) ** 2 * max(len(y), 1) * 1e-16
            assert (np.abs(mine - other) <= 1e-9 * scale + largest).all()
        else:
            np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-12)


@settings(max_examples=40)
@given(
    shape=SHAPES,
    alphas=st.lists(st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 50.0, 1e6]), min_size=1, max_size=11),
    free=st.booleans(),
)
def test_searches_equal_numpy(shape: Any, alphas: list[float], free: bool) -> None:
    X, y, offsets = rows(*shape)
    folds = np.arange(len(y)) % 3
    _, held = least_squares.fold_grams(X, y, offsets, free, folds, 3)
    got = least_squares.search(held, 3, free, np.array(alphas))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_kernel, "library", lambda: None)
        want = least_squares.search(held, 3, free, np.array(alphas))
    about, counts = least_squares.totals(held)
    both = np.isfinite(got) & np.isfinite(want)
    scale = np.broadcast_to((about + 50 * counts + 1)[:, None], got.shape)
    assert (np.abs(got - want)[both] <= 1e-6 * scale[both]).all()
    # Only NumPy looks closer at penalties that are small beside the columns.
    assert not (np.isfinite(got) & ~np.isfinite(want)).any()
    assert np.isnan(got[:, [a == 0.0 for a in alphas]]).all()


@settings(max_examples=40)
@given(
    shape=SHAPES,
    penalties=st.lists(st.sampled_from([0.01, 1.0, 100.0]), min_size=1, max_size=4),
    free=st.booleans(),
)
def test_logistic_optima_equal_numpy(shape: Any, penalties: list[float], free: bool) -> None:
    counts, features, seed, dtype = shape
    X, y, offsets = rows([count + 4 for count in counts], features, seed, dtype)
    codes = (y > 7).astype(np.int64)
    codes[offsets[:-1]], codes[offsets[:-1] + 1] = 0, 1
    groups = len(counts)
    zeros = np.zeros(groups, np.int64)
    block = Block(X, codes, offsets, np.arange(groups), zeros.astype(np.uint64), 2, zeros, zeros)
    options: dict[str, Any] = {"fit_intercept": free, "tol": 1e-12}
    got = newton.fit_logistic(block, codes, 2, penalties, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_kernel, "library", lambda: None)
        want = newton.fit_logistic(block, codes, 2, penalties, **options)
    assert (got.converged == want.converged).all()
    owner = block.group_of_row()
    for c in range(len(penalties)):
        z = [
            np.einsum("nd,nd->n", X.astype(float), fit.coef[c, owner, 0])
            + fit.intercept[c, owner, 0]
            for fit in (got, want)
        ]
        p = [1 / (1 + np.exp(-np.clip(v, -500, 500))) for v in z]
        np.testing.assert_allclose(*p, atol=2e-5)


@pytest.mark.parametrize(
    ("spec", "target", "grid"),
    [
        (Linear(), "value", None),
        (Ridge(), "value", {"alpha": [0.0, 1e-9, 0.1, 10.0], "fit_intercept": [True, False]}),
        (Logistic(), "label", {"C": [0.1, 1.0, float("inf")]}),
    ],
    ids=str,
)
def test_estimators_without_the_kernel_come_to_the_same(
    spec: Any, target: str, grid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = grouped_frame(n_groups=8, rows=(8, 60))
    frame = pd.concat([frame, frame.assign(key="flat", x1=3.0).head(40)])
    options: dict[str, Any] = {"plan": "local", "random_state": 0, "param_grid": grid, "cv": 3}
    got = GroupedEstimator(spec, "key", target, FEATURES, **options).fit(frame)
    monkeypatch.setattr(linear_kernel, "library", lambda: None)
    want = GroupedEstimator(spec, "key", target, FEATURES, **options).fit(frame)
    scores = [m.results_.column("score").to_numpy(zero_copy_only=False) for m in (got, want)]
    np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-5)
    assert got.results_.drop(["score", "seconds"]).equals(want.results_.drop(["score", "seconds"]))
