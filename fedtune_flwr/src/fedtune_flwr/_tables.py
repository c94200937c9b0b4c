"""Metrics of clients in CSV files, for tuning away from a federation."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ._errors import MetricsError
from ._files import write_atomic
from ._metrics import METRICS, NAMES, received


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The metrics in a CSV file, a mapping a row; empty cells are left out.

    Raises:
        MetricsError: the file cannot be read, has no metric column or no row, or a cell is no
            number.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            known = [name for name in reader.fieldnames or () if name in METRICS]
            raw = list(reader)
    except OSError as error:
        raise MetricsError(f"metrics file {path}: {error}") from error
    if not known:
        raise MetricsError(f"{path} has no column named {', '.join(NAMES)}")
    if not raw:
        raise MetricsError(f"{path} has no row; one row a client is expected")
    rows = []
    for number, line in enumerate(raw, start=2):
        row: dict[str, float] = {}
        for name in known:
            cell = (line[name] or "").strip()
            if not cell:
                continue
            try:
                row[name] = float(cell)
            except ValueError as error:
                raise MetricsError(
                    f"{path}, line {number}: {name}={cell!r} is no number"
                ) from error
        rows.append({k: v for k, v in received(row).values.items() if math.isfinite(v)})
    return rows


def write_metrics(path: str | Path, rows: Sequence[Mapping[str, float]]) -> None:
    """Writes metrics as CSV, a row a client, by a temporary name and a rename."""
    text = io.StringIO()
    writer = csv.DictWriter(text, NAMES, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows([{name: row[name] for name in NAMES if name in row} for row in rows])
    write_atomic(Path(path), text.getvalue())
