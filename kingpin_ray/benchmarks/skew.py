"""Skewed groups: measured on two workers, modelled for 8 to 32, with the model's error.

Whole groups placed on workers wait for the largest of them; splitting that one over all workers
does not. The seconds of every group are measured one after another on one core; placing them on W
workers is then arithmetic (the largest first, on the worker that is free first). On two workers
the same is measured, through Ray actors that run already, and the model's error printed.
"""

import argparse
import heapq
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
from _common import report

from kingpin_ray import GBDT, MLP, GroupedEstimator, Logistic
from kingpin_ray._costs import ClusterCosts, exchange_seconds
from kingpin_ray._engine import fit_block
from kingpin_ray._frame import build_frame, columns_of, layout
from kingpin_ray._parameters import task_of

FEATURES = 20


def sizes_of(shape: str, rows: int, groups: int) -> np.ndarray:
    """Rows of each group: Zipf with exponent 1.1, or one group of a share and equal others."""
    if shape == "Zipf 1.1":
        weight = 1.0 / np.arange(1, groups + 1) ** 1.1
    else:
        share = float(shape.split()[-1].rstrip("%")) / 100
        weight = np.append(share, np.full(groups - 1, (1 - share) / (groups - 1)))
    return np.maximum((weight / weight.sum() * rows).astype(int), 40)


def generate(sizes: np.ndarray) -> pd.DataFrame:
    """A seeded table with those groups."""
    rng = np.random.default_rng(0)
    key = np.repeat(np.arange(len(sizes)), sizes)
    x = rng.normal(size=(len(key), FEATURES)).astype(np.float32)
    y = (x * rng.normal(size=(len(sizes), FEATURES))[key]).sum(1) + rng.logistic(size=len(key)) > 0
    return pd.DataFrame(x, columns=[f"x{j}" for j in range(FEATURES)]).assign(key=key, y=y)


def makespan(seconds: np.ndarray, workers: int) -> float:
    """Returns when the last worker is done, groups going to the first free one in order."""
    free = [0.0] * workers
    for one in -np.sort(-seconds):
        heapq.heapreplace(free, free[0] + one)
    return max(free)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    rows = []
    for shape in ("Zipf 1.1", "one giant of 30%", "one giant of 70%"):
        for name, spec in (
            ("logistic", Logistic()),
            ("trees", GBDT(50, 15)),
            ("network", MLP((32,), batch_size=256, epochs=2)),
        ):
            if name == "trees" and shape != "one giant of 30%":
                continue
            if name == "network" and shape == "Zipf 1.1":
                continue
            rows.append(one(args, shape, name, spec))
    ray.shutdown()
    title = f"{args.rows:,} rows, {args.groups} groups, {FEATURES} features; seconds"
    report(title, rows, args.out)


def one(args, shape, name, spec):  # type: ignore[no-untyped-def]
    """Returns a row of the table for one shape of data and one model."""
    table = generate(sizes_of(shape, args.rows, args.groups))
    estimator = GroupedEstimator(spec, "key", "y", fallback=None, random_state=0, num_actors=2)
    task = task_of(estimator, 0)
    data = columns_of(table)
    frame = build_frame(data, layout(data.names, "key", "y", None), None, None, True, 0)
    # Groups are timed in batches of similar ones, as they are trained; the largest alone.
    order = np.argsort(-frame.counts)
    seconds = np.zeros(len(order))
    for batch in [*order[:20, None], *np.array_split(order[20:], 20)]:
        block = frame.block(batch)
        spent = []
        for _ in range(args.repeats):
            began = time.process_time()
            fit_block(block, task)
            spent.append(time.process_time() - began)
        seconds[batch] = min(spent) * block.counts / block.counts.sum()
    walls = {}
    for plan in ("task", "grouped") if task.model.splits else ("task",):
        spent = []
        for _ in range(args.repeats + 1):
            model = GroupedEstimator(
                spec, "key", "y", fallback=None, random_state=0, num_actors=2, plan=plan
            )
            model.fit(table)
            # What the workers did, without the driver's own part and Ray's messages.
            spent.append(busy(model))
        walls[plan] = float(np.median(spent[1:]))
    giant = order[0]
    rest = np.delete(seconds, giant)

    def split(workers: int) -> float:
        cost = exchange_seconds(
            task.model, frame.counts[[giant]], FEATURES, 2, 1, workers, ClusterCosts()
        )
        return seconds[giant] / workers + float(cost.sum()) + makespan(rest, workers)

    row = {
        "data": shape, "model": name, "largest group": f"{frame.counts.max() / len(table):.0%}",
        "2, whole: measured": walls["task"], "modelled": makespan(seconds, 2),
    }  # fmt: skip
    row["error, whole"] = f"{row['modelled'] / row['2, whole: measured'] - 1:+.0%}"
    splits = "grouped" in walls
    row["2, split: measured"] = walls.get("grouped", "-")
    row["modelled, split"] = split(2) if splits else "-"
    row["error, split"] = f"{split(2) / walls['grouped'] - 1:+.0%}" if splits else "-"
    for workers in (8, 16, 32):
        whole = makespan(seconds, workers)
        shown = f"{whole:.3f}"
        if splits:
            shown += f" / {split(workers):.3f} = {whole / split(workers):.1f}x"
        row[f"{workers}: whole / split"] = shown
    return row


def busy(model: GroupedEstimator) -> float:
    """Returns the seconds after which the last worker of a run was done with its groups."""
    results = model.results_.to_pandas()
    split = results[results.plan == "grouped"].seconds.sum()
    whole = results[results.plan == "task"].groupby("key").seconds.sum().to_numpy()
    return float(split + (makespan(whole, 2) if len(whole) else 0.0))


if __name__ == "__main__":
    main()
