"""Arguments and data that cannot be used are refused in words, never by a raw error."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

import kingpin_ray as kp
from kingpin_ray import GBDT, MLP, GroupedEstimator, Logistic, Ridge, Torch, calibrate
from tests.kingpin_ray.data import FEATURES, grouped_frame

FRAME = grouped_frame(n_groups=3)
X, Y, KEYS = FRAME[FEATURES].to_numpy(), FRAME.value.to_numpy(), FRAME.key.to_numpy()
ARRAYS = GroupedEstimator(Ridge(), plan="local", random_state=0)


def fit(data: Any = FRAME, model: Any = None, **options: Any) -> GroupedEstimator:
    options = {"by": "key", "target": "value", "features": FEATURES, "plan": "local", **options}
    return GroupedEstimator(model or Ridge(), **options).fit(data)


def arrays(X: Any, y: Any, groups: Any) -> GroupedEstimator:
    return clone(ARRAYS).fit(X, y, groups)


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "target a list": (lambda: fit(target=["value"]), kp.ParameterError, "one target only"),
    "features a number": (lambda: fit(features=5), kp.ParameterError, "features=5: give a list"),
    "features a string": (lambda: fit(features="x0"), kp.ParameterError, "features='x0'"),
    "features nested": (lambda: fit(features=[["x0"]]), kp.ParameterError, "features="),
    "by a dict": (lambda: fit(by={"a": 1}), kp.ParameterError, "by={'a': 1}"),
    "by nested": (lambda: fit(by=[["key"]]), kp.ParameterError, "by="),
    "by empty": (lambda: fit(by=[]), kp.ParameterError, r"by=\[\]"),
    "complex X": (lambda: arrays(X + 1j, Y, KEYS), kp.InputError, "Complex data not supported"),
    "complex y": (lambda: arrays(X, Y + 1j, KEYS), kp.InputError, "y: Complex data"),
    "complex groups": (lambda: arrays(X, Y, Y + 1j), kp.InputError, "groups: Complex data"),
    "complex column": (
        lambda: fit(FRAME.assign(x0=1j)), kp.UnsupportedColumnError, "column 'x0': Complex data",
    ),
    "no array": (lambda: arrays(None, Y, KEYS), kp.InputError, "X: Expected 2D array"),
    "one dimension": (lambda: arrays(Y, Y, KEYS), kp.InputError, "X: Expected 2D array"),
    "strings": (lambda: arrays(X.astype(str), Y, KEYS), kp.InputError, "X: dtype='numeric'"),
    "ragged X": (lambda: arrays([[1], [2, 3]], [1, 2], [1, 2]), kp.InputError, "X: "),
    "ragged y": (lambda: arrays(np.eye(2), [[1], [2, 3]], [1, 2]), kp.InputError, "y: "),
    "predict nothing": (lambda: fit().predict(None), kp.InputError, "X: Expected 2D array"),
    "scoring a list": (lambda: fit(scoring=[1]), kp.UnknownScoringError, r"scoring=\[1\]"),
    "seed a string": (lambda: fit(random_state="a"), kp.ParameterError, "random_state='a'"),
    "seed negative": (lambda: fit(random_state=-1), kp.ParameterError, "random_state=-1"),
    "seed a float": (lambda: fit(random_state=1.5), kp.ParameterError, "random_state=1.5"),
    "store a number": (lambda: fit(store=5), kp.ParameterError, "store=5: give the path"),
    "save to a number": (lambda: fit().save(5), kp.ParameterError, "store=5"),
    "load a number": (lambda: GroupedEstimator.load(5), kp.ParameterError, "store=5"),
    "resume a number": (lambda: clone(ARRAYS).resume(5), kp.ParameterError, "store=5"),
    "min_rows a flag": (lambda: fit(min_rows=True), kp.ParameterError, "min_rows=True"),
    "an intercept": (
        lambda: fit(model=Ridge(fit_intercept="a")), kp.ParameterError, r"fit_intercept='a'",
    ),
    "an intercept in a grid": (
        lambda: fit(param_grid={"fit_intercept": [True, "a"]}), kp.ParameterError, "'a'",
    ),
    "too many classes": (
        lambda: fit(model=GBDT(), target="colour"), kp.ParameterError, "3 classes; use GBDT.obj",
    ),
    "score without y": (
        lambda: arrays(X, Y, KEYS).score(X, None, KEYS), kp.InputError, "y: the model was fitted",
    ),
    "score too few y": (lambda: fit().score(FRAME, Y[:3]), kp.InputError, "y has 3 entries"),
    "score no target": (
        lambda: fit().score(FRAME.drop(columns="value")), kp.MissingColumnError, "target='value'",
    ),
    "score nothing": (
        lambda: fit().score(FRAME.assign(value=np.nan)), kp.EmptyDataError, "nothing to score",
    ),
    "score a new class": (
        lambda: fit(model=Logistic(), target="colour", scoring="neg_log_loss").score(
            FRAME.assign(colour="white")
        ),
        kp.InputError, "the class 'white' was not in training",
    ),
    "score by": (
        lambda: fit().score(FRAME, average="x"), kp.ParameterError, "average='x': choose",
    ),
    "no module": (
        lambda: fit(model=Torch(None), target="label"), kp.ParameterError, "give a function",
    ),
    "a module that raises": (
        lambda: fit(model=Torch(lambda: 1 / 0), target="label"),
        kp.ParameterError, "raised ZeroDivisionError",
    ),
    "calibrate a word": (lambda: calibrate("x"), kp.ParameterError, "model='x'"),
    "calibrate no features": (
        lambda: calibrate(Ridge(), n_features=0), kp.ParameterError, "n_features=0",
    ),
    "draws": (
        lambda: fit(param_grid={"alpha": [1]}, n_iter=0), kp.ParameterError, "n_iter=0",
    ),
    "draws of nothing": (lambda: fit(n_iter=3), kp.ParameterError, "n_iter draws settings"),
    "a flag": (
        lambda: fit(model=MLP(early_stopping=3), target="label"),
        kp.ParameterError, "early_stopping=3",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), CASES.values(), ids=CASES)
def test_refused_in_words(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, kp.KingpinError)


def test_byte_order_does_not_matter() -> None:
    keys = np.unique(KEYS, return_inverse=True)[1]
    expected = arrays(X, Y, keys).predict(X, keys)
    swapped = arrays(X.astype(">f8"), Y.astype(">f8"), keys.astype(">i4"))
    np.testing.assert_array_equal(swapped.predict(X.astype(">f8"), keys.astype(">i8")), expected)
    frame = FRAME.assign(x0=FRAME.x0.to_numpy().astype(">f8"))
    np.testing.assert_array_equal(fit(frame).predict(frame), fit().predict(FRAME))


def test_generators_are_seeds() -> None:
    for make in (np.random.default_rng, np.random.RandomState):
        seeds = [fit(random_state=make(3))._about["seed"] for _ in range(2)]
        assert seeds[0] == seeds[1] != fit(random_state=make(4))._about["seed"]


def test_scores_weigh_rows_or_groups() -> None:
    frame = pd.concat([FRAME, FRAME[FRAME.key == "g001"]])
    frame.loc[frame.key == "g002", "value"] *= -1
    model = fit()
    alone = [model.score(rows) for _, rows in frame.groupby("key")]
    assert model.score(frame, average="groups") == pytest.approx(np.mean(alone))
    assert model.score(frame) != pytest.approx(np.mean(alone))
    holes = frame.assign(value=frame.value.where(np.arange(len(frame)) % 3 > 0))
    assert model.score(holes) == pytest.approx(model.score(holes[holes.value.notna()]))
    colours = fit(model=Logistic(), target="colour")
    odd = FRAME.assign(colour=FRAME.colour.where(FRAME.x0 < FRAME.x0.median(), "white"))
    known = (odd.colour != "white").mean()
    assert colours.score(odd) == pytest.approx(known * colours.score(odd[odd.colour != "white"]))
