"""Speed of the CPU kernels on one core, against a copy of the same bytes and plain torch.

A figure of 1.0 in the column "of memcpy" means as many gradient bytes a second as the C library
copies. The torch column runs the reference that the kernels are tested against. --sparse times the
selection of the top 0.1 % of 25M elements with feedback against torch.topk on the same elements.
"""

import ctypes
import os

import _measure
import torch

from hipress_torch import codecs
from hipress_torch._native import _loader
from hipress_torch.codecs import Batch, Codec, Segment

CODECS = [("onebit", {}), ("tbq", {}), ("terngrad", {"bits": 4}), ("nbit", {}), ("fp16", {})]


def measure(megabytes: int, rounds: int, sets: tuple[str, ...]) -> list[dict[str, object]]:
    """Returns a row for each codec, instruction set and stage."""
    count = megabytes * 2**20 // 4
    grad, copied = torch.randn(count), torch.empty(count)
    source, target = grad.data_ptr(), copied.data_ptr()
    residual = torch.zeros(count)
    rows: list[dict[str, object]] = []
    for name, options in CODECS:
        c = codecs.get(name)(**options)
        batch = Batch((Segment(0, 0, count, 0, 7, 0),))
        wire = torch.zeros(c.wire_bytes(count), dtype=torch.uint8)
        incoming = wire.view(1, -1).clone()
        kept = residual if c.feedback else None

        def on(backend, function):
            def call():
                os.environ["HIPRESS_TORCH_KERNELS"] = backend
                function()

            return call

        stages = {
            "encode": lambda c=c, b=batch, w=wire, r=kept: c.encode(b, grad, 0.5, r, None, w, 1),
            "merge": lambda c=c, b=batch, w=wire, r=kept, i=incoming: c.encode(
                b, grad, 0.5, r, i, w, 1
            ),
            "decode": lambda c=c, b=batch, w=wire: c.decode(b, w, copied),
        }
        functions = {"copy": lambda: ctypes.memmove(target, source, 4 * count)}
        for stage, function in stages.items():
            for s in sets:
                functions[f"{stage} {s}"] = on(s, function)
        functions["encode torch"] = lambda c=c, b=batch, w=wire, r=kept: Codec.encode(
            c, b, grad, 0.5, r, None, w, 1
        )
        seconds = _measure.interleaved(functions, rounds)
        for key, values in seconds.items():
            if key in ("copy", "encode torch"):
                continue
            stage, instructions = key.split()
            row = {
                "codec": repr(c),
                "stage": stage,
                "instructions": instructions,
                "megabytes": megabytes,
                "gigabytes_per_second": count * 4 / _measure.spread(values)[0] / 1e9,
                "of_copy": _measure.ratio(seconds["copy"], values),
            }
            if stage == "encode":
                row["of_torch"] = _measure.ratio(seconds["encode torch"], values)
            rows.append(row)
    os.environ.pop("HIPRESS_TORCH_KERNELS", None)
    return rows


def measure_sparse(rounds: int, count: int = 25_000_000) -> list[dict[str, object]]:
    """Returns a row for the sparse codec against torch.topk, selecting as many."""
    c = codecs.get("graddrop")(ratio=0.001)
    # Ranges as the hook deals them out: of 64 blocks.
    step = 64 * c.granularity
    segments, wire_at = [], 0
    for start in range(0, count, step):
        size = min(step, count - start)
        segments.append(Segment(start, start, size, wire_at, 7, start))
        wire_at += c.wire_bytes(size)
    batch = Batch(tuple(segments))
    grad, residual = torch.randn(count), torch.zeros(count)
    wire = torch.zeros(wire_at, dtype=torch.uint8)
    functions = {
        "topk": lambda: torch.topk(grad.abs(), count // 1000, sorted=False),
        "encode": lambda: c.encode(batch, grad, 0.5, residual, None, wire, 1),
    }
    seconds = _measure.interleaved(functions, rounds)
    return [
        {
            "codec": repr(c), "elements": count, "seconds": seconds["encode"],
            "topk_seconds": seconds["topk"],
            "of_topk": _measure.ratio(seconds["topk"], seconds["encode"]),
        }
    ]  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = _measure.arguments(__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--all", action="store_true", help="every instruction set, not the best")
    parser.add_argument("--sparse", action="store_true", help="sparse selection in place of coding")
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.sparse:
        rows = measure_sparse(a.rounds)
        _measure.report(a.json, "kernels", rows)
        (row,) = rows
        times = [f"{_measure.spread(row[k])[0] * 1e3:.0f}" for k in ("topk_seconds", "seconds")]
        gain = "{:.0f} ({:.0f}-{:.0f})".format(*row["of_topk"])
        head = ["codec", "elements", "torch.topk ms", "encode with feedback ms", "times topk"]
        print(_measure.table([head, [row["codec"], str(row["elements"]), *times, gain]]))
        return
    sets = _loader.instruction_sets()
    rows = measure(a.megabytes, a.rounds, sets if a.all else sets[:1])
    _measure.report(a.json, "kernels", rows)
    lines = [["codec", "stage", "instructions", "GB/s", "of memcpy", "times plain torch"]]
    for r in rows:
        middle, low, high = r["of_copy"]
        torch_text = "{:.0f} ({:.0f}-{:.0f})".format(*r["of_torch"]) if "of_torch" in r else ""
        lines.append(
            [
                r["codec"],
                r["stage"],
                r["instructions"],
                f"{r['gigabytes_per_second']:.1f}",
                f"{middle:.2f} ({low:.2f}-{high:.2f})",
                torch_text,
            ]
        )
    print(_measure.table(lines))


if __name__ == "__main__":
    main()
