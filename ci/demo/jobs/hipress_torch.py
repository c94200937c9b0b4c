"""Two processes train a network on handwritten digits: plain DDP against one-bit gradients.

The plot sets the loss against what one rank has sent: on a slow link that axis is the time.
"""

import time
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from ci.demo.job import Measure, Progress, Result, main
from hipress_torch import register
from hipress_torch.testing import RankPool

RANKS, EPOCHS, BATCH, WIDTH = 2, 12, 64, 512


def train(rank: int, ranks: int, codec: str) -> dict[str, Any]:
    """Trains on this rank's share of the digits; returns what it cost and how well it went."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:360], order[360:]
    mine = rest[rank::ranks]
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 10),
    )
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.5)
    state = register(ddp, codec=codec, plan="always")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    losses, sent = [], []
    began = time.perf_counter()
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(epoch)
        shuffled = mine[torch.randperm(len(mine), generator=generator)]
        # Both ranks run the same number of steps: the last, short batch is left out.
        for batch in shuffled[: len(shuffled) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            sent.append(state.metrics()["bytes_sent"])
    seconds = time.perf_counter() - began
    with torch.no_grad():
        right = float((net(x[held_out]).argmax(1) == y[held_out]).float().mean())
    state.close()
    return {"losses": losses, "sent": sent, "seconds": seconds, "accuracy": right}


def run(progress: Progress) -> Result:
    """Trains both ways, one after the other, in the same two processes."""
    progress(f"hipress_torch: starting {RANKS} processes")
    with RankPool(RANKS) as pool:
        runs = {}
        for codec in ("none", "onebit"):
            progress(f"hipress_torch: training, codec {codec}")
            runs[codec] = pool.run(train, codec)
    for results in runs.values():
        if results[0]["accuracy"] != results[1]["accuracy"]:
            raise RuntimeError("the two processes ended with different parameters")
    plain, onebit = runs["none"][0], runs["onebit"][0]
    steps = len(plain["losses"])
    per_step = {name: results[0]["sent"][-1] / steps for name, results in runs.items()}
    return Result(
        data=f"scikit-learn digits, 1,797 images; {RANKS} processes, {steps} steps",
        without=_words(per_step["none"], plain),
        with_plugin=_words(per_step["onebit"], onebit),
        measures=[
            Measure("sent per step and rank", per_step["none"], per_step["onebit"], "bytes"),
            Measure("accuracy on held-out digits", plain["accuracy"], onebit["accuracy"]),
            Measure("training on this machine", plain["seconds"], onebit["seconds"], "s"),
        ],
        caption=(
            f"Training loss against what a rank has sent: one-bit gradients need "
            f"{per_step['none'] / per_step['onebit']:.0f} times fewer bytes for the same "
            f"{steps} steps. Inside one machine bytes are nearly free; over a network they are "
            f"the time."
        ),
        figure=_figure(plain, onebit),
    )


def _words(per_step: float, result: dict[str, Any]) -> str:
    size = f"{per_step / 1e6:.2f} MB" if per_step > 1e5 else f"{per_step / 1e3:.1f} kB"
    return f"{size} a step, {result['accuracy']:.1%} right, {result['seconds']:.1f} s"


def _figure(plain: dict[str, Any], onebit: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for name, result, colour in (
        ("plain DDP", plain, "#777777"),
        ("onebit", onebit, "#0b6e99"),
    ):
        # The mean of an epoch's worth of steps: single batches are noise.
        loss = np.convolve(result["losses"], np.ones(11) / 11, "valid")
        sent = np.asarray(result["sent"][5:-5]) / 1e6
        axes[0].plot(sent, loss, color=colour, label=name)
        axes[1].plot(np.arange(5, 5 + len(loss)), loss, color=colour, label=name)
    axes[0].set(xscale="log", yscale="log", xlabel="sent by one rank (MB)", ylabel="training loss")
    axes[1].set(xlabel="step")
    for a in axes:
        a.grid(alpha=0.3)
        a.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main(run)
