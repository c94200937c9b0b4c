"""What the benchmarks share: interleaved timing, the machine's name, the JSON they leave."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import hipress_torch


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Returns the seconds of each function in each round; in a round they run one after another.

    What disturbs the machine thus disturbs all of them alike.
    """
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def spread(values: list[float]) -> tuple[float, float, float]:
    """Returns the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def ratio(base: list[float], other: list[float]) -> tuple[float, float, float]:
    """Returns median and quartiles of how much faster than ``base`` the other was, by round."""
    return spread([b / o for b, o in zip(base, other, strict=True)])


def machine() -> dict[str, Any]:
    """Returns what the figures depend on."""
    model = ""
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hipress_torch": hipress_torch.__version__,
    }


def arguments(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the option that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser


def report(path: Path | None, name: str, rows: list[dict[str, Any]]) -> None:
    """Writes the results with the machine they are from."""
    if path is not None:
        beside = path.with_name(path.name + ".part")
        beside.write_text(
            json.dumps({"benchmark": name, "machine": machine(), "rows": rows}, indent=1),
            encoding="utf-8",
        )
        os.replace(beside, path)


def table(rows: list[list[str]]) -> str:
    """Returns rows as a Markdown table, the first one its head."""
    head, *body = rows
    lines = ["| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *body)]
    return "\n".join(lines)
