"""Tables of measured runs: which deployment took how long."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from ._catalog import Catalog, InstanceType
from ._catalog_files import csv_rows, once
from ._errors import CatalogError, TraceError
from ._space import Deployment, SearchSpace
from ._trial import Status

_NEEDED = ("instance_type", "count", "runtime_s", "price_per_hour")
_FAILURES: dict[str, Status] = {
    "failed": "oom",
    "oom": "oom",
    "quota": "quota",
    "preempted": "preempted",
    "error": "error",
    "timeout": "timeout",
}


@dataclass(frozen=True)
class Cell:
    """One measured run.

    Attributes:
        deployment: where it ran.
        speed: work per second; NaN if it failed.
        status: ``"ok"`` or why it failed.
    """

    deployment: Deployment
    speed: float
    status: Status


@dataclass(frozen=True)
class Trace:
    """The measured runs of one job.

    Attributes:
        job: its name in the table.
        cells: its runs by deployment.
        space: the deployments that were measured, failed ones included.
    """

    job: str
    cells: Mapping[Deployment, Cell]
    space: SearchSpace

    @property
    def fastest(self) -> float:
        """The highest speed of all cells, work per second."""
        return max((c.speed for c in self.cells.values() if c.status == "ok"), default=math.nan)


def read_traces(
    path: str | PathLike[str], catalog: Catalog | None = None, jobs: Iterable[str] | None = None
) -> dict[str, Trace]:
    """Returns the traces of a CSV file by job name, in the file's order.

    Columns: `instance_type`, `count`, `runtime_s` (seconds of the whole job), `price_per_hour`
    (dollars of one machine); optional `job`, `status` (empty or ``ok``; a failure by name) and
    `speed` (work per second; used instead of the runtime where it is given, also for a run that
    was cut off by a time limit).

    Args:
        path: the file.
        catalog: sizes of the instance types; prices come from the file.
        jobs: only these.

    Raises:
        TraceError: the file, a column or a cell is missing or unusable; the message names the
            line and the column.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise TraceError(f"trace {str(file)!r} cannot be read: {problem}") from problem
    columns, rows = csv_rows(f"trace {str(file)!r}", text, TraceError)
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise TraceError(
            f"trace {str(file)!r} has no column {', '.join(missing)}; "
            f"needed are {', '.join(_NEEDED)}, separated by commas"
        )
    once(f"trace {str(file)!r}", columns, TraceError)
    wanted = None if jobs is None else set(jobs)
    by_job: dict[str, list[tuple[int, dict[str, str]]]] = {}
    for line, row in rows:
        name = row.get("job") or file.stem
        if wanted is None or name in wanted:
            by_job.setdefault(name, []).append((line, row))
    absent = sorted((wanted or set()) - set(by_job))
    if absent or not by_job:
        raise TraceError(
            f"trace {str(file)!r} has no job {', '.join(absent) or 'at all'}; "
            "its names are in the column 'job' (`mlcd replay FILE --list-jobs` prints them)"
        )
    return {name: _trace(name, lines, file, catalog) for name, lines in by_job.items()}


def _trace(
    job: str, lines: list[tuple[int, dict[str, str]]], file: Path, catalog: Catalog | None
) -> Trace:
    kinds: dict[str, InstanceType] = {}
    counts: dict[str, list[int]] = {}
    found: dict[tuple[str, int], tuple[float, Status]] = {}
    for line, row in lines:
        where = f"trace {str(file)!r} line {line}"
        name = (row["instance_type"] or "").strip()
        count = _number(where, "count", row["count"])
        if count is None or not count.is_integer() or count < 1:
            raise TraceError(f"{where}: count must be a whole number of at least 1")
        price = _number(where, "price_per_hour", row["price_per_hour"])
        kind = _kind(where, name, price, catalog)
        if kinds.setdefault(name, kind) != kind:
            raise TraceError(f"{where}: {name!r} has two prices within one job; give it one")
        if (name, int(count)) in found:
            raise TraceError(f"{where}: {name} x{int(count)} is listed twice for job {job!r}")
        counts.setdefault(name, []).append(int(count))
        found[name, int(count)] = _outcome(where, row)
    space = SearchSpace(Catalog(kinds.values()), counts)
    cells = {
        d: Cell(d, *found[d.instance_type.name, d.count])
        for d in space
        if (d.instance_type.name, d.count) in found
    }
    return Trace(job, cells, space)


def _kind(where: str, name: str, price: float | None, catalog: Catalog | None) -> InstanceType:
    if price is None:
        raise TraceError(f"{where}: price_per_hour is empty; give dollars per hour of one machine")
    sizes = {}
    if catalog is not None and name in catalog:
        known = catalog[name]
        sizes = {f: getattr(known, f) for f in ("vcpus", "gpus", "mem_gib", "gpu_mem_gib")}
    try:
        return InstanceType(name, price, **sizes)
    except CatalogError as problem:
        raise TraceError(f"{where}: {problem}") from problem


def _outcome(where: str, row: dict[str, str]) -> tuple[float, Status]:
    status = (row.get("status") or "ok").strip().lower()
    if status != "ok" and status not in _FAILURES:
        raise TraceError(f"{where}: status {status!r} is unknown; use ok, {', '.join(_FAILURES)}")
    speed = _number(where, "speed", row.get("speed"))
    runtime = _number(where, "runtime_s", row["runtime_s"])
    ran = status == "ok" or (status == "timeout" and bool(speed))
    if ran and speed is not None:
        if not (math.isfinite(speed) and speed > 0):
            raise TraceError(f"{where}: speed must be finite and above 0, got {speed!r}")
        # Also of a run cut off by a time limit: its speed is as good as any.
        return speed, "ok"
    if status != "ok":
        return math.nan, _FAILURES[status]
    if runtime is None:
        raise TraceError(
            f"{where}: runtime_s and speed are both empty in a run that is 'ok'; give one of "
            "them, or the status of the failure"
        )
    if not (math.isfinite(runtime) and runtime > 0):
        raise TraceError(f"{where}: runtime_s must be finite and above 0, got {runtime!r}")
    return 1.0 / runtime, "ok"


def _number(where: str, column: str, text: str | None) -> float | None:
    # None: the line is shorter than the header.
    if text is None or not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise TraceError(f"{where}: {column} must be a number, got {text!r}") from None
