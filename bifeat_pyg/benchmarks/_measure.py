"""What the benchmarks share: interleaved timing, one table, JSON with the machine named."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def arguments(doc: str | None, **defaults: int) -> argparse.Namespace:
    """Returns the command line: the given whole numbers, and where to put the JSON."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def interleaved(
    cases: Mapping[str, Callable[[], Any]],
    rounds: int,
    sync: Callable[[], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Returns seconds of every round; each round runs every case once, after one round unmeasured.

    For work of one thread, `clock=time.process_time` counts this process's time on the processor,
    which other processes do not lengthen.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            if sync is not None:
                sync()
            began = clock()
            case()
            if sync is not None:
                sync()
            if number:
                seconds[name].append(clock() - began)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], base: str, name: str) -> tuple[float, str]:
    """Returns how many times faster `name` is than `base`: median over rounds, quartiles."""
    each = sorted(b / s for b, s in zip(seconds[base], seconds[name], strict=True))
    low, high = each[len(each) // 4], each[-1 - len(each) // 4]
    return statistics.median(each), f"{low:.2f}-{high:.2f}"


def machine() -> dict[str, Any]:
    """Returns what the figures were measured on."""
    made = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        made["gpu"] = torch.cuda.get_device_name()
    return made


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]], path: Path | None) -> None:
    """Prints a table in Markdown and writes it as JSON where asked."""
    cells = [list(head), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    print(f"{title}\n\n" + "\n".join(lines))
    where = machine()
    print(
        f"\n{where.get('gpu', where['cpu'])}, {where['cores']} cores, load {where['load']:.1f}, "
        f"torch {where['torch']}"
    )
    if path is not None:
        figures = [dict(zip(head, row, strict=True)) for row in rows]
        path.write_text(json.dumps({"title": title, "machine": where, "rows": figures}, indent=1))
