"""Boosted trees of every group against LightGBM with one thread: CPU time, loss, export."""

import argparse
import os
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightgbm
import numpy as np
import pandas as pd
from _common import DATA, report

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


def generated(groups: int = 50, rows: int = 1573, features: int = 20) -> pd.DataFrame:
    """A seeded table with an interaction and steps."""
    rng = np.random.default_rng(0)
    key = np.repeat(np.arange(groups), rows)
    x = rng.normal(size=(len(key), features))
    signal = x[:, 0] * x[:, 1] + np.where(x[:, 2] > 0.3, 1.0, 0.0) + 0.5 * x[:, 3]
    table = pd.DataFrame(x, columns=[f"x{j}" for j in range(features)])
    return table.assign(key=key, late=(signal + rng.logistic(size=len(key)) > 0.5).astype(float))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=30, help="groups of each set, at most")
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    sets = [("generated", generated(), ["key"], "late", [f"x{j}" for j in range(20)], "binary")]
    if DATA.exists():
        air = pd.read_parquet(DATA / "beijing_air.parquet")
        sets += [
            ("flights, dest", flights(), ["dest"], "late", FLIGHTS, "binary"),
            ("flights, dest, minutes", flights(), ["dest"], "arr_delay", FLIGHTS, "regression"),
            ("beijing, station+hour", air.drop(columns="No"), ["station", "hour"], "PM2.5",
             [n for n in BEIJING if n != "hour"], "regression"),
        ]  # fmt: skip
    rows = [one(args, *each) for each in sets]
    report(f"{args.trees} trees, 31 leaves, one thread", rows, args.out)


def one(args, name, table, by, target, names, objective):  # type: ignore[no-untyped-def]
    """Returns a row of the table for one data set."""
    table = table[table[target].notna()]
    sizes = table.groupby(by)[target].size()
    keys = sizes[(sizes >= 300) & (sizes <= 6700)].index[: args.groups]
    table = table.set_index(by).loc[keys].reset_index()
    held = np.random.default_rng(1).random(len(table)) < 0.25
    train, test = table[~held], table[held]
    spec = GBDT(n_estimators=args.trees, objective=objective)
    key = by if len(by) > 1 else by[0]
    model = GroupedEstimator(
        spec, key, target, names, plan="local", fallback=None, random_state=0, progress=False
    )
    model.fit(train.head(2000))  # loads what is loaded once
    began = time.process_time()
    model.fit(train)
    own_s = time.process_time() - began
    boosters, seconds = {}, {}
    parts = [(k, r[names].to_numpy(float), r[target].to_numpy()) for k, r in train.groupby(key)]
    for bins in (63, 255):
        options = {"objective": objective, "num_leaves": 31, "max_bin": bins, "num_threads": 1,
                   "verbosity": -1}  # fmt: skip
        began = time.process_time()
        for k, x, y in parts:
            data = lightgbm.Dataset(x, y, params={"verbosity": -1})
            boosters[bins, k] = lightgbm.train(options, data, args.trees)
        seconds[bins] = time.process_time() - began
    gaps, losses, export = [], [], 0.0
    for k, part in test.groupby(key):
        x, y = part[names].to_numpy(float), part[target].to_numpy()
        mine = model.predict_proba(part)[:, 1] if objective == "binary" else model.predict(part)
        other = boosters[63, k].predict(x)
        pair = _loss(y, mine, objective), _loss(y, other, objective)
        losses.append(pair)
        gaps.append(pair[0] / pair[1] - 1)
        again = model.estimators_[k].predict(x)
        export = max(export, float(np.max(np.abs(again - mine) / np.maximum(np.abs(mine), 1e-9))))
    count = len(parts)
    return {
        "data": name,
        "groups": count,
        "own ms": own_s / count * 1e3,
        "LightGBM 63 ms": seconds[63] / count * 1e3,
        "LightGBM 255 ms": seconds[255] / count * 1e3,
        "times, 63": seconds[63] / own_s,
        "times, 255": seconds[255] / own_s,
        "own loss": float(np.mean([a for a, _ in losses])),
        "LightGBM loss": float(np.mean([b for _, b in losses])),
        "gap %": 100 * float(np.mean(gaps)),
        "2 SE %": 200 * float(np.std(gaps)) / len(gaps) ** 0.5,
        "export": export,
    }


def _loss(y: np.ndarray, guess: np.ndarray, objective: str) -> float:
    if objective == "binary":
        return float(-np.log(np.clip(np.where(y == 1, guess, 1 - guess), 1e-15, 1)).mean())
    return float(np.sqrt(((y - guess) ** 2).mean()))


if __name__ == "__main__":
    main()
