"""A hundred thousand groups in one fit: seconds, peak memory, one model of the store; start-up."""

import argparse
import os
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
from _common import forget_peak, memory_mib, report

from kingpin_ray import GroupedEstimator, Ridge

FIRST = """
import time
import numpy as np
from kingpin_ray import GroupedEstimator, Ridge
rng = np.random.default_rng(0)
X, groups = rng.normal(size=(5000, 10)), rng.integers(0, 50, 5000)
began = time.perf_counter()
GroupedEstimator(Ridge(), random_state=0).fit(X, X[:, 0], groups)
print(time.perf_counter() - began)
"""


def start_up() -> float:
    """Returns the seconds of a fresh process's first fit: 50 groups of 100 rows."""
    command = [sys.executable, "-c", FIRST]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--features", type=int, default=10)
    parser.add_argument("--out")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    n = args.groups * args.rows
    x = rng.normal(size=(n, args.features)).astype(np.float32)
    columns = {f"x{j}": x[:, j].copy() for j in range(args.features)}
    columns["key"] = rng.integers(0, args.groups, n)
    columns["y"] = x[:, 0] * 2 + rng.normal(size=n)
    del x
    table = pa.table(columns)
    del columns
    model = GroupedEstimator(Ridge(), "key", "y", plan="local", random_state=0, progress=False)
    model.fit(table.slice(0, 2000))  # what counts is the data's memory, not that of libraries
    before = forget_peak()
    began = time.perf_counter()
    model.fit(table)
    fit_s = time.perf_counter() - began
    peak = memory_mib("VmHWM")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        model.save(f"{folder}/store")
        save_s = time.perf_counter() - began
        began = time.perf_counter()
        loaded = GroupedEstimator.load(f"{folder}/store")
        load_s = time.perf_counter() - began
        began = time.perf_counter()
        loaded.estimators_[12_345 % args.groups]
        one_s = time.perf_counter() - began
    rows = [
        {
            "models": len(model.estimators_),
            "rows": n,
            "fit s": fit_s,
            "data MiB": table.nbytes / 2**20,
            "grown by the fit MiB": peak - before,
            "(data + growth) / data": 1 + (peak - before) / (table.nbytes / 2**20),
            "save s": save_s,
            "open store ms": load_s * 1e3,
            "one model ms": one_s * 1e3,
            "first small fit after import s": start_up(),
        }
    ]
    report("ridge, one process", rows, args.out)


if __name__ == "__main__":
    main()
