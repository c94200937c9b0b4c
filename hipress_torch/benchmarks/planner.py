"""How near the measured plan comes to the best plan there is, at several link rates.

Two hosts (network namespaces) train a multilayer perceptron of 4.2M parameters in three buckets
with the default plan. Then every combination of what can be done with each bucket is timed: plain
all-reduce, fp16 and onebit, the latter two whole and in parts of 2^18 elements: 125 combinations.
The best of them are timed again, in turn with the plan's own, and with all buckets alike. Needs
Linux and root.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from datetime import timedelta
from pathlib import Path

import _hosts
import _measure
import _models
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hipress_torch
from hipress_torch._plan import Choice
from hipress_torch._replan import LEARN

CAP_MB = 5
SMALL = 1 << 18
WHOLE = 1 << 24
OPTIONS = (
    Choice("none", WHOLE),
    *(Choice(codec, part) for codec in ("fp16", "onebit") for part in (WHOLE, SMALL)),
)
AGAIN = 8
Choices = tuple[Choice, ...]


class Trainer:
    """A model that trains with whatever choices it is given."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = _models.small_perceptron()
        self.x, self.y = torch.randn(8, 512), torch.randint(0, 500, (8,))
        self.ddp = DistributedDataParallel(
            self.net, bucket_cap_mb=CAP_MB, gradient_as_bucket_view=True
        )
        self.state = hipress_torch.register(self.ddp, timeout_s=300)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def step(self) -> float:
        """Returns the seconds of a training step."""
        dist.barrier()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.ddp(self.x), self.y).backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def settle(self) -> tuple[list[tuple[int, int]], Choices]:
        """Trains until the plan is made; returns the buckets, and what it does with each."""
        for _ in range(LEARN + 3):
            self.step()
        # From here on the choices are given, and nothing may change them.
        self.state._planner._watch = None
        buckets = [(index, n) for index, (_, n) in sorted(self.state._buckets.items())]
        return buckets, tuple(self.state._planner.choose(*b) for b in buckets)

    def with_choices(self, buckets: list[tuple[int, int]], choices: Choices) -> float:
        """Returns the seconds of a step with these choices; one before it lays them out."""
        self.state._planner._choices = dict(zip(buckets, choices, strict=True))
        self.step()
        return self.step()


def name_of(choices: Choices, buckets: list[tuple[int, int]]) -> str:
    """Returns the choices as a text, in the order of the buckets."""
    texts = []
    for choice, (_, elements) in zip(choices, buckets, strict=True):
        parts = max(1, round(elements / choice.part_elements))
        texts.append(f"{choice.codec}/{parts}" if parts > 1 else choice.codec)
    return ", ".join(texts)


def worker(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Times all combinations; rank 0 writes them."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600)
    )
    trainer = Trainer()
    buckets, planned = trainer.settle()
    every = list(itertools.product(OPTIONS, repeat=len(buckets)))
    random.Random(0).shuffle(every)
    # Rank 0's times decide on all ranks which ones are timed again.
    once = torch.tensor([trainer.with_choices(buckets, c) for c in every])
    dist.broadcast(once, 0)
    best = [every[i] for i in once.argsort()[:AGAIN].tolist()]
    alike = [(o,) * len(buckets) for o in OPTIONS if o.part_elements == WHOLE]
    arms: dict[str, Choices] = {"planned": planned}
    arms |= {f"all {c[0].codec}": c for c in alike}
    arms |= {f"best {i}": c for i, c in enumerate(best)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, choices in arms.items():
            seconds[name].append(trainer.with_choices(buckets, choices))
    if rank == 0:
        found = {
            "buckets": buckets,
            "names": {name: name_of(c, buckets) for name, c in arms.items()},
            "seconds": seconds,
            "once": {name_of(c, buckets): float(s) for c, s in zip(every, once, strict=True)},
            "combinations": len(every),
        }
        Path(folder, "out.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    trainer.state.close()
    dist.destroy_process_group()


def main() -> None:
    """Prints a row for each rate."""
    parser = _measure.arguments(__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rates", default="100,1000,10000", help="Mbit/s; 0 is unshaped")
    parser.add_argument("--rounds", type=int, default=9)
    a = parser.parse_args()
    if a.worker:
        worker(*json.loads(a.worker))
        return
    if why := _hosts.possible():
        print(f"planner: {why}; nothing was measured")
        return
    rows = []
    lines = [["link", "planned", "ms", "best of all", "ms", "planned, of the best", "all none ms",
              "all fp16 ms", "all onebit ms"]]  # fmt: skip
    for rate in (int(r) for r in a.rates.split(",")):
        found = _hosts.launch(__file__, a.ranks, rate or None, a.rounds)
        link = f"{rate} Mbit/s" if rate else "unshaped"
        seconds, names = found["seconds"], found["names"]
        middle = {name: statistics.median(s) * 1e3 for name, s in seconds.items()}
        best = min((n for n in middle if n != "planned"), key=middle.__getitem__)
        of_best = _measure.ratio(seconds["planned"], seconds[best])
        rows.append({"link": link, "ranks": a.ranks, "best": best, "of_best": of_best, **found})
        alike = [f"{middle[f'all {codec}']:.0f}" for codec in ("none", "fp16", "onebit")]
        lines.append(
            [link, names["planned"], f"{middle['planned']:.0f}", names[best],
             f"{middle[best]:.0f}", "{:.2f} ({:.2f}-{:.2f})".format(*of_best), *alike]
        )  # fmt: skip
        print(_measure.table([lines[0], lines[-1]]), flush=True)
    _measure.report(a.json, "planner", rows)
    if len(rows) > 1:
        print(_measure.table(lines))


if __name__ == "__main__":
    main()
