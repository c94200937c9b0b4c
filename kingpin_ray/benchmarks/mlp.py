"""Perceptrons of many groups, at the same steps: MLP against the usual ways.

A plain PyTorch loop in one process, a Ray task per group, and DDP one group at a time (two gloo
ranks, timed on a few groups and scaled).
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
import torch
from _common import interleave, report
from gap import data, ddp

from kingpin_ray import MLP, GroupedEstimator


def one(part: np.ndarray, label: np.ndarray, epochs: int, seed: int) -> float:
    """Trains one group as an ordinary user does, and returns its training loss."""
    x, y = torch.from_numpy(part.copy()), torch.from_numpy(label.copy()).long()
    x = (x - x.mean(0)) / x.std(0)
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)]
    net = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(net(x), y))


def ddp_seconds(groups: int) -> float:
    """Returns the seconds of DDP over some groups, one after another, on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/seconds"
        torch.multiprocessing.spawn(_ddp_rank, (f"{folder}/meet", groups, out), 2)
        return float(Path(out).read_text())


def _ddp_rank(rank: int, meet: str, groups: int, out: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=2
    )
    block = data(groups, rank, 2)
    ddp(block, 2)  # what is loaded once
    torch.distributed.barrier()
    began = time.perf_counter()
    ddp(block, groups)
    if rank == 0:
        Path(out).write_text(str(time.perf_counter() - began))
    torch.distributed.barrier()  # a rank that leaves early takes the other's connection away
    torch.distributed.destroy_process_group()


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--rows", type=int, default=508)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="also a Ray task per group, and actors")
    parser.add_argument("--ddp", type=int, default=0, help="groups to time DDP on")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    key = np.repeat(np.arange(args.groups), args.rows)
    x = rng.normal(size=(len(key), 20)).astype(np.float32)
    y = (x * rng.normal(size=(args.groups, 20))[key]).sum(1) + rng.normal(size=len(key)) > 0
    table = pd.DataFrame(x, columns=[f"x{j}" for j in range(20)]).assign(key=key, y=y)
    names = [f"x{j}" for j in range(20)]
    losses: dict[str, float] = {}

    def loop() -> None:
        parts = [(x[key == g], y[key == g]) for g in range(args.groups)]
        losses["PyTorch loop"] = float(
            np.mean([one(*p, args.epochs, g) for g, p in enumerate(parts)])
        )

    def ours(name: str, plan: str) -> None:
        model = GroupedEstimator(
            MLP((64, 64), epochs=args.epochs), "key", "y", names, scoring="neg_log_loss",
            plan=plan, num_actors=2 if plan == "task" else None, fallback=None, random_state=0,
        ).fit(table)  # fmt: skip
        losses[name] = -float(model.results_.column("score").to_numpy().mean())

    arms = {"PyTorch loop": loop, "kingpin_ray": lambda: ours("kingpin_ray", "local")}
    if args.ray:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")

        @ray.remote
        def task(part, label, seed):  # type: ignore[no-untyped-def]
            torch.set_num_threads(1)
            return one(part, label, args.epochs, seed)

        def tasks() -> None:
            refs = [task.remote(x[key == g], y[key == g], g) for g in range(args.groups)]
            losses["a Ray task per group"] = float(np.mean(ray.get(refs)))

        arms["a Ray task per group"] = tasks
        arms["kingpin_ray, 2 actors"] = lambda: ours("kingpin_ray, 2 actors", "task")
    figures = interleave(arms, args.repeats)
    if args.ddp:
        seconds = [ddp_seconds(args.ddp) * args.groups / args.ddp for _ in range(args.repeats)]
        name = f"DDP per group, {args.ddp} groups scaled"
        losses[name] = float("nan")
        figures[name] = {
            "median_s": float(np.median(seconds)), "low_s": min(seconds), "high_s": max(seconds),
            "cpu_s": float("nan"),
        }  # fmt: skip
    base = figures["kingpin_ray"]["median_s"]
    rows = [
        {"way": name, **figure, "times": figure["median_s"] / base, "training loss": losses[name]}
        for name, figure in figures.items()
    ]
    title = f"{args.groups} groups x {args.rows} rows, 20-64-64-2, Adam, {args.epochs} epochs"
    report(title, rows, args.out)


if __name__ == "__main__":
    main()
