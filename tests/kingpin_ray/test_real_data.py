"""Every class of model on both real data sets equals the plain fit of its host library, by group.

Needs the optional data folder `../shared/data` beside the repository; skipped without it.
"""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.linear_model import Ridge as SkRidge
from sklearn.model_selection import GridSearchCV
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor

from kingpin_ray import GBDT, MLP, GroupedEstimator, Linear, Logistic, Ridge, Torch
from kingpin_ray._folds import Split, fold_of_row
from kingpin_ray._kernels import adam
from kingpin_ray._kernels.networks import Perceptron, UserModule
from kingpin_ray._prepare import prepare

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "grouped"
pytestmark = [
    pytest.mark.skipif(
        not FOLDER.exists(), reason="the optional data folder ../shared/data is absent"
    ),
    pytest.mark.filterwarnings("ignore:Ignoring params argument:UserWarning"),
]
SETS = {
    "flights": (
        "nycflights_flights.parquet",
        "dest",
        "arr_delay",
        15.0,
        ["dep_delay", "distance", "month", "day", "sched_dep_time"],
    ),
    "beijing": (
        "beijing_air.parquet",
        ["station", "month"],
        "PM2.5",
        75.0,
        ["SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "WSPM"],
    ),
}


def read(name: str, count: int, most: int) -> tuple[pd.DataFrame, Any, list[str]]:
    """Some groups of a set: rows without holes, columns `value` and `label`, key and features."""
    file, by, target, cut, features = SETS[name]
    keys = by if isinstance(by, list) else [by]
    frame = pd.read_parquet(FOLDER / file, columns=[*keys, target, *features]).dropna()
    sizes = frame.groupby(by).size()
    chosen = sizes[sizes >= 300].index[:count]
    frame = frame.set_index(by).loc[chosen].groupby(level=list(range(len(keys)))).head(most)
    frame = frame.reset_index()
    frame["value"] = frame[target].astype(float)
    frame["label"] = frame.value > cut
    return frame, by, features


@pytest.fixture(scope="module", params=SETS)
def real(request: pytest.FixtureRequest) -> tuple[pd.DataFrame, Any, list[str]]:
    return read(request.param, 12, 700)


def fit(real: Any, spec: Any, target: str, **options: Any) -> GroupedEstimator:
    frame, by, features = real
    options = {"plan": "local", "random_state": 0, "fallback": None, **options}
    return GroupedEstimator(spec, by, target, features, **options).fit(frame)


def groups(real: Any) -> Any:
    frame, by, _ = real
    return frame.groupby(by)


@pytest.mark.parametrize(
    ("spec", "host"),
    [(Linear(), LinearRegression()), (Ridge(3.0), SkRidge(3.0, solver="svd"))],
    ids=["linear", "ridge"],
)
def test_least_squares(real: Any, spec: Any, host: Any) -> None:
    model, features = fit(real, spec, "value"), real[2]
    for key, rows in groups(real):
        theirs = host.fit(rows[features], rows.value)
        got = model.predict(rows)
        np.testing.assert_allclose(got, theirs.predict(rows[features]), rtol=1e-6, atol=1e-5)
        mine = model.estimators_[key]
        if spec.get_params().get("alpha"):  # without a penalty a constant column has no one weight
            np.testing.assert_allclose(mine.coef_, theirs.coef_, rtol=1e-5, atol=1e-8)


def test_a_ridge_grid_chooses_what_a_search_over_the_same_folds_chooses(real: Any) -> None:
    grid = {"alpha": [0.01, 1.0, 100.0, 1e4]}
    model = fit(real, Ridge(), "value", param_grid=grid, cv=3)
    frame, _, _ = real
    with ExitStack() as session:
        run = prepare(model, frame, None, None, 0, session)
    block = run.frame.block(np.arange(len(run.frame.keys)))
    folds = fold_of_row(block, Split(3, 3))
    for g, key in enumerate(run.frame.keys.keys()):
        rows = slice(int(block.offsets[g]), int(block.offsets[g + 1]))
        cuts = [
            (np.flatnonzero(folds[rows] != f), np.flatnonzero(folds[rows] == f)) for f in range(3)
        ]
        search = GridSearchCV(SkRidge(solver="svd"), grid, cv=cuts, scoring="r2")
        search.fit(block.X[rows], block.y[rows])
        scores = search.cv_results_["mean_test_score"]
        mine = model.best_params_[key]
        assert scores[grid["alpha"].index(mine["alpha"])] == pytest.approx(scores.max(), abs=1e-9)


def test_logistic(real: Any) -> None:
    model, features = fit(real, Logistic(), "label"), real[2]
    for key, rows in groups(real):
        if key not in model.estimators_:
            assert rows.label.nunique() == 1
            continue
        host = LogisticRegression(solver="newton-cholesky", tol=1e-10, max_iter=1000)
        # Centred: the free constant makes up for it, and the host's Cholesky gets through.
        x = rows[features] - rows[features].mean()
        theirs = host.fit(x, rows.label).predict_proba(x)
        np.testing.assert_allclose(model.predict_proba(rows), theirs, atol=1e-6)


def test_multinomial(real: Any) -> None:
    frame, by, features = real
    edges = frame.value.quantile([0.4, 0.8]).to_numpy()
    frame = frame.assign(band=np.array(["high", "low", "mid"])[[1, 2, 0]][
        np.digitize(frame.value, edges)
    ])  # fmt: skip
    model = fit((frame, by, features), Logistic(C=0.1), "band")
    for _, rows in frame.groupby(by):
        if rows.band.nunique() < 3:
            continue
        # scikit-learn needs scaled columns to get there; the penalty follows the scale.
        host = LogisticRegression(C=0.1, solver="newton-cg", tol=1e-10, max_iter=5000)
        theirs = host.fit(rows[features], rows.band).predict_proba(rows[features])
        np.testing.assert_allclose(model.predict_proba(rows), theirs, atol=2e-3)


def make_flights() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))


