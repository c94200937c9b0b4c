"""Time of a training step over a shaped link: plain DDP, torch's own hooks, and ours.

Ranks are hosts (network namespaces) on this machine, joined by links of a set rate. All
configurations train copies of one model, step by step in turn, so that what disturbs the machine
disturbs all alike. Needs Linux and root. The model is a multilayer perceptron of 16.5M parameters,
unless --model says: cnn, a small convolutional network that computes much and sends little, or
fashion and characters, those of convergence.py.
"""

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import _hosts
import _measure
import _models
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import hipress_torch

OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "onebit": ("onebit", {}),
    "nbit 4": ("nbit", {}),
    "graddrop": ("graddrop", {}),
    "auto": ("onebit", {"plan": "auto"}),
    "terngrad 4 bit": ("terngrad", {"bits": 4}),
    "dgc 1 %": ("dgc", {"ratio": 0.01, "momentum": 0.0}),
}
ARMS = "compute,no exchange,none,fp16,powersgd 2,onebit,nbit 4,graddrop,auto"


def kept(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Returns the bucket as it is: what DDP itself costs."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def worker(
    rank: int, ranks: int, folder: str, kind: str, steps: int, names: list[str], bucket_mb: float
) -> None:
    """Times the steps of every configuration; rank 0 writes them."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600)
    )
    trainers = {}
    for name in names:
        net, x, y = _models.timed(kind)
        # PowerSGD has the fewest messages, and its best times, with everything in one bucket.
        cap = 1000 if name == "powersgd 2" else bucket_mb
        ddp = (
            None
            if name == "compute"
            else DistributedDataParallel(net, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        )
        state: Any = None
        if ddp is not None:
            if name == "fp16":
                ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
            elif name == "no exchange":
                ddp.register_comm_hook(None, kept)
            elif name == "powersgd 2":
                state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
                ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            elif name != "none":
                codec, options = OURS[name]
                options = {"plan": "always", "timeout_s": 300, **options}
                state = hipress_torch.register(ddp, codec=codec, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        trainers[name] = (ddp or net, optimizer, state)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    # Buckets are filled anew, and PowerSGD compresses, from the third step on; a plan that is made
    # while training knows the backward pass after seven.
    warm = 8 if "auto" in names else 2
    for step in range(steps + warm):
        for name, (net, optimizer, _) in trainers.items():
            dist.barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            if step >= warm:
                seconds[name].append(time.perf_counter() - began)
    if rank == 0:
        size = 8 * (ranks - 1) / ranks * sum(p.numel() for p in _models.timed(kind)[0].parameters())
        # By the ring all-reduce that gloo does; ours are counted.
        sent = {"none": size, "fp16": size / 2}
        sent |= {
            n: s.metrics()["bytes_sent"] / (steps + warm)
            for n, (_, _, s) in trainers.items()
            if isinstance(s, hipress_torch.HiPressState)
        }
        Path(folder, "out.json").write_text(json.dumps({"seconds": seconds, "sent": sent}))
    dist.barrier()
    for _, _, state in trainers.values():
        if isinstance(state, hipress_torch.HiPressState):
            state.close()
    dist.destroy_process_group()


def main() -> None:
    """Prints a table for each rate."""
    parser = _measure.arguments(__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rates", default="100,1000,10000,0", help="Mbit/s; 0 is unshaped")
    parser.add_argument("--model", default="mlp", choices=["mlp", "cnn", "fashion", "characters"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--bucket-mb", type=float, default=25, help="of all but PowerSGD")
    parser.add_argument("--only", default=ARMS, help="configurations, separated by commas")
    a = parser.parse_args()
    if a.worker:
        worker(*json.loads(a.worker))
        return
    if why := _hosts.possible():
        print(f"link: {why}; nothing was measured")
        return
    names = a.only.split(",")
    rows = []
    lines = [["link", "configuration", "ms a step", "times none", "MB sent a step"]]
    for rate in (int(r) for r in a.rates.split(",")):
        found = _hosts.launch(__file__, a.ranks, rate or None, a.model, a.steps, names, a.bucket_mb)
        link = f"{rate} Mbit/s" if rate else "unshaped"
        for name in names:
            seconds = found["seconds"][name]
            middle, low, high = _measure.spread(seconds)
            gain = _measure.ratio(found["seconds"]["none"], seconds)
            sent = found["sent"].get(name)
            rows.append(
                {"link": link, "ranks": a.ranks, "model": a.model, "configuration": name,
                 "seconds": seconds, "times_none": gain, "bytes_sent": sent}
            )  # fmt: skip
            lines.append(
                [link, name, f"{middle * 1e3:.0f} ({low * 1e3:.0f}-{high * 1e3:.0f})",
                 "{:.2f} ({:.2f}-{:.2f})".format(*gain), f"{sent / 1e6:.2f}" if sent else ""]
            )  # fmt: skip
    _measure.report(a.json, "link", rows)
    print(_measure.table(lines))


if __name__ == "__main__":
    main()
