"""Group-wise scores and folds against scikit-learn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from kingpin_ray import ParameterError, UnknownScoringError
from kingpin_ray._folds import Split, fold_of_row, parse_cv
from kingpin_ray._scoring import CLASSIFICATION, REGRESSION, scorer
from tests.kingpin_ray.test_logistic import block_of

COUNTS = np.array([7, 1, 20, 2, 50])
OFFSETS = np.append(0, np.cumsum(COUNTS))


@pytest.mark.parametrize("name", sorted(REGRESSION))
def test_regression_scores_equal_scikit_learn(name: str) -> None:
    rng = np.random.default_rng(0)
    y, guess = rng.normal(size=80), rng.normal(size=80)
    y[28:30] = 4.0
    got = REGRESSION[name](y, guess, OFFSETS)
    host = {
        "r2": metrics.r2_score,
        "neg_mean_squared_error": lambda a, b: -metrics.mean_squared_error(a, b),
        "neg_root_mean_squared_error": lambda a, b: -metrics.root_mean_squared_error(a, b),
        "neg_mean_absolute_error": lambda a, b: -metrics.mean_absolute_error(a, b),
    }[name]
    for g, count in enumerate(COUNTS):
        if name == "r2" and count < 2:
            continue
        rows = slice(OFFSETS[g], OFFSETS[g + 1])
        assert got[g] == pytest.approx(host(y[rows], guess[rows]))


@pytest.mark.parametrize("name", sorted(CLASSIFICATION))
@pytest.mark.parametrize("classes", [2, 3])
def test_classification_scores_equal_scikit_learn(name: str, classes: int) -> None:
    rng = np.random.default_rng(1)
    y = rng.integers(0, classes, 80)
    proba = np.round(rng.dirichlet(np.ones(classes), 80), 1) + 1e-3
    proba /= proba.sum(1, keepdims=True)
    if name == "roc_auc" and classes == 3:
        with pytest.raises(UnknownScoringError, match="two classes"):
            CLASSIFICATION[name](y, proba, OFFSETS)
        return
    got = CLASSIFICATION[name](y, proba, OFFSETS)
    labels = list(range(classes))
    for g in range(len(COUNTS)):
        rows = slice(OFFSETS[g], OFFSETS[g + 1])
        if name == "accuracy":
            want = metrics.accuracy_score(y[rows], proba[rows].argmax(1))
        elif name == "neg_log_loss":
            want = -metrics.log_loss(y[rows], proba[rows], labels=labels)
        elif name == "roc_auc":
            if len(set(y[rows])) < 2:
                assert np.isnan(got[g])
                continue
            want = metrics.roc_auc_score(y[rows], proba[rows, 1])
        elif classes == 2:
            want = -metrics.brier_score_loss(y[rows], proba[rows, 1], labels=labels)
        else:
            want = -((proba[rows] - np.eye(3)[y[rows]]) ** 2).sum(1).mean()
        assert got[g] == pytest.approx(want)


def test_defaults_are_scikit_learns() -> None:
    assert scorer(None, True)[0] == "accuracy"
    assert scorer(None, False)[0] == "r2"


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=10),
    cv=st.sampled_from([2, 3, 5, 0.5, 0.2, 0.1]),
    seed=st.integers(0, 99),
    cut=st.integers(0, 40),
)
def test_folds_are_balanced_and_know_nothing_of_the_split(
    counts: list[int], cv: float, seed: int, cut: int
) -> None:
    split = parse_cv(cv, 1)
    assert split is not None
    n = sum(counts)
    seeds = np.random.default_rng(seed).integers(0, 2**63, len(counts)).astype(np.uint64)
    block = block_of(np.zeros((n, 1)), np.zeros(n), np.array(counts), 0)
    block = type(block)(**{**vars(block), "seeds": seeds})
    folds = fold_of_row(block, split)
    for g, count in enumerate(counts):
        mine = folds[block.offsets[g] : block.offsets[g + 1]]
        sizes = np.bincount(mine[mine >= 0], minlength=split.n_folds)
        whole = count // split.period
        assert (sizes >= whole).all()
        assert (sizes <= whole + (count % split.period > 0)).all()
    # A worker that holds only the later rows of a group gives them the same folds.
    g = len(counts) - 1
    skip = min(cut, counts[g])
    part = block_of(np.zeros((counts[g] - skip, 1)), np.zeros(counts[g] - skip),
                    np.array([counts[g] - skip]), 0)  # fmt: skip
    fields = {**vars(part), "seeds": seeds[g:], "first": np.array([skip])}
    late = fold_of_row(type(part)(**fields), split)
    assert late.tolist() == folds[block.offsets[g] + skip :].tolist()


def test_cv_in_words() -> None:
    assert parse_cv(None, 1) is None
    assert parse_cv(None, 3) == Split(5, 5)
    assert parse_cv(0.25, 1) == Split(1, 4)
    for bad in (1, 0, -3, 0.0, 0.9, True, "3", 2.5):
        with pytest.raises(ParameterError, match="give a number of folds"):
            parse_cv(bad, 1)
