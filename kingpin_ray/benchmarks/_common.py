"""What every benchmark shares: interleaved repeats, medians with spread, one table, one JSON."""

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[3] / "shared" / "data" / "grouped"


def interleave(arms: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Runs the arms in turn and returns median, spread and CPU seconds of each.

    The first round warms up and is not counted.
    """
    wall: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(repeats + 1):
        for name, arm in arms.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            arm()
            if round_:
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - began_cpu)
    return {
        name: {
            "median_s": float(np.median(wall[name])),
            "low_s": min(wall[name]),
            "high_s": max(wall[name]),
            "cpu_s": float(np.median(cpu[name])),
        }
        for name in arms
    }


def memory_mib(field: str) -> float:
    """Returns a field of this process's memory in MiB: "VmRSS" is now, "VmHWM" its peak (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 2**10
    raise KeyError(field)


def forget_peak() -> float:
    """Begins the peak anew and returns the MiB that are held now.

    Without it, what made the data would hide what the fit takes.
    """
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mib("VmRSS")


def report(title: str, rows: list[dict[str, Any]], out: str | None) -> None:
    """Prints a Markdown table and, if asked, writes JSON beside it."""
    load = os.getloadavg()[0]
    print(f"\n{title}  ({os.cpu_count()} CPUs, {platform.machine()}, load {load:.1f})\n")
    names = list(rows[0])
    print("| " + " | ".join(names) + " |")
    print("|" + "---|" * len(names))
    for row in rows:
        cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
        print("| " + " | ".join(cells) + " |")
    if out is not None:
        about = {"title": title, "python": platform.python_version(), "load": load, "rows": rows}
        Path(out).write_text(json.dumps(about, indent=1), encoding="utf-8")
