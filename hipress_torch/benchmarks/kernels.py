"""Speed of the CPU kernels on one core, against a copy of the same bytes and plain torch.

A figure of 1.0 in the column "of a copy" means as many gradient bytes a second as memcpy copies.
The torch column runs the reference that the kernels are tested against.
"""

import os

import _measure
import torch

from hipress_torch import codecs
from hipress_torch._native import _loader
from hipress_torch.codecs import Batch, Codec, Segment

CODECS = [("onebit", {}), ("tbq", {}), ("terngrad", {"bits": 4}), ("nbit", {}), ("fp16", {})]


def measure(megabytes: int, rounds: int) -> list[dict[str, object]]:
    """Returns a row for each codec, instruction set and stage."""
    count = megabytes * 2**20 // 4
    grad, copied = torch.randn(count), torch.empty(count)
    residual = torch.zeros(count)
    rows: list[dict[str, object]] = []
    sets = _loader.instruction_sets()
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
        functions = {"copy": lambda: copied.copy_(grad)}
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


def main() -> None:
    """Prints the table."""
    parser = _measure.arguments(__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    a = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(a.megabytes, a.rounds)
    _measure.report(a.json, "kernels", rows)
    lines = [["codec", "stage", "instructions", "GB/s", "of a copy", "times plain torch"]]
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
