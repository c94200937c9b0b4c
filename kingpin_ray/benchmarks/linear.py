"""Ridge, a ridge grid and logistic regression of many groups against the usual ways."""

import argparse
import os
import warnings
from itertools import pairwise

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
from _common import interleave, report
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.linear_model import Ridge as SkRidge
from sklearn.model_selection import GridSearchCV

from kingpin_ray import GroupedEstimator, Logistic, Ridge

ALPHAS = np.logspace(-3, 3, 10)


def generate(groups: int, rows: int, features: int) -> tuple[pd.DataFrame, list[str]]:
    """A seeded table: `rows` rows a group on average, sizes from a fifth to nine fifths of that."""
    rng = np.random.default_rng(0)
    counts = rng.integers(rows // 5, 2 * rows - rows // 5, groups)
    key = np.repeat(np.arange(groups), counts)
    x = rng.normal(size=(len(key), features)).astype(np.float32)
    signal = (x * rng.normal(size=(groups, features))[key]).sum(1) / 3
    names = [f"x{j}" for j in range(features)]
    table = pd.DataFrame(x, columns=names)
    table["key"], table["y"] = key, signal + rng.normal(size=len(key))
    table["label"] = table.y > 0
    return table.sample(frac=1.0, random_state=0).reset_index(drop=True), names


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--features", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--grid-groups", type=int, default=20, help="groups of GridSearchCV")
    parser.add_argument("--ray", action="store_true", help="also the ways that need Ray")
    parser.add_argument("--map-groups", action="store_true", help="also Ray Data map_groups")
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    table, names = generate(args.groups, args.rows, args.features)

    def ours(
        model: object, target: str, plan: str = "local", **options: object
    ) -> GroupedEstimator:
        # One thread: the loops beside it have one too.
        options = {"num_actors": 1, **options}
        return GroupedEstimator(
            model, "key", target, names, plan=plan, fallback=None, random_state=0, **options
        ).fit(table)

    def ranges() -> list[tuple[np.ndarray, pd.DataFrame]]:
        ordered = table.sort_values("key", kind="stable")
        x, y = ordered[names].to_numpy(), ordered[["y", "label"]]
        bounds = np.append(0, np.cumsum(ordered.groupby("key").size().to_numpy()))
        return [(x[a:b], y[a:b]) for a, b in pairwise(bounds)]

    def loop(make: object, target: str, limit: int | None = None) -> None:
        for x, y in ranges()[:limit]:
            make().fit(x, y[target].to_numpy())

    def pool(make: object, target: str) -> None:
        from joblib import Parallel, delayed

        Parallel(n_jobs=2)(delayed(_fit)(make, x, y[target].to_numpy()) for x, y in ranges())

    def grid(limit: int) -> None:
        loop(lambda: GridSearchCV(SkRidge(), {"alpha": ALPHAS}, cv=5), "y", limit)

    alphas = {"param_grid": {"alpha": list(ALPHAS)}, "cv": 5}
    liblinear = lambda: LogisticRegression(solver="liblinear")  # noqa: E731
    cases = {
        "ridge": {
            "sort once, loop": lambda: loop(SkRidge, "y"),
            "joblib, 2 processes": lambda: pool(SkRidge, "y"),
            "kingpin_ray": lambda: ours(Ridge(), "y"),
        },
        "ridge, 10 alphas x 5 folds": {
            "RidgeCV loop": lambda: loop(lambda: RidgeCV(ALPHAS), "y"),
            f"GridSearchCV loop, {args.grid_groups} groups": lambda: grid(args.grid_groups),
            "kingpin_ray": lambda: ours(Ridge(), "y", **alphas),
        },
        "logistic": {
            "loop, lbfgs": lambda: loop(LogisticRegression, "label"),
            "loop, liblinear": lambda: loop(liblinear, "label"),
            "joblib, 2 processes": lambda: pool(LogisticRegression, "label"),
            "kingpin_ray": lambda: ours(Logistic(), "label"),
        },
    }
    if args.ray or args.map_groups:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        ray.data.DataContext.get_current().enable_progress_bars = False
        for name, model, host, target in (
            ("ridge", Ridge(), SkRidge, "y"),
            ("logistic", Logistic(), LogisticRegression, "label"),
        ):
            if args.ray:
                cases[name]["kingpin_ray, 2 actors"] = lambda m=model, t=target: ours(
                    m, t, "task", num_actors=2
                )
                cases[name]["Ray tasks over ranges"] = lambda h=host, t=target: _ray_ranges(
                    ray, table, names, h, t
                )
            if args.map_groups:
                cases[name]["Ray Data map_groups"] = lambda h=host, t=target: _map_groups(
                    ray, table, names, h, t
                )
    rows = []
    for name, arms in cases.items():
        figures = interleave(arms, args.repeats)
        base = figures["kingpin_ray"]["median_s"]
        for arm, figure in figures.items():
            scale = args.groups / args.grid_groups if "GridSearchCV" in arm else 1.0
            rows.append({"case": name, "way": arm, **figure,
                         "times kingpin_ray": figure["median_s"] * scale / base})  # fmt: skip
    exact = {
        "ridge": (Ridge(), lambda: SkRidge(solver="cholesky"), "y"),
        "logistic": (
            Logistic(),
            lambda: LogisticRegression(solver="newton-cholesky", tol=1e-10, max_iter=1000),
            "label",
        ),
    }
    parts = ranges()[:50]
    for name, (model, host, target) in exact.items():
        mine = ours(model, target).estimators_
        gap = max(
            float(np.abs(mine[g].coef_ - host().fit(x, y[target].to_numpy()).coef_).max())
            for g, (x, y) in enumerate(parts)
        )
        print(f"{name}: coefficients of {len(parts)} groups differ from scikit-learn by {gap:.1e}")
    report(f"{args.groups} groups x {args.rows} rows x {args.features}", rows, args.out)


def _fit(make: object, x: np.ndarray, y: np.ndarray) -> object:
    return make().fit(x, y).coef_


def _ray_ranges(ray, table, names, host, target) -> None:  # type: ignore[no-untyped-def]
    """The best usual way: one sorted array in the object store, a task for 50 groups."""
    ordered = table.sort_values("key", kind="stable")
    x, y = ray.put(ordered[names].to_numpy()), ray.put(ordered[target].to_numpy())
    bounds = np.append(0, np.cumsum(ordered.groupby("key").size().to_numpy()))

    @ray.remote
    def some(x, y, bounds):  # type: ignore[no-untyped-def]
        cuts = pairwise(bounds)
        return [host().fit(x[a:b], y[a:b]).coef_ for a, b in cuts]

    ray.get([some.remote(x, y, bounds[i : i + 51]) for i in range(0, len(bounds) - 1, 50)])


def _map_groups(ray, table, names, host, target) -> None:  # type: ignore[no-untyped-def]
    def one(part):  # type: ignore[no-untyped-def]
        model = host().fit(part[names], part[target])
        return pd.DataFrame({"key": part.key.iloc[:1], "coef": [model.coef_.ravel().tolist()]})

    data = ray.data.from_pandas(table)
    data.groupby("key", num_partitions=4).map_groups(one, batch_format="pandas").materialize()


if __name__ == "__main__":
    main()
