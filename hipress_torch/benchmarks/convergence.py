"""Loss of the same training with and without compression, over several seeds.

Two processes train a convolutional network on Fashion-MNIST, or a character transformer on
Shakespeare (both from an optional data folder) where each process has speakers of its own. For
every codec: training loss at the end (mean over the last tenth of the steps) and held-out loss,
as ratios to plain all-reduce with the same seed.

Every run is kept in a file of its own (--store), and one that is there is not made again: the
benchmark may be stopped at any time and goes on when started anew.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import _measure
import _models
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import hipress_torch
from hipress_torch.testing import RankPool

RANKS = 2
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "onebit": ("onebit", {}),
    "onebit 128": ("onebit", {"block": 128}),
    "terngrad 4 bit": ("terngrad", {"bits": 4}),
    "nbit 4": ("nbit", {}),
    "dgc 1 %": ("dgc", {"ratio": 0.01, "momentum": 0.0, "warmup": 200}),
}
# Steps, the peak of a cosine schedule with a twentieth of the steps to warm up, the optimizer.
SETTINGS: dict[str, tuple[int, float, str]] = {
    "fashion": (1800, 0.1, "sgd"),
    "characters": (1000, 0.3, "sgd"),
}


def train(
    rank: int, ranks: int, task: str, codec: str, options: dict[str, Any], seed: int, steps: int,
    rate: float, kind: str, folder: str,
) -> dict[str, Any]:  # fmt: skip
    """Trains once; returns the losses by step, bytes sent, held-out loss and accuracy."""
    made = _models.TASKS[task](Path(folder), rank, ranks, seed)
    ddp = DistributedDataParallel(made.net)
    state = hipress_torch.register(ddp, codec=codec, plan="always", seed=seed, **options)
    optimizer: torch.optim.Optimizer
    if kind == "adam":
        optimizer = torch.optim.AdamW(made.net.parameters(), lr=rate)
    else:
        optimizer = torch.optim.SGD(made.net.parameters(), lr=rate)
    warm = steps // 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * s / steps)),
    )
    losses = []
    began = time.perf_counter()
    for step in range(steps):
        x, y = made.batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    seconds = time.perf_counter() - began
    sent = state.metrics()["bytes_sent"]
    state.close()
    with torch.no_grad():
        found = [(made.net(x), y) for x, y in made.held_out[rank::ranks]]
        lost = [float(torch.nn.functional.cross_entropy(z, y, reduction="sum")) for z, y in found]
        right = [int((z.argmax(1) == y).sum()) for z, y in found]
    count = sum(y.numel() for _, y in found)
    return {
        "losses": losses, "sent": sent, "seconds": seconds, "held_loss": sum(lost) / count,
        "held_right": sum(right) / count,
    }  # fmt: skip


def run(a: argparse.Namespace, folder: Path) -> None:
    """Makes the runs that are not in the store yet."""
    steps, rate, kind = SETTINGS[a.task]
    steps, rate, kind = a.steps or steps, a.rate or rate, a.optimizer or kind
    a.store.mkdir(parents=True, exist_ok=True)
    wanted = []
    for seed in range(a.seeds):
        for name in a.only.split(",") if a.only else CODECS:
            path = a.store / f"{a.task}-{name.replace(' ', '')}-{seed}.json"
            if not path.exists():
                wanted.append((seed, name, path))
    if not wanted:
        return
    with RankPool(RANKS) as pool:
        for seed, name, path in wanted:
            codec, options = CODECS[name]
            results = pool.run(
                train, a.task, codec, options, seed, steps, rate, kind, str(folder),
                timeout_s=24 * 3600,
            )  # fmt: skip
            # Both ranks' losses: each sees its own share of the data.
            whole = {
                "setting": f"{steps} steps, {kind} {rate:g}",
                "losses": np.mean([r["losses"] for r in results], axis=0).round(5).tolist(),
                "held_loss": float(np.mean([r["held_loss"] for r in results])),
                "held_right": float(np.mean([r["held_right"] for r in results])),
                "sent_a_step": results[0]["sent"] / steps,
                "seconds": results[0]["seconds"],
            }
            beside = path.with_name(path.name + ".part")
            beside.write_text(json.dumps(whole), encoding="utf-8")
            os.replace(beside, path)
            print(f"{path.stem}: {_end(whole['losses']):.4f}, held out {whole['held_loss']:.4f}",
                  flush=True)  # fmt: skip


def _end(losses: list[float]) -> float:
    return float(np.mean(losses[-len(losses) // 10 :]))


def _stored(a: argparse.Namespace, task: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Returns the runs of the store by codec and seed, those with a plain run of that seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name in CODECS:
        for path in sorted(a.store.glob(f"{task}-{name.replace(' ', '')}-*.json")):
            seed = int(path.stem.rpartition("-")[2])
            if name == "none" or seed in found.get("none", {}):
                run = json.loads(path.read_text(encoding="utf-8"))
                found.setdefault(name, {})[seed] = run
    return found


def tabulate(a: argparse.Namespace) -> None:
    """Prints a table of what is stored, for every task."""
    rows = []
    for task in _models.TASKS:
        stored = _stored(a, task)
        if "none" not in stored:
            continue
        lines = [["codec", "training loss, of none", "held-out loss, of none", "by seed", "right",
                  "kB a step"]]  # fmt: skip
        plain = list(stored["none"].values())
        for name, by_seed in stored.items():
            runs = list(by_seed.values())
            pairs = [(run, stored["none"][seed]) for seed, run in by_seed.items()]
            ratios = [_end(r["losses"]) / _end(n["losses"]) for r, n in pairs]
            held = [r["held_loss"] / n["held_loss"] for r, n in pairs]
            right = float(np.mean([r["held_right"] for r in runs]))
            sent = runs[0]["sent_a_step"]
            rows.append({"task": task, "codec": name, "training": ratios, "held_out": held,
                         "right": right, "sent_a_step": sent})  # fmt: skip
            lines.append(
                [name, f"{np.mean(ratios):.3f}", f"{np.mean(held):.3f}",
                 ", ".join(f"{h:.3f}" for h in held), f"{right:.1%}", f"{sent / 1e3:.1f}"]
            )  # fmt: skip
        loss = np.mean([_end(n["losses"]) for n in plain])
        held_loss = np.mean([n["held_loss"] for n in plain])
        print(f"{task}: {plain[0]['setting']}, {len(plain)} seeds, none ends at "
              f"{loss:.3f} (held out {held_loss:.3f})")  # fmt: skip
        print(_measure.table(lines))
    _measure.report(a.json, "convergence", rows)


def plot(a: argparse.Namespace) -> None:
    """Draws the loss against seconds: steps of the store, times of a step as link measured them."""
    from matplotlib.figure import Figure

    timed = {
        (r["model"], r["link"], r["configuration"]): float(np.median(r["seconds"]))
        for path in a.link
        for r in json.loads(path.read_text(encoding="utf-8"))["rows"]
    }
    figure = Figure(figsize=(7, 3.0), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {"fashion": "CNN, Fashion-MNIST", "characters": "transformer, Shakespeare"}
    for axes, (task, title) in zip(panels, titles.items(), strict=True):
        for name, runs in _stored(a, task).items():
            seconds = timed.get((task, f"{a.megabits} Mbit/s", name))
            if seconds is None:
                continue
            loss = np.mean([r["losses"] for r in runs.values()], axis=0)
            width = len(loss) // 30
            smooth = np.convolve(loss, np.ones(width) / width, "valid")
            axes.plot(np.arange(width, width + len(smooth)) * seconds, smooth, label=name)
        axes.set(xscale="log", yscale="log", title=title, xlabel=f"seconds at {a.megabits} Mbit/s")
        axes.grid(alpha=0.3, which="both")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="both", labelsize=8)
    panels[0].set_ylabel("training loss")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(a.plot, dpi=120)


def main() -> None:
    """Makes the runs of one task, prints the tables and draws the plot."""
    parser = _measure.arguments(__doc__)
    parser.add_argument("--task", choices=[*_models.TASKS, "no"], default="fashion",
                        help="what to train; no: only print what is stored")  # fmt: skip
    default = _models.ROOT / "build" / "hipress_torch" / "convergence"
    parser.add_argument("--store", type=Path, default=default, help="folder of finished runs")
    parser.add_argument("--data", type=Path, help="holds fashion_mnist/ and shakespeare/")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="in place of the task's own")
    parser.add_argument("--rate", type=float, help="in place of the task's own")
    parser.add_argument("--optimizer", choices=["sgd", "adam"])
    parser.add_argument("--only", help="codecs, separated by commas")
    parser.add_argument("--plot", type=Path, help="where to draw the loss; needs --link")
    parser.add_argument("--link", type=Path, nargs="+", help="what benchmarks/link.py --json wrote")
    parser.add_argument("--megabits", type=int, default=100, help="the plot's link")
    a = parser.parse_args()
    if a.plot and not a.link:
        parser.error("--plot needs --link: the seconds of a step are measured there")
    if a.task != "no":
        folder = a.data or _models.data_folder()
        if folder is None:
            print("convergence: no data folder (see --data, HIPRESS_TORCH_DATA); nothing was run")
            return
        run(a, folder)
    tabulate(a)
    if a.plot:
        plot(a)


if __name__ == "__main__":
    main()
