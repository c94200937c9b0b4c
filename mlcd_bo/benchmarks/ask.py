"""CPU time of one `ask`, beside a plain BoTorch fit on the same data.

    python3 -m ci bench mlcd_bo/ask

One thread; median and range over repetitions, interleaved in one process.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import platform
import time
import warnings
from pathlib import Path

import botorch
import gpytorch
import numpy as np
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP

import mlcd_bo as mlcd


def search_of(observations: int, candidates: int, strategy: str) -> mlcd.DeploymentOptimizer:
    """Returns a search over about `candidates` deployments with so many trials told."""
    counts = range(1, 11)
    sizes = [(f"t{i}", 0.1 * 1.4**i, 2 * 2 ** (i % 3)) for i in range(candidates // len(counts))]
    kinds = [mlcd.InstanceType(n, p, vcpus=v, mem_gib=4 * v) for n, p, v in sizes]
    space = mlcd.SearchSpace(mlcd.Catalog(kinds), counts)
    scenario = mlcd.Scenario.cheapest_by(deadline=40.0)
    search = mlcd.DeploymentOptimizer(space, scenario, mlcd.Job(total_samples=1e7), strategy)
    rng = np.random.default_rng(0)
    for row in rng.permutation(len(space))[:observations]:
        d = space[row]
        speed = 1000 * (d.count * d.instance_type.price) ** 0.8 * np.exp(0.1 * rng.normal())
        search.tell(mlcd.Trial(d, mlcd.Observation(speed, 0.02 * speed, 60.0, 0.1)))
    return search


def plain_fit(search: mlcd.DeploymentOptimizer) -> None:
    """Fits the model one would reach for: known noise, standardized, two features."""
    x = torch.tensor(
        [[np.log(t.deployment.count), np.log(t.deployment.instance_type.price)] for t in
         search.trials], dtype=torch.float64,
    )  # fmt: skip
    x = (x - x.min(0).values) / (x.max(0).values - x.min(0).values)
    y = torch.tensor([[-np.log(t.observation.speed)] for t in search.trials]).double()
    y = (y - y.mean()) / y.std()
    model = SingleTaskGP(x, y, torch.full_like(y, 1e-3), outcome_transform=None)
    fit_gpytorch_mll(gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model))


def timed(run, repeats: int) -> list[float]:
    """Returns CPU milliseconds of each repetition."""
    took = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        took.append(1e3 * (time.process_time() - began))
    return took


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for observations, candidates in ((5, 100), (20, 100), (20, 1000), (40, 100)):
        search = search_of(observations, candidates, "gittins")
        search.ask()
        plain_fit(search)
        ours, theirs = [], []
        for _ in range(args.repeats):
            ours += timed(search.ask, 1)
            theirs += timed(lambda search=search: plain_fit(search), 1)
        rows.append((observations, candidates, ours, theirs))
    print(
        f"CPU ms, one thread, median (least to most) of {args.repeats}; {platform.machine()}, "
        f"{os.cpu_count()} cores, torch {torch.__version__}, botorch {botorch.__version__}"
    )
    print("| observations | candidates | ask | BoTorch fit alone |\n|---|---|---|---|")
    for observations, candidates, ours, theirs in rows:
        cells = [f"{np.median(t):.1f} ({min(t):.1f} to {max(t):.1f})" for t in (ours, theirs)]
        print(f"| {observations} | {candidates} | {cells[0]} | {cells[1]} |")
    if args.out:
        args.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
