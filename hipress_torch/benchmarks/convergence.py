"""Loss of the same training with and without compression, over several seeds.

A small convolutional network on Fashion-MNIST (from an optional data folder, see --data) or else on
scikit-learn's digits; two processes on this machine. For every codec: the mean training loss of
the last epoch and the accuracy on held-out images, as ratios to plain all-reduce with the same
seed, and bytes. --plot draws the loss against the seconds that the bytes would take on a link of a
given rate beside the computation measured here: a model, not a measurement; benchmarks/link.py
measures the time of a step.
"""

import gzip
import os
import time
from pathlib import Path
from typing import Any

import _measure
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import hipress_torch
from hipress_torch.testing import RankPool

ROOT = Path(__file__).resolve().parents[2]
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "onebit": ("onebit", {}),
    "terngrad 4 bit": ("terngrad", {"bits": 4}),
    "nbit 4": ("nbit", {}),
    "dgc 1 %": ("dgc", {"ratio": 0.01, "momentum": 0.0, "warmup": 60}),
}


def images(folder: Path | None, limit: int) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Returns the data's name, images (N, 1, H, W) in [0, 1] and labels, shuffled."""
    if folder is not None and (folder / "fashion_mnist").is_dir():
        files = {f.name.split("-idx")[0]: f for f in (folder / "fashion_mnist").glob("*.gz")}
        raw = gzip.decompress(files["train-images"].read_bytes())
        pixels = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 1, 28, 28)
        raw = gzip.decompress(files["train-labels"].read_bytes())
        labels = np.frombuffer(raw, np.uint8, offset=8)
        name, top = "Fashion-MNIST", 255.0
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels, labels, name, top = digits.images[:, None], digits.target, "digits", 16.0
    order = np.random.default_rng(0).permutation(len(labels))[:limit]
    x = torch.tensor(pixels[order] / top, dtype=torch.float32)
    return name, x, torch.tensor(labels[order].astype(np.int64))


def train(
    rank: int, ranks: int, codec: str, options: dict[str, Any], seed: int, epochs: int,
    folder: str | None, limit: int, rate: float,
) -> dict[str, Any]:  # fmt: skip
    """Trains once; returns the losses by step, bytes by step, seconds and accuracy."""
    _, x, y = images(None if folder is None else Path(folder), limit)
    held = len(y) // 6
    mine = torch.arange(held, len(y))[rank::ranks]
    torch.manual_seed(seed)
    side = x.shape[-1] // 4
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * side * side, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )
    ddp = DistributedDataParallel(net)
    state = hipress_torch.register(ddp, codec=codec, plan="always", seed=seed, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    losses, sent = [], []
    began = time.perf_counter()
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        shuffled = mine[torch.randperm(len(mine), generator=generator)]
        for batch in shuffled[: len(shuffled) // 32 * 32].split(32):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            sent.append(state.metrics()["bytes_sent"])
    seconds = time.perf_counter() - began
    with torch.no_grad():
        right = float((net(x[:held]).argmax(1) == y[:held]).float().mean())
    state.close()
    return {"losses": losses, "sent": sent, "seconds": seconds, "accuracy": right}


def main() -> None:
    """Prints the table and draws the plot."""
    parser = _measure.arguments(__doc__)
    chosen = os.environ.get("HIPRESS_TORCH_DATA")
    default = Path(chosen) if chosen else ROOT / ".." / "shared" / "data"
    parser.add_argument("--data", type=Path, default=default, help="holds fashion_mnist/*.gz")
    parser.add_argument("--limit", type=int, default=12_000, help="images used")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--plot", type=Path, help="where to draw the loss (PNG or SVG)")
    parser.add_argument("--megabits", type=float, default=100.0, help="the plot's link")
    a = parser.parse_args()
    folder = a.data if a.data.is_dir() else None
    name, x, _ = images(folder, a.limit)
    runs: dict[str, list[dict[str, Any]]] = {key: [] for key in CODECS}
    with RankPool(2) as pool:
        for seed in range(a.seeds):
            for key, (codec, options) in CODECS.items():
                arguments = (
                    codec,
                    options,
                    seed,
                    a.epochs,
                    folder and str(folder),
                    a.limit,
                    a.rate,
                )
                results = pool.run(train, *arguments, timeout_s=1200)
                # Both ranks' losses: each sees its own half of the data.
                both = np.mean([r["losses"] for r in results], axis=0).tolist()
                runs[key].append({**results[0], "losses": both})
    rows = []
    lines = [["codec", "last epoch's loss / none", "by seed", "accuracy", "MB sent"]]
    steps = len(runs["none"][0]["losses"]) // a.epochs
    finals = {k: [float(np.mean(r["losses"][-steps:])) for r in v] for k, v in runs.items()}
    for key, values in finals.items():
        ratios = [v / n for v, n in zip(values, finals["none"], strict=True)]
        accuracy = float(np.mean([r["accuracy"] for r in runs[key]]))
        sent = runs[key][0]["sent"][-1] / 1e6
        rows.append({"codec": key, "ratios": ratios, "accuracy": accuracy, "megabytes": sent})
        by_seed = ", ".join(f"{r:.3f}" for r in ratios)
        lines.append([key, f"{np.mean(ratios):.3f}", by_seed, f"{accuracy:.1%}", f"{sent:.1f}"])
    _measure.report(a.json, "convergence", rows)
    print(f"{name}, {len(x)} images, {a.epochs} epochs, {a.seeds} seeds, SGD {a.rate}")
    print(_measure.table(lines))
    if a.plot:
        _plot(a.plot, runs, a.megabits)


def _plot(path: Path, runs: dict[str, list[dict[str, Any]]], megabits: float) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for key, results in runs.items():
        loss = np.mean([r["losses"] for r in results], axis=0)
        width = max(1, len(loss) // 60)
        smooth = np.convolve(loss, np.ones(width) / width, "valid")
        sent = np.asarray(results[0]["sent"][width - 1 :])
        steps = np.arange(width, width + len(smooth))
        computing = float(np.median([r["seconds"] for r in runs["none"]])) / len(loss)
        axes.plot(steps * computing + sent * 8 / (megabits * 1e6), smooth, label=key)
    axes.set(
        xscale="log", yscale="log", ylabel="training loss",
        xlabel=f"seconds: computing here, and the bytes at {megabits:g} Mbit/s",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
