"""Draws what a state's trace holds: the stages of one training step over a shaped link.

Two hosts (network namespaces) train the multilayer perceptron of link.py with onebit; rank 0's
trace of the last steps is drawn, a row for each thread. Needs Linux and root, or --trace with a
file that ``HiPressState.trace`` wrote.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import _hosts
import _measure
import _models
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hipress_torch

COLOURS = {
    "encode": "tab:blue",
    "send wait": "lightgrey",
    "ring": "tab:purple",
    "merge": "tab:orange",
    "gather wait": "lightgrey",
    "decode": "tab:green",
    "all-reduce wait": "lightgrey",
    "exposed": "tab:red",
}
NAMES = {
    "MainThread": "backward pass",
    "hipress-merge": "merge worker",
    "hipress-decode": "decode worker",
}


def worker(rank: int, ranks: int, folder: str, codec: str, steps: int) -> None:
    """Trains some steps; rank 0 leaves its trace."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    net, x, y = _models.timed("mlp")
    ddp = DistributedDataParallel(net, bucket_cap_mb=10, gradient_as_bucket_view=True)
    state = hipress_torch.register(ddp, codec=codec, plan="always", part_elements=1 << 20)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    if rank == 0:
        state.trace(f"{folder}/out.json")
    dist.barrier()
    state.close()
    dist.destroy_process_group()


def draw(trace: dict[str, Any], title: str, path: Path) -> None:
    """Draws the step of the trace that took the median time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    threads = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    steps: dict[int, list[dict[str, Any]]] = {}
    for e in events:
        steps.setdefault(e["args"]["iteration"], []).append(e)
    # The first steps fill the buckets anew.
    whole = {i: s for i, s in steps.items() if i > 2 and any(e["name"] == "exposed" for e in s)}
    ordered = sorted(whole.values(), key=lambda s: _end(s) - _start(s))
    chosen = ordered[len(ordered) // 2]
    start = _start(chosen)
    rows = list(dict.fromkeys(threads[e["tid"]] for e in chosen))
    rows.sort(key=lambda name: list(NAMES).index(name) if name in NAMES else len(NAMES))
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    for e in chosen:
        row = rows.index(threads[e["tid"]])
        left, width = (e["ts"] - start) / 1e3, e["dur"] / 1e3
        colour = COLOURS.get(e["name"], "black")
        axes.barh(row, width, left=left, height=0.7, color=colour, edgecolor="white", linewidth=0.4)
        if e["name"] in ("encode", "merge", "decode") and width > (_end(chosen) - start) / 6e4:
            text = str(e["args"]["bucket"])
            axes.text(
                left + width / 2, row, text, ha="center", va="center", fontsize=6, color="white"
            )
    axes.set_yticks(range(len(rows)), [NAMES.get(r, r) for r in rows])
    axes.invert_yaxis()
    axes.set(xlabel="ms since the first bucket's hook; numbers are buckets", title=title)
    stages = ("encode", "merge", "decode", "send wait", "exposed")
    labels = {"send wait": "wait for the link", "exposed": "backward waits"}
    handles = [Patch(color=COLOURS[s], label=labels.get(s, s)) for s in stages]
    axes.legend(handles=handles, ncols=5, fontsize=7, loc="upper center", frameon=False,
                bbox_to_anchor=(0.5, -0.28))  # fmt: skip
    figure.savefig(path, dpi=110)


def _start(events: list[dict[str, Any]]) -> float:
    return min(float(e["ts"]) for e in events)


def _end(events: list[dict[str, Any]]) -> float:
    return max(float(e["ts"] + e["dur"]) for e in events)


def main() -> None:
    """Makes a trace, unless one is given, and draws it."""
    parser = _measure.arguments(__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help="draw this file in place of a new run")
    parser.add_argument("--megabits", type=int, default=1000)
    parser.add_argument("--codec", default="onebit")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--plot", type=Path, default=Path("timeline.png"))
    a = parser.parse_args()
    if a.worker:
        worker(*json.loads(a.worker))
        return
    if a.trace:
        trace, title = json.loads(a.trace.read_text(encoding="utf-8")), a.trace.name
    elif why := _hosts.possible():
        print(f"timeline: {why}; nothing was drawn")
        return
    else:
        trace = _hosts.launch(__file__, 2, a.megabits or None, a.codec, a.steps)
        link = f"{a.megabits} Mbit/s" if a.megabits else "unshaped link"
        title = f"one training step, {a.codec}, 2 ranks, {link}"
    draw(trace, title, a.plot)
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    names = list(dict.fromkeys(e["name"] for e in events))
    rows = [{"stage": n, "ms": [e["dur"] / 1e3 for e in events if e["name"] == n]} for n in names]
    _measure.report(a.json, "timeline", rows)
    print(f"timeline: {len(events)} stages drawn to {a.plot}")


if __name__ == "__main__":
    main()
