"""A tuning report as one self-contained HTML page."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ._files import write_atomic
from ._metrics import METRICS, NAMES, as_matrix
from ._plots import svg
from ._report import TuneReport

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto }
svg { max-width: 100%; height: auto }
"""


def page(report: TuneReport) -> str:
    """The page's HTML: decision, plots, what each client gets, and every trial."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><title>FedTune report</title>',
            f"<style>{_STYLE}</style></head><body>",
            "<h1>FedTune report</h1>",
            f"<pre>{html.escape(report.summary())}</pre>",
            svg(report),
            "<h2>Clients</h2>",
            _clients(report),
            "<h2>What the metrics reveal</h2>",
            _table(
                ["metric", "range", "step", "reveals"],
                ([n, f"{m.low:g} to {m.high:g}", f"{m.step:.3g}", m.reveals]
                 for n, m in METRICS.items()),
            ),
            "<h2>Trials</h2>",
            _trials(report),
            "</body></html>",
        ]
    )  # fmt: skip


def write_page(report: TuneReport, path: str | Path) -> None:
    """Writes the page, by a temporary name and a rename."""
    write_atomic(Path(path), page(report))


def _clients(report: TuneReport) -> str:
    policy = report.policy
    matrix = as_matrix(report.metrics)
    columns = policy.coordinates_many(matrix)
    factor = np.exp(policy.log_weight_many(matrix))
    rows = [
        [
            i,
            *(row.get(name, "") for name in NAMES),
            *(policy.space[n].value(float(c[i])) for n, c in columns.items()),
            float(factor[i]),
        ]
        for i, row in enumerate(report.metrics)
    ]
    return _table(["client", *NAMES, *columns, "weight factor"], rows)


def _trials(report: TuneReport) -> str:
    names = list(report.policy.space)
    rows = [
        [i, t.stage, *(t.values[n] for n in names), t.customizes, t.fidelity, t.score]
        for i, t in enumerate(report.trials)
    ]
    return _table(["trial", "stage", *names, "per client", "fidelity", "score"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["<table><tr>", *(f"<th>{html.escape(h)}</th>" for h in head), "</tr>"]
    for row in rows:
        cells = (f"{c:.4g}" if isinstance(c, float) else html.escape(str(c)) for c in row)
        lines.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    return "\n".join([*lines, "</table>"])
