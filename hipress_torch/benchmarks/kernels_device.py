"""Speed of the Triton kernels on a CUDA device, against a copy of the same bytes on that device.

Says so and exits 0 where there is no CUDA device. Bytes are what a stage has to move at least:
encode reads gradient and residual and writes residual and message; decode reads a message and
writes a gradient. A copy reads and writes, and is timed between the kernels.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from hipress_torch import codecs
from hipress_torch.codecs import Batch, Segment

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("onebit", {}),
    ("tbq", {}),
    ("terngrad", {"bits": 4}),
    ("nbit", {}),
    ("fp16", {}),
    ("bf16", {}),
]
Row = tuple[str, int, float, float]


def _seconds(function: Callable[[], object], rounds: int) -> float:
    """Returns the median time of a call by device events, after two calls to warm up."""
    for _ in range(2):
        function()
    times = []
    for _ in range(rounds):
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        began.record()
        function()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return sorted(times)[len(times) // 2]


def device_kernel_table(megabytes: int = 256, rounds: int = 30) -> list[Row]:
    """Returns (kernel, bytes moved, GB/s, ratio to a device copy) of each kernel.

    Args:
        megabytes: size of the float32 gradient.
        rounds: timed calls of each kernel.
    """
    count = megabytes * 2**20 // 4
    grad = torch.randn(count, device="cuda")
    copied = torch.empty_like(grad)
    copy_rate = 8 * count / _seconds(lambda: copied.copy_(grad), rounds)
    rows: list[Row] = [("device copy", 8 * count, copy_rate / 1e9, 1.0)]
    for name, options in CODECS:
        c = codecs.get(name)(**options)
        size = c.wire_bytes(count)
        batch = Batch((Segment(0, 0, count, 0, 7, 0),))
        wire = torch.zeros(size, dtype=torch.uint8, device="cuda")
        incoming = torch.zeros(3, size, dtype=torch.uint8, device="cuda")
        residual = torch.zeros_like(grad)
        stages: dict[str, tuple[Callable[[], object], int]] = {
            "encode + feedback": (
                lambda c=c, b=batch, r=residual, w=wire: c.encode(b, grad, 1.0, r, None, w, 1),
                12 * count + size,
            ),
            "merge of 3 + feedback": (
                lambda c=c, b=batch, r=residual, w=wire, i=incoming: c.encode(
                    b, grad, 1.0, r, i, w, 1
                ),
                12 * count + 4 * size,
            ),
            "decode": (lambda c=c, b=batch, w=wire: c.decode(b, w, copied), 4 * count + size),
        }
        for stage, (function, moved) in stages.items():
            rate = moved / _seconds(function, rounds)
            rows.append((f"{c!r} {stage}", moved, rate / 1e9, rate / copy_rate))
    return rows


def main() -> int:
    """Prints the table; returns 0."""
    if not torch.cuda.is_available():
        print("kernels_device: no CUDA device here; nothing was measured")
        return 0
    rows = device_kernel_table()
    width = max(len(r[0]) for r in rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'kernel':<{width}}  {'MB moved':>9}  {'GB/s':>7}  of a device copy")
    for kernel, moved, rate, ratio in rows:
        print(f"{kernel:<{width}}  {moved / 1e6:>9.0f}  {rate:>7.0f}  {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
