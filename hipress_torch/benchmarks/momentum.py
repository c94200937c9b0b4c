"""How feedback takes momentum: accuracy and loss on scikit-learn's digits by rate and momentum.

Two processes train a multilayer perceptron for 12 epochs with SGD. The results are the same in
every run on one machine: seeds are fixed, and time plays no part.
"""

from typing import Any

import _measure
import torch
from torch.nn.parallel import DistributedDataParallel

from hipress_torch import register
from hipress_torch.testing import RankPool

CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "onebit": ("onebit", {}),
    "onebit, block 64": ("onebit", {"block": 64}),
    "nbit 4": ("nbit", {}),
}
SETTINGS = ((0.5, 0.0), (0.02, 0.9), (0.05, 0.9), (0.1, 0.9))


def train(
    rank: int, ranks: int, codec: str, options: dict[str, Any], rate: float, momentum: float
) -> tuple[float, float]:
    """Returns the mean loss of the last epoch and the accuracy on held-out digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held_out, mine = order[:360], order[360:][rank::ranks]
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.5)
    state = register(ddp, codec=codec, plan="always", **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate, momentum=momentum)
    losses: list[float] = []
    for epoch in range(12):
        generator = torch.Generator().manual_seed(epoch)
        shuffled = mine[torch.randperm(len(mine), generator=generator)]
        for batch in shuffled[: len(shuffled) // 64 * 64].split(64):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    with torch.no_grad():
        right = float((net(x[held_out]).argmax(1) == y[held_out]).float().mean())
    state.close()
    return sum(losses[-11:]) / 11, right


def main() -> None:
    """Prints the table."""
    a = _measure.arguments(__doc__).parse_args()
    rows = []
    lines = [["rate", "momentum", *CODECS]]
    with RankPool(2) as pool:
        for rate, momentum in SETTINGS:
            cells = []
            for name, (codec, options) in CODECS.items():
                loss, right = pool.run(train, codec, options, rate, momentum)[0]
                rows.append(
                    {"rate": rate, "momentum": momentum, "codec": name, "loss": loss,
                     "accuracy": right}
                )  # fmt: skip
                cells.append(f"{right:.1%}, loss {loss:.3f}")
            lines.append([str(rate), str(momentum), *cells])
    _measure.report(a.json, "momentum", rows)
    print(_measure.table(lines))


if __name__ == "__main__":
    main()
