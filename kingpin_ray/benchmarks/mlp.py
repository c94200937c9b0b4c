"""Perceptrons of many groups: a plain PyTorch loop against MLP, at the same steps."""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
import torch
from _common import interleave, report

from kingpin_ray import MLP, GroupedEstimator


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=60)
    parser.add_argument("--rows", type=int, default=508)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
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
        total = []
        for g in range(args.groups):
            part, label = torch.from_numpy(x[key == g]), torch.from_numpy(y[key == g]).long()
            part = (part - part.mean(0)) / part.std(0)
            torch.manual_seed(g)
            layers = [torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)]
            net = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(64, 2))
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
            for _ in range(args.epochs):
                for rows in torch.randperm(len(part)).split(64):
                    optimizer.zero_grad()
                    loss = torch.nn.functional.cross_entropy(net(part[rows]), label[rows])
                    loss.backward()
                    optimizer.step()
            with torch.no_grad():
                total.append(float(torch.nn.functional.cross_entropy(net(part), label)))
        losses["PyTorch loop"] = float(np.mean(total))

    def ours() -> None:
        model = GroupedEstimator(
            MLP((64, 64), epochs=args.epochs), "key", "y", names, scoring="neg_log_loss",
            plan="local", fallback=None, random_state=0,
        ).fit(table)  # fmt: skip
        losses["kingpin_ray"] = -float(model.results_.column("score").to_numpy().mean())

    figures = interleave({"PyTorch loop": loop, "kingpin_ray": ours}, args.repeats)
    base = figures["kingpin_ray"]["median_s"]
    rows = [
        {"way": name, **figure, "times": figure["median_s"] / base, "training loss": losses[name]}
        for name, figure in figures.items()
    ]
    title = f"{args.groups} groups x {args.rows} rows, 20-64-64-2, Adam, {args.epochs} epochs"
    report(title, rows, args.out)


if __name__ == "__main__":
    main()
