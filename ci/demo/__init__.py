"""The demo: the main job of each plugin, measured, in one table and one page."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ci import processes
from ci.demo.job import PROGRESS
from ci.demo.page import write_page
from ci.demo.table import print_table, write_markdown
from ci.layout import BUILD

OUT = BUILD / "demo"
TIMEOUT_S = 300.0


def run_demo(plugins: Sequence[str], out: Path = OUT, jobs: str = "ci.demo.jobs") -> int:
    """Runs the jobs one after another, prints their table, writes their page.

    Args:
        plugins: whose jobs to run, in this order.
        out: the folder for the page and for a folder a job.
        jobs: the package that holds the jobs.

    Returns:
        0 if every job ended well, else 1. A failing job does not keep the others from running.
    """
    rows: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for number, plugin in enumerate(plugins, start=1):
        print(f"[{number}/{len(plugins)}] {plugin}", file=sys.stderr, flush=True)
        folder = out / plugin
        folder.mkdir(parents=True, exist_ok=True)
        failure = _run_job(f"{jobs}.{plugin}", folder)
        if failure:
            failures[plugin] = failure
            print(f"  FAILED: {failure}", file=sys.stderr, flush=True)
        else:
            rows[plugin] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    print_table(rows, failures)
    write_markdown(out / "table.md", rows)
    page = write_page(out, rows, failures)
    print(f"page: {page}")
    return 1 if failures else 0


def _run_job(module: str, folder: Path) -> str | None:
    """Runs one job in a process of its own; returns why it failed, or None."""
    for stale in ("result.json", "plot.svg"):
        (folder / stale).unlink(missing_ok=True)
    log_path = folder / "log.txt"
    began = time.monotonic()
    with processes.scratch() as env, log_path.open("w", encoding="utf-8") as log:
        # Two threads whatever the machine, so that the figures are comparable.
        env.setdefault("OMP_NUM_THREADS", "2")
        env["PYTHONUNBUFFERED"] = "1"

        def show(line: str) -> None:
            log.write(line + "\n")
            if line.startswith(PROGRESS):
                note = line.removeprefix(PROGRESS)
                print(f"  {time.monotonic() - began:5.1f} s  {note}", file=sys.stderr, flush=True)

        finished = processes.run(
            [sys.executable, "-m", module, str(folder)],
            env=env,
            on_line=show,
            timeout_s=TIMEOUT_S,
        )
    if finished.status != 0:
        last = [line for line in log_path.read_text(encoding="utf-8").splitlines() if line.strip()]
        why = last[-1] if last else "no output"
        return f"exit status {finished.status}: {why} (all of it: {os.path.relpath(log_path)})"
    if not (folder / "result.json").exists():
        return f"it ended well but left no result.json (see {os.path.relpath(log_path)})"
    if finished.leftovers:
        return f"it left processes behind: {'; '.join(finished.leftovers)}"
    return None
