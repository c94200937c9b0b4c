"""Parquet larger than the memory it may take: seconds and peak memory of each way of reading it.

Every way runs in a process of its own and is measured by its peak of resident memory. "streamed"
keeps sufficient statistics of the groups and lets the rows go; "spilled" has the rows wait on the
disk (what models do that need rows, forced here); "in memory" reads the files whole.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import forget_peak, memory_mib, report

WAYS = ("streamed", "spilled", "in memory")
FEATURES = 20


def write(folder: Path, rows: int, groups: int, files: int) -> None:
    """Writes seeded files: float32 features, an integer key in random order, a target."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(groups, FEATURES)).astype(np.float32)
    for number in range(files):
        n = rows // files
        key = rng.integers(0, groups, n)
        x = rng.normal(size=(n, FEATURES)).astype(np.float32) + key[:, None].astype(np.float32)
        columns = {f"x{j}": x[:, j] for j in range(FEATURES)}
        y = (x * weights[key]).sum(1) + rng.normal(size=n)
        table = pa.table({**columns, "key": key, "y": y})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=50_000)


def measure(way: str, folder: str, out: str) -> None:
    """Fits in this process and prints what it took as JSON; predictions go to `out`."""
    from kingpin_ray import GroupedEstimator, Ridge, _prepare

    if way == "in memory":
        _prepare.available_memory = lambda: 1 << 60
    else:  # the files count as large, the statistics have their usual share
        _prepare._MEMORY_SHARE = 1 << 60
    if way == "spilled":
        _prepare.SQUARED = ()
    model = GroupedEstimator(
        Ridge(), "key", "y", param_grid={"alpha": [0.1, 1.0, 10.0]}, cv=5, plan="local",
        random_state=0, progress=False,
    )  # fmt: skip
    before = forget_peak()
    began, began_cpu = time.perf_counter(), time.process_time()
    model.fit(f"{folder}/*.parquet")
    spent, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    grown = memory_mib("VmHWM") - before
    slots = model._served.slot  # the last model is the fallback, of a sample where rows are kept
    np.save(out, model._served.stack["coef"][slots])
    print(json.dumps({"fit s": spent, "CPU s": cpu, "grown MiB": grown}))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--groups", type=int, default=2_000)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--out")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.rows, args.groups, args.files)
        held = args.rows * (4 * FEATURES + 16) / 2**20
        found = {}
        for way in WAYS:
            command = [sys.executable, __file__, "--measure", way, folder, f"{folder}/{way}.npy"]
            run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[way] = np.load(f"{folder}/{way}.npy")
            taken = json.loads(run.stdout)
            share = taken["grown MiB"] / held
            apart = np.abs(found[way] / found[WAYS[0]] - 1).max()
            rows.append(
                {"way": way, "data MiB": held, **taken, "grown / data": share,
                 "largest relative difference": float(apart)}
            )  # fmt: skip
    title = f"ridge, 3 penalties x 5 folds, {args.groups:,} groups, {args.rows:,} rows x {FEATURES}"
    report(title, rows, args.out)


if __name__ == "__main__":
    main()
