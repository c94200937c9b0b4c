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
        try:
            rows[plugin] = _run_job(f"{jobs}.{plugin}", folder)
        except JobError as error:
            failures[plugin] = str(error)
            print(f"  FAILED: {error}", file=sys.stderr, flush=True)
    # The files first: they are there even if nobody reads this process's output any more.
    write_markdown(out / "table.md", rows)
    page = write_page(out, rows, failures)
    print_table(rows, failures)
    print(f"page: {page}")
    return 1 if failures else 0


class JobError(Exception):
    """A job did not give what it should; the message says why."""


def _run_job(module: str, folder: Path) -> dict[str, Any]:
    """Runs one job in a process of its own and returns its row.

    Raises:
        JobError: it failed, took too long, left no whole result, or left processes behind.
    """
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
                note = f"  {time.monotonic() - began:5.1f} s  {line.removeprefix(PROGRESS)}"
                print(note, file=sys.stderr, flush=True)

        try:
            finished = processes.run(
                [sys.executable, "-m", module, str(folder)],
                env=env,
                on_line=show,
                timeout_s=TIMEOUT_S,
            )
        except OSError as error:
            raise JobError(f"{type(error).__name__}: {error}") from error
    where = f"all of it: {os.path.relpath(log_path)}"
    if finished.timed_out:
        raise JobError(f"stopped after {TIMEOUT_S:.0f} s; {_last_line(log_path)} ({where})")
    if finished.status != 0:
        raise JobError(f"exit status {finished.status}: {_last_line(log_path)} ({where})")
    if finished.leftovers:
        raise JobError(f"it left processes behind: {'; '.join(finished.leftovers)}")
    try:
        row: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        (folder / "plot.svg").stat()
    except (OSError, ValueError) as error:
        raise JobError(f"it ended well but left no whole result: {error} ({where})") from error
    return row


def _last_line(log: Path) -> str:
    lines = [x for x in log.read_text(encoding="utf-8").splitlines() if x.strip()]
    return "".join(filter(str.isprintable, lines[-1]))[:300] if lines else "no output"
