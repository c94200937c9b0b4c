"""Boosted trees of every group against LightGBM, XGBoost and scikit-learn with one thread.

CPU time, held-out loss paired by group, export; with --grid a grid of nine with early stopping.
"""

import argparse
import os
import time
import warnings
from itertools import product
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightgbm
import numpy as np
import pandas as pd
from _common import DATA, interleave, report

from kingpin_ray import GBDT, GroupedEstimator

FLIGHTS = ["dep_delay", "distance", "month", "day", "sched_dep_time", "hour", "minute",
           "sched_arr_time", "dep_time", "flight", "air_time", "carrier_", "origin_"]  # fmt: skip
BEIJING = ["year", "month", "day", "hour", "PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES",
           "DEWP", "RAIN", "WSPM"]  # fmt: skip


def flights() -> pd.DataFrame:
    """Flights that arrived, with codes for the two text columns."""
    table = pd.read_parquet(DATA / "nycflights_flights.parquet")
    table = table[table.arr_delay.notna()].assign(late=lambda t: (t.arr_delay > 15).astype(float))
    for name in ("carrier", "origin"):
        table[f"{name}_"] = table[name].astype("category").cat.codes
    return table


def generated(groups: int, features: int = 20) -> pd.DataFrame:
    """A seeded table of groups of 300 to 5,000 rows with an interaction and steps."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(300), np.log(5000), groups)).astype(int)
    key = np.repeat(np.arange(groups), sizes)
    x = rng.normal(size=(len(key), features))
    signal = x[:, 0] * x[:, 1] + np.where(x[:, 2] > 0.3, 1.0, 0.0) + 0.5 * x[:, 3]
    table = pd.DataFrame(x, columns=[f"x{j}" for j in range(features)])
    return table.assign(key=key, late=(signal + rng.logistic(size=len(key)) > 0.5).astype(float))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=200, help="groups of each set, at most")
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--sets", nargs="+", help="only sets whose name begins so")
    parser.add_argument("--others", action="store_true", help="XGBoost and scikit-learn beside")
    parser.add_argument("--grid", action="store_true", help="nine settings with early stopping")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    sets = [
        (
            "generated",
            generated(args.groups),
            ["key"],
            "late",
            [f"x{j}" for j in range(20)],
            "binary",
        )
    ]
    if DATA.exists():
        air = pd.read_parquet(DATA / "beijing_air.parquet")
        sets += [
            ("flights, late by carrier+dest", flights(), ["carrier", "dest"], "late", FLIGHTS,
             "binary"),
            ("flights, minutes by carrier+dest", flights(), ["carrier", "dest"], "arr_delay",
             FLIGHTS, "regression"),
            ("beijing, by station+month", air.drop(columns="No"), ["station", "month"], "PM2.5",
             [n for n in BEIJING if n != "month"], "regression"),
        ]  # fmt: skip
    wanted = tuple(args.sets or [""])
    rows = [
        (grid if args.grid else one)(args, *each) for each in sets if each[0].startswith(wanted)
    ]
    what = "nine settings, early stopping 20" if args.grid else f"{args.trees} trees, 31 leaves"
    report(f"{what}, one thread", rows, args.out)


def parts_of(args, table, by, target, names):  # type: ignore[no-untyped-def]
    """Returns training and held-out rows, the key, and each group's arrays."""
    table = table[table[target].notna()]
    sizes = table.groupby(by)[target].size()
    keys = sizes[(sizes >= 300) & (sizes <= 5000)].index[: args.groups]
    table = table.set_index(by).loc[keys].reset_index()
    held = np.random.default_rng(1).random(len(table)) < 0.25
    train, test = table[~held], table[held]
    key = by if len(by) > 1 else by[0]
    cut = [
        [(k, r[names].to_numpy(float), r[target].to_numpy()) for k, r in some.groupby(key)]
        for some in (train, test)
    ]
    return train, test, key, *cut


