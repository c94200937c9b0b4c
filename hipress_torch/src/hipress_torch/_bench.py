"""Speed of the codecs on this machine, against a copy of the same bytes: ``hipress bench``."""

import time
from collections.abc import Callable, Sequence

import torch

from hipress_torch._codec import Batch, Codec, Segment


def speeds(codec: Codec, megabytes: float, rounds: int) -> dict[str, float]:
    """Returns how many times faster than a copy each stage is; one thread.

    Stages and the copy alternate, and each round gives a ratio: the median is returned, so that
    what disturbs the machine disturbs both.

    Args:
        codec: the codec.
        megabytes: size of the float32 gradient, in 2**20 bytes.
        rounds: how often each is timed.
    """
    count = max(1, int(megabytes * 2**18))
    batch = Batch((Segment(0, 0, count, 0, 1, 0),))
    grad, out, residual = torch.randn(count), torch.empty(count), torch.zeros(count)
    wire = torch.zeros(codec.wire_bytes(count), dtype=torch.uint8)
    kept = residual if codec.feedback else None
    codec.encode(batch, grad, 1.0, kept, None, wire, 1)
    incoming = wire.clone().view(1, -1)
    stages: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(batch, grad, 1.0, kept, None, wire, 1),
        "merge": lambda: codec.encode(batch, grad, 1.0, kept, incoming, wire, 1),
        "decode": lambda: codec.decode(batch, wire, out),
    }
    ratios: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(rounds):
        for name, run in stages.items():
            copied = _seconds(lambda: out.copy_(grad))
            ratios[name].append(copied / _seconds(run))
    return {name: sorted(values)[len(values) // 2] for name, values in ratios.items()}


def bench_rows(made: Sequence[Codec], megabytes: float, rounds: int) -> list[list[str]]:
    """Returns the rows of the table, its head first."""
    rows = [["codec", "runs on", "encode / copy", "merge / copy", "decode / copy"]]
    for codec in made:
        found = speeds(codec, megabytes, rounds)
        rows.append([repr(codec), codec.backend, *(f"{r:.2f}" for r in found.values())])
    return rows


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
