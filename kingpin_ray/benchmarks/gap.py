"""Split groups on gloo processes: DDP, a group at a time, against one exchange for all.

With --link each rank runs in a network namespace of its own behind a link of that rate (root and
Linux only; a token bucket of `tc`).
"""

import argparse
import ctypes
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from _common import report

ROWS, BATCH, EPOCHS = 508, 64, 5


def data(groups: int, rank: int, world: int):  # type: ignore[no-untyped-def]
    """The rows of every group that a worker holds."""
    from kingpin_ray._blocks import Block, offsets_of

    rng = np.random.default_rng(0)
    x = rng.normal(size=(groups, ROWS, 20)).astype(np.float32)
    y = np.einsum("grd,gd->gr", x, rng.normal(size=(groups, 20))) + rng.normal(size=x.shape[:2]) > 0
    mine = slice(ROWS * rank // world, ROWS * (rank + 1) // world)
    x, y = x[:, mine], y[:, mine]
    held = x.shape[1]
    return Block(
        x.reshape(-1, 20), y.reshape(-1).astype(np.int64), offsets_of(np.full(groups, held)),
        np.arange(groups), np.arange(groups).astype(np.uint64) << np.uint64(8), 2,
        np.zeros(groups, np.int64), np.full(groups, mine.start),
    )  # fmt: skip


def ddp(block, groups: int) -> float:  # type: ignore[no-untyped-def]
    """Trains the groups one after another, as PyTorch's data parallelism does; returns the loss."""
    losses = []
    for g in range(groups):
        rows = slice(block.offsets[g], block.offsets[g + 1])
        x, y = torch.from_numpy(block.X[rows]), torch.from_numpy(block.y[rows])
        torch.manual_seed(g)
        layers = [torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)]
        net = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(64, 2))
        net = torch.nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(EPOCHS):
            for at in torch.randperm(len(x)).split(BATCH // torch.distributed.get_world_size()):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(x[at]), y[at]).backward()
                optimizer.step()
        with torch.no_grad():
            losses.append(float(torch.nn.functional.cross_entropy(net.module(x), y)))
    return float(np.mean(losses))


@contextmanager
def hosts(ranks: int, rate: str) -> Iterator[str]:
    """Makes a namespace for each rank on a bridge behind shaped links; yields their prefix."""
    tag = f"kp{os.getpid() % 10000}"

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True)

    names = [f"{tag}-{r}" for r in range(ranks)]
    try:
        run(f"ip link add {tag}br type bridge")
        run(f"ip link set {tag}br up")
        for r, name in enumerate(names):
            run(f"ip netns add {name}")
            run(f"ip link add {tag}v{r} type veth peer name eth0 netns {name}")
            run(f"ip link set {tag}v{r} master {tag}br up")
            inside = f"ip netns exec {name}"
            run(f"{inside} ip addr add 10.77.0.{r + 1}/24 dev eth0")
            run(f"{inside} ip link set eth0 up")
            run(f"{inside} ip link set lo up")
            run(f"{inside} tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 100ms")
        yield tag
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        command = ["ip", "link", "del", f"{tag}br"]
        subprocess.run(command, check=False, capture_output=True)


def enter(name: str) -> None:
    """Moves this process into a network namespace."""
    with open(f"/var/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def worker(
    rank: int, world: int, address: str, sizes: list[int], repeats: int, out: str, tag: str
) -> None:
    """Runs both ways in turn on one worker."""
    from kingpin_ray import MLP
    from kingpin_ray._engine import Task
    from kingpin_ray._gap import Exchange, fit_split

    torch.set_num_threads(1)
    if tag:
        enter(f"{tag}-{rank}")
    exchange = Exchange(rank, world, address)
    task = Task(
        MLP((64, 64), batch_size=BATCH, epochs=EPOCHS), ({},), None, "neg_log_loss", 2, "data"
    )
    lines = []
    for groups in sizes:
        block = data(groups, rank, world)
        few = min(groups, sizes[0])
        walls: dict[str, list[float]] = {"ddp": [], "gap": []}
        losses = {}
        for _ in range(repeats + 1):
            for name in walls:
                torch.distributed.barrier()
                began = time.perf_counter()
                if name == "ddp":
                    losses[name] = ddp(block, few)
                else:
                    outcome = fit_split(block, task, exchange)
                    losses[name] = -float(outcome.results.column("score").to_numpy().mean())
                walls[name].append(time.perf_counter() - began)
        ddp_s = float(np.median(walls["ddp"][1:])) * groups / few
        gap_s = float(np.median(walls["gap"][1:]))
        lines.append(f"{groups},{few},{ddp_s},{gap_s},{losses['ddp']},{losses['gap']}")
    if rank == 0:
        Path(out).write_text("\n".join(lines))
    exchange.close()


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[15, 100])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--link", help="rate of each rank's link, such as 1gbit")
    parser.add_argument("--out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tag, address = "", ""
        if args.link:
            tag, address = stack.enter_context(hosts(args.ranks, args.link)), "10.77.0.1:29511"
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{probe.getsockname()[1]}"
        lines = f"{folder}/lines"
        torch.multiprocessing.spawn(
            worker, (args.ranks, address, args.groups, args.repeats, lines, tag), args.ranks
        )
        found = [line.split(",") for line in Path(lines).read_text().splitlines()]
    rows = [
        {"models": int(n), "DDP timed on": int(few), "DDP s": float(d), "GAP s": float(g),
         "times": float(d) / float(g), "DDP loss": float(a), "GAP loss": float(b)}
        for n, few, d, g, a, b in found
    ]  # fmt: skip
    link = f" behind {args.link} links" if args.link else ""
    title = f"{args.ranks} gloo ranks{link}, each with its share of every group, 20-64-64-2"
    report(title, rows, args.out)


if __name__ == "__main__":
    main()
