"""Trains a small convolutional network on handwritten digits with compressed gradients.

Run it as ``python train_digits.py --codec onebit``; needs scikit-learn for the images.
"""

import argparse
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import hipress_torch
from hipress_torch.testing import run_ranks


def train(rank: int, ranks: int, codec: str, epochs: int) -> dict[str, float]:
    """Trains on this rank's share; returns loss, accuracy on held-out digits, bytes and seconds."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
    y = torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held_out, mine = order[:360], order[360:][rank::ranks]
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 16, 10),
    )
    ddp = DistributedDataParallel(net)
    state = hipress_torch.register(ddp, codec=codec, plan="always")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    began = time.perf_counter()
    for epoch in range(epochs):
        shuffled = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(epoch))]
        for batch in shuffled[: len(shuffled) // 32 * 32].split(32):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
    seconds = time.perf_counter() - began
    with torch.no_grad():
        right = float((net(x[held_out]).argmax(1) == y[held_out]).float().mean())
    sent = state.metrics()["bytes_sent"]
    state.close()
    return {"loss": float(loss.detach()), "accuracy": right, "sent": sent, "seconds": seconds}


def main() -> None:
    """Trains and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", default="onebit", choices=hipress_torch.codecs.available())
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    a = parser.parse_args()
    r = run_ranks(train, a.ranks, a.codec, a.epochs)[0]
    print(
        f"{a.codec}: {r['accuracy']:.1%} of held-out digits right, loss {r['loss']:.3f}, "
        f"{r['sent'] / 1e6:.1f} MB sent by a rank, {r['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
