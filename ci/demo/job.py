"""What a demo job hands back, and the command line every job shares.

A job is a module ``ci.demo.jobs.<plugin>`` with a function ``run(progress) -> Result``. It is
started as ``python -m ci.demo.jobs.<plugin> OUT`` and leaves ``result.json`` and ``plot.svg`` in
``OUT``.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[str], None]

PROGRESS = "demo: "  # starts the lines that the demo repeats on the terminal


@dataclass(frozen=True)
class Measure:
    """One quantity, measured in this run without the plugin and with it."""

    name: str
    without: float
    with_plugin: float
    unit: str = ""


@dataclass(frozen=True)
class Result:
    """A row of the demo's table, a plot and the sentence beneath it.

    Attributes:
        data: what the job ran on, with its size.
        without: what an ordinary user of the framework gets, in a few words and figures.
        with_plugin: the same figures with the plugin.
        measures: every figure, for the page and for machines.
        caption: one or two sentences that say how to read the plot.
        figure: a matplotlib figure, saved as SVG.
    """

    data: str
    without: str
    with_plugin: str
    measures: list[Measure]
    caption: str
    figure: "Figure"


def main(run: Callable[[Progress], Result]) -> None:
    """Runs a job and writes its two files; called by each job's module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, help="an existing folder for result.json and plot.svg")
    out: Path = parser.parse_args().out

    import matplotlib as mpl

    mpl.use("Agg")
    # Text stays text and ids do not change from run to run.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "demo", "font.size": 9})

    began = time.perf_counter()
    result = run(_progress)
    result.figure.savefig(out / "plot.svg", bbox_inches="tight", metadata={"Date": None})
    fields = {k: v for k, v in vars(result).items() if k not in ("figure", "measures")}
    fields["measures"] = [asdict(m) for m in result.measures]
    fields["seconds"] = time.perf_counter() - began
    unfinished = out / "result.json.part"
    unfinished.write_text(json.dumps(fields, indent=1, allow_nan=False), encoding="utf-8")
    os.replace(unfinished, out / "result.json")


def _progress(message: str) -> None:
    print(f"{PROGRESS}{message}", flush=True)
