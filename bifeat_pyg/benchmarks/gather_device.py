"""On a CUDA device: the fused kernels against a device copy, and what a batch costs to bring over.

First table: gather + unpack + dequantize of rows in device memory, and in pinned host memory read
in place (zero copy); bytes read and written, GB/s of them, and their share of the speed of a device
copy. Second table: bytes that cross to the device and seconds for each batch, rows gathered on the
host.
"""

import statistics
import sys

import torch
from _measure import arguments, interleaved, show

from bifeat_pyg import SQ, VQ
from bifeat_pyg._rows import TensorSource
from bifeat_pyg._table import PackedTable

SPECS = {
    "8 bit": SQ(8),
    "4 bit": SQ(4),
    "2 bit": SQ(2),
    "1 bit": SQ(1),
    "VQ 8x256": VQ(8, 256, sample_rows=16384),
}


def main() -> int:
    """Prints the tables; says so where there is no device."""
    options = arguments(__doc__, rows=2_000_000, columns=128, index=200_000, rounds=20)
    if not torch.cuda.is_available():
        print("no CUDA device here; nothing was measured")
        return 0
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.rows, options.columns, generator=generator)
    index = torch.randint(0, options.rows, (options.index,), generator=generator)
    tables = {name: PackedTable.build(TensorSource(x), spec) for name, spec in SPECS.items()}
    _kernels(options, x, index, tables)
    _batches(options, x, index, tables)
    return 0


def _kernels(options, x, index, tables) -> None:
    on_device = index.cuda()
    wide = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(wide)
    features = x.cuda()
    cases = {
        "device copy": lambda: target.copy_(wide),
        "fp32 index_select": lambda: features.index_select(0, on_device),
    }
    written = options.index * options.columns * 4
    moved = {"device copy": 2 * wide.numel(), "fp32 index_select": 2 * written}
    for name, table in tables.items():
        device, pinned = table.codes.cuda(), table.codes.pin_memory()
        # The check of the indices waits for the device, here as in use.
        for where, codes in (("", device), (", zero copy", pinned)):
            cases[name + where] = lambda t=table, c=codes: t.codec.decode(
                c, index=on_device, device="cuda"
            )
            moved[name + where] = options.index * table.codec.row_bytes + written
    seconds = interleaved(cases, options.rounds, torch.cuda.synchronize)
    speed = {name: moved[name] / statistics.median(s) / 1e9 for name, s in seconds.items()}
    rows = [
        (name, moved[name], f"{speed[name]:.0f}", f"{speed[name] / speed['device copy']:.2f}")
        for name in cases
    ]
    head = ("kernel", "bytes", "GB/s", "of a device copy")
    show(f"{options.index} rows of {options.columns}, to float32", head, rows, options.json)


def _batches(options, x, index, tables) -> None:
    half = x.half()
    cases = {
        "fp32": lambda: x.index_select(0, index).pin_memory().cuda(non_blocking=True),
        "fp16": lambda: half.index_select(0, index).pin_memory().cuda(non_blocking=True).float(),
    }
    sizes = {"fp32": options.columns * 4, "fp16": options.columns * 2}
    for name, table in tables.items():

        def packed(table: PackedTable = table) -> torch.Tensor:
            rows = table.gather(index).pin_memory().cuda(non_blocking=True)
            return table.codec.decode(rows)

        cases[name] = packed
        sizes[name] = table.codec.row_bytes
    seconds = interleaved(cases, options.rounds, torch.cuda.synchronize)
    rows = []
    for name in cases:
        middle = statistics.median(seconds[name])
        rows.append((name, sizes[name] * options.index, f"{middle * 1e3:.2f} ms"))
    print()
    show(
        f"a batch of {options.index} rows: host gather, pin, copy, dequantize",
        ("features", "host-to-device bytes", "seconds a batch"),
        rows,
        None,
    )


if __name__ == "__main__":
    sys.exit(main())