def one(args, name, table, by, target, names, objective):  # type: ignore[no-untyped-def]
    """Returns a row of the table for one data set."""
    train, test, key, fitted, held = parts_of(args, table, by, target, names)
    spec = GBDT(n_estimators=args.trees, objective=objective)
    model = GroupedEstimator(
        spec,
        key,
        target,
        names,
        plan="local",
        fallback=None,
        random_state=0,
        progress=False,
        num_actors=1,
    )
    boosters: dict[Any, Any] = {}

    def lgb(bins: int) -> None:
        options = {"objective": objective, "num_leaves": 31, "max_bin": bins, "num_threads": 1,
                   "verbosity": -1}  # fmt: skip
        for k, x, y in fitted:
            data = lightgbm.Dataset(x, y, params={"verbosity": -1})
            boosters["lgb", bins, k] = lightgbm.train(options, data, args.trees)

    def xgb() -> None:
        import xgboost

        kind = "binary:logistic" if objective == "binary" else "reg:squarederror"
        options = {"objective": kind, "nthread": 1, "tree_method": "hist", "verbosity": 0}
        for k, x, y in fitted:
            boosters["xgb", k] = xgboost.train(options, xgboost.DMatrix(x, y), args.trees)

    def sk() -> None:
        from sklearn.ensemble import HistGradientBoostingClassifier as Classes
        from sklearn.ensemble import HistGradientBoostingRegressor as Values
        from threadpoolctl import threadpool_limits

        kind = Classes if objective == "binary" else Values
        with threadpool_limits(1):
            for k, x, y in fitted:
                boosters["sk", k] = kind(max_iter=args.trees, early_stopping=False).fit(x, y)

    arms = {"own": lambda: model.fit(train), "63": lambda: lgb(63), "255": lambda: lgb(255)}
    times = {n: f["cpu_s"] for n, f in interleave(arms, args.repeats).items()}
    if args.others:
        for n, arm in (("XGBoost", xgb), ("scikit-learn", sk)):
            began = time.process_time()
            arm()
            times[n] = time.process_time() - began
    losses: dict[str, list[float]] = {}
    export = 0.0
    for (k, x, y), (_, part) in zip(held, test.groupby(key), strict=True):
        mine = model.predict_proba(part)[:, 1] if objective == "binary" else model.predict(part)
        guesses = {"own": mine, "63": boosters["lgb", 63, k].predict(x)}
        guesses["255"] = boosters["lgb", 255, k].predict(x)
        if args.others:
            import xgboost

            sk_model = boosters["sk", k]
            guesses["XGBoost"] = boosters["xgb", k].predict(xgboost.DMatrix(x))
            guesses["scikit-learn"] = (
                sk_model.predict_proba(x)[:, 1] if objective == "binary" else sk_model.predict(x)
            )
        for n, guess in guesses.items():
            losses.setdefault(n, []).append(_loss(y, guess, objective))
        again = model.estimators_[k].predict(x)
        export = max(export, float(np.max(np.abs(again - mine) / np.maximum(np.abs(mine), 1e-9))))
    count = len(fitted)
    gaps = np.array(losses["own"]) / np.array(losses["63"]) - 1
    row = {"data": name, "groups": count, "rows": len(train)}
    row |= {f"{_NAMES[n]} ms": seconds / count * 1e3 for n, seconds in times.items()}
    row |= {"times, 63": times["63"] / times["own"], "times, 255": times["255"] / times["own"]}
    row |= {f"{_NAMES[n]} loss": float(np.mean(values)) for n, values in losses.items()}
    return row | {
        "gap %": 100 * float(np.mean(gaps)),
        "2 SE %": 200 * float(np.std(gaps)) / len(gaps) ** 0.5,
        "export": export,
    }


def grid(args, name, table, by, target, names, objective):  # type: ignore[no-untyped-def]
    """Returns a row for nine settings, each with early stopping on a tenth held out."""
    train, _, key, fitted, held = parts_of(args, table, by, target, names)
    choices = {"num_leaves": [7, 15, 31], "learning_rate": [0.05, 0.1, 0.2]}
    settings = [dict(zip(choices, pair, strict=True)) for pair in product(*choices.values())]
    spec = GBDT(args.trees * 3, objective=objective, early_stopping_rounds=20)
    scoring = "neg_log_loss" if objective == "binary" else "neg_root_mean_squared_error"
    model = GroupedEstimator(
        spec, key, target, names, choices, cv=0.2, scoring=scoring, plan="local", fallback=None,
        random_state=0, progress=False, num_actors=1,
    )  # fmt: skip
    chosen: dict[Any, Any] = {}

    def lgb() -> None:
        for k, x, y in fitted:
            rng = np.random.default_rng(0)
            fold = rng.integers(0, 5, len(y)) == 0
            stop = ~fold & (rng.integers(0, 10, len(y)) == 0)
            rest = ~fold & ~stop
            data = lightgbm.Dataset(x[rest], y[rest], params={"verbosity": -1, "max_bin": 63})
            watch = data.create_valid(x[stop], y[stop])
            scores = []
            for setting in settings:
                booster = _lgb(objective, setting, data, watch, args.trees * 3)
                scores.append(_loss(y[fold], booster.predict(x[fold]), objective))
            best = settings[int(np.argmin(scores))]
            stop = rng.integers(0, 10, len(y)) == 0
            data = lightgbm.Dataset(x[~stop], y[~stop], params={"verbosity": -1, "max_bin": 63})
            watch = data.create_valid(x[stop], y[stop])
            chosen[k] = _lgb(objective, best, data, watch, args.trees * 3)

    figures = interleave({"own": lambda: model.fit(train), "63": lgb}, max(1, args.repeats - 2))
    mine, theirs = [], []
    for k, x, y in held:
        mine.append(_loss(y, model.estimators_[k].predict(x), objective))
        theirs.append(_loss(y, chosen[k].predict(x), objective))
    gaps = np.array(mine) / np.array(theirs) - 1
    own, other = (figures[n]["cpu_s"] / len(fitted) * 1e3 for n in ("own", "63"))
    return {
        "data": name, "groups": len(fitted), "own ms": own, "LightGBM 63 ms": other,
        "times": other / own, "own loss": float(np.mean(mine)),
        "LightGBM loss": float(np.mean(theirs)), "gap %": 100 * float(np.mean(gaps)),
        "2 SE %": 200 * float(np.std(gaps)) / len(gaps) ** 0.5,
    }  # fmt: skip


_NAMES = {"own": "own", "63": "LightGBM 63", "255": "LightGBM 255", "XGBoost": "XGBoost",
          "scikit-learn": "scikit-learn"}  # fmt: skip


def _lgb(objective: str, setting: dict[str, Any], data: Any, watch: Any, trees: int) -> Any:
    options = {"objective": objective, "max_bin": 63, "num_threads": 1, "verbosity": -1, **setting}
    stop = lightgbm.early_stopping(20, verbose=False)
    return lightgbm.train(options, data, trees, valid_sets=[watch], callbacks=[stop])


def _loss(y: np.ndarray, guess: np.ndarray, objective: str) -> float:
    if objective == "binary":
        return float(-np.log(np.clip(np.where(y == 1, guess, 1 - guess), 1e-15, 1)).mean())
    return float(np.sqrt(((y - guess) ** 2).mean()))


if __name__ == "__main__":
    main()
