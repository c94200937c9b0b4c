"""Gathering rows on one CPU thread: packed, and fused with dequantization, against fp32.

A table of 1M x 128 rows, 50,000 random rows a round, results written into memory that is there
already (fresh memory costs every kernel the same). "packed gather" is what a worker does, rows
copied as they are; "gather to float" is gather, unpack and dequantize in one kernel. The baseline
is torch's index_select of the fp32 table. The floor is writing the result and no more: the fastest
kernel, given one row again and again. Times are of the processor, not of the clock, so that other
processes do not count.
"""

import time

import torch
from _measure import arguments, interleaved, ratio, show

from bifeat_pyg import SQ, VQ, paper
from bifeat_pyg._dispatch import gather
from bifeat_pyg._rows import TensorSource
from bifeat_pyg._table import PackedTable

SPECS = {
    "8 bit": SQ(8),
    "4 bit": SQ(4),
    "2 bit": SQ(2),
    "1 bit": SQ(1),
    "paper log 4 bit": paper.sq(4),
    "VQ 8x256": VQ(8, 256, sample_rows=16384),
    "VQ 16x256": VQ(16, 256, sample_rows=16384),
    "VQ 32x256x4": VQ(32, 256, sample_rows=4096, stages=4),
    "VQ 64x256x8": VQ(64, 256, sample_rows=4096, stages=8),
}


def main() -> None:
    """Prints the table."""
    options = arguments(__doc__, rows=1_000_000, columns=128, index=50_000, rounds=15)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.rows, options.columns, generator=generator)
    index = torch.randint(0, options.rows, (options.index,), generator=generator)
    out = torch.empty(options.index, options.columns)
    same = torch.zeros_like(index)
    half = x.half()
    half_out = torch.empty(options.index, options.columns, dtype=torch.float16)
    tables = {name: PackedTable.build(TensorSource(x), spec) for name, spec in SPECS.items()}
    cases = {
        "floor": lambda: tables["VQ 16x256"].fetch(same, out=out),
        "fp32": lambda: torch.index_select(x, 0, index, out=out),
        "fp16": lambda: torch.index_select(half, 0, index, out=half_out),
        "fp16 float": lambda: out.copy_(torch.index_select(half, 0, index, out=half_out)),
    }
    for name, table in tables.items():
        size = table.codec.row_bytes
        packed = torch.empty(options.index, size, dtype=torch.uint8)
        cases[name] = lambda t=table, p=packed: gather(t.codes, t.codec.row_bytes, index, p)
        cases[f"{name} float"] = lambda t=table: t.fetch(index, out=out)
    seconds = interleaved(cases, options.rounds, clock=time.process_time)
    rows = []
    for name in ("fp32", "fp16", *tables):
        size = {"fp32": 4, "fp16": 2}.get(name, 0) * options.columns
        size = size or tables[name].codec.row_bytes
        moved, moved_spread = ratio(seconds, "fp32", name)
        kernel = name if name == "fp32" else f"{name} float"
        fused, fused_spread = ratio(seconds, "fp32", kernel)
        slower, _ = ratio(seconds, kernel, "floor")
        rows.append(
            (name, size, f"{moved:.2f} ({moved_spread})", f"{fused:.2f} ({fused_spread})",
             f"{slower:.1f}")
        )  # fmt: skip
    show(
        f"{options.index} random rows of {options.rows} x {options.columns}, one thread: speed "
        "against fp32 (quartiles)",
        ("features", "bytes a row", "packed gather", "gather to float", "times the floor"),
        rows,
        options.json,
    )


if __name__ == "__main__":
    main()