def make_beijing() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))


@pytest.mark.parametrize("kind", ["mlp", "torch"])
def test_networks_step_by_step(real: Any, kind: str) -> None:
    frame, by, features = real
    options: dict[str, Any] = {"lr": 0.01, "batch_size": 32, "epochs": 2, "loss": "mse_loss"}
    module_fn = make_flights if len(features) == 5 else make_beijing
    spec = MLP((8,), **options) if kind == "mlp" else Torch(module_fn, **options)
    model = fit(real, spec, "value")
    seeds = model._served.keys.seeds(0)
    net: Any = (
        Perceptron((len(features), 8, 1), "mse_loss")
        if kind == "mlp"
        else UserModule(module_fn, "mse_loss")
    )
    for g, (_, rows) in enumerate(frame.groupby(by)):
        seed = int(seeds[g] >> np.uint64(2))
        module = net.module(net.initial(seed)).train()
        x = torch.tensor(StandardScaler().fit_transform(rows[features]), dtype=torch.float32)
        scale = StandardScaler()
        y = torch.tensor(scale.fit_transform(rows[["value"]]), dtype=torch.float32)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        for epoch in range(2):
            for batch in adam.shuffled(seed, epoch, len(rows)).split(32):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(module(x[batch]), y[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            theirs = scale.inverse_transform(module(x).numpy())[:, 0]
        spread = float(rows.value.std())
        np.testing.assert_allclose(model.predict(rows), theirs, atol=5e-3 * spread)


@pytest.mark.parametrize("target", ["label", "value"])
@pytest.mark.parametrize("name", SETS)
def test_trees_by_held_out_loss(name: str, target: str) -> None:
    frame, by, features = read(name, 60, 500)  # a dozen groups would leave it to chance
    held = np.random.default_rng(0).random(len(frame)) < 0.3
    objective = "binary" if target == "label" else "regression"
    spec = GBDT(25, 15, objective=objective)
    model = fit((frame[~held], by, features), spec, target)
    gaps = []
    for key, rows in frame.groupby(by):
        if key not in model.estimators_:
            continue
        train, test = rows[~held[rows.index]], rows[held[rows.index]]
        options = {"objective": objective, "num_leaves": 15, "max_bin": 63, "verbosity": -1,
                   "num_threads": 1}  # fmt: skip
        data = lightgbm.Dataset(train[features].to_numpy(), train[target].to_numpy(float))
        theirs = lightgbm.train(options, data, 25).predict(test[features].to_numpy())
        truth = test[target].to_numpy(float)
        if target == "label":
            mine = model.predict_proba(test)[:, 1]
            losses = [
                -np.log(np.clip(np.where(truth > 0, p, 1 - p), 1e-9, 1)).mean()
                for p in (mine, theirs)
            ]
        else:
            losses = [((truth - p) ** 2).mean() ** 0.5 for p in (model.predict(test), theirs)]
        gaps.append(losses[0] / losses[1] - 1)
        raw = model.estimators_[key].predict(test[features].to_numpy())
        mine = model.predict_proba(test)[:, 1] if target == "label" else model.predict(test)
        np.testing.assert_allclose(raw, mine, rtol=1e-6)
    error = float(np.std(gaps)) / math.sqrt(len(gaps))
    assert len(gaps) >= 50
    assert np.mean(gaps) <= 2 * error


def test_any_scikit_learn_estimator(real: Any) -> None:
    tree = DecisionTreeRegressor(max_depth=4, random_state=0)
    model, features = fit(real, tree, "value"), real[2]
    for _, rows in groups(real):
        X = rows[features].to_numpy(float)
        np.testing.assert_array_equal(model.predict(rows), tree.fit(X, rows.value).predict(X))
