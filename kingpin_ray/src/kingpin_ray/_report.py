"""A page about a run: how the scores are spread, which groups are worst, where the time went."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kingpin_ray._errors import MissingDependencyError, ParameterError
from kingpin_ray._result_table import bad_groups, final_rows
from kingpin_ray._store import write_atomically

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

_PLAN_COLOURS = {"local": "#4c72b0", "task": "#55a868", "data": "#c44e52", "grouped": "#8172b2"}
_BAD_SHOWN = 50


def write_report(
    results: pa.Table, scoring: str, path: str | os.PathLike[str], worst: int = 15
) -> dict[str, float]:
    """Writes a page (.html) or a picture (.png) about results and returns their summary.

    Args:
        results: `results_` of an estimator.
        scoring: name of the scores.
        path: file to write; its ending says which form.
        worst: groups to name.

    Raises:
        ParameterError: the ending is neither, or `worst` is no number of at least 1.
        MissingDependencyError: matplotlib is not installed.
        StoreError: the file cannot be written.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".png"):
        raise ParameterError(f"report: {str(path)!r} ends neither in .html nor in .png")
    if isinstance(worst, bool) or not isinstance(worst, int) or worst < 1:
        raise ParameterError(f"report: worst={worst!r}: give a whole number of at least 1")
    final = final_rows(results)
    about = summary(final)
    picture = _picture(results, final, scoring, worst)
    if target.suffix.lower() == ".png":
        write_atomically(target, picture)
    else:
        write_atomically(target, _page(results, final, about, scoring, worst, picture).encode())
    return about


def summary(final: pa.Table) -> dict[str, float]:
    """Returns counts, and the mean score with every row, and with every group, counting alike."""
    score = _scores(final)
    known = ~np.isnan(score)
    rows = final.column("n_rows").to_numpy().astype(float)
    return {
        "groups": float(final.num_rows),
        "bad_groups": float(bad_groups(final)[0].num_rows),
        "rows": float(rows.sum()),
        "rows_dropped": float(pc.sum(final.column("n_dropped")).as_py() or 0),
        "mean_score_by_rows": _mean(score[known], rows[known]),
        "mean_score_by_groups": _mean(score[known], np.ones(int(known.sum()))),
    }


def _mean(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    return float(np.average(values, weights=weights)) if weights.sum() > 0 else float("nan")


def _scores(final: pa.Table) -> NDArray[np.float64]:
    return np.asarray(
        pc.fill_null(final.column("score"), float("nan")).to_numpy(zero_copy_only=False)
    )


def _key_names(final: pa.Table) -> list[str]:
    return list(final.column_names[: final.schema.get_field_index("config")])


def _keys(table: pa.Table) -> list[str]:
    columns = [table.column(name).to_pylist() for name in _key_names(table)]
    return [", ".join(map(str, key)) for key in zip(*columns, strict=True)]


def _worst(final: pa.Table, count: int) -> pa.Table:
    known = final.filter(pc.is_valid(final.column("score")))
    return known.sort_by([("score", "ascending")]).slice(0, count)


def _by_plan(results: pa.Table) -> list[tuple[str, float, int]]:
    """Returns (plan, seconds, groups) of each plan that was used."""
    used = results.group_by("plan").aggregate([("seconds", "sum")]).sort_by("plan").to_pylist()
    plans = final_rows(results).column("plan").to_pylist()
    return [(row["plan"], row["seconds_sum"], plans.count(row["plan"])) for row in used]


def _picture(results: pa.Table, final: pa.Table, scoring: str, worst: int) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "a report needs matplotlib: pip install 'kingpin-ray[plot]'"
        ) from error
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    spread, low, time = figure.subplots(1, 3, width_ratios=[1.2, 1.2, 0.9])
    score = _scores(final)
    score = score[np.isfinite(score)]
    if len(score):
        # A few wild groups must not press all others into one bar.
        edge = np.quantile(score, [0.005, 0.995])
        spread.hist(np.clip(score, *edge), bins=min(40, max(5, len(score) // 3)), color="#4c72b0")
        middle = float(np.median(score))
        spread.axvline(middle, color="#c44e52", label=f"median {middle:.3g}")
        spread.legend()
    spread.set(xlabel=scoring, ylabel="groups", title="scores of all groups")
    table = _worst(final, worst)
    names = [name if len(name) < 24 else name[:23] + "…" for name in _keys(table)]
    low.barh(np.arange(len(names)), table.column("score").to_numpy(), color="#dd8452")
    low.set_yticks(np.arange(len(names)), names, fontsize=8)
    low.invert_yaxis()
    low.set(xlabel=scoring, title=f"the {len(names)} worst groups")
    plans = _by_plan(results)
    bars = time.bar(
        [plan for plan, _, _ in plans],
        [seconds for _, seconds, _ in plans],
        color=[_PLAN_COLOURS.get(plan, "#937860") for plan, _, _ in plans],
    )
    time.bar_label(bars, [f"{groups:,} groups" for _, _, groups in plans], fontsize=8)
    time.margins(y=0.15)
    time.set(ylabel="seconds in training", title="time by plan")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _page(
    results: pa.Table,
    final: pa.Table,
    about: dict[str, float],
    scoring: str,
    worst: int,
    picture: bytes,
) -> str:
    bad, _ = bad_groups(results)
    lines = [[name.replace("_", " "), f"{value:,.6g}"] for name, value in about.items()]
    shown = [*_key_names(final), "n_rows", "score", "params", "status"]
    low = [[str(v) for v in row.values()] for row in _worst(final, worst).select(shown).to_pylist()]
    errors = [[str(v) for v in row.values()] for row in bad.slice(0, _BAD_SHOWN).to_pylist()]
    plans = [[plan, f"{seconds:.3f}", str(groups)] for plan, seconds, groups in _by_plan(results)]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>kingpin report</title>",
        "<style>body{font:15px sans-serif;margin:2em;max-width:75em}table{border-collapse:"
        "collapse}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}"
        "img{max-width:100%}</style>",
        "<h1>Models of all groups</h1>",
        _table(["what", "value"], lines),
        f"<p><img alt='scores, worst groups, time by plan' src='data:image/png;base64,"
        f"{base64.b64encode(picture).decode()}'></p>",
        f"<h2>Worst groups by {html.escape(scoring)}</h2>",
        _table(shown, low),
        f"<h2>Bad groups ({bad.num_rows}"
        + (f", {_BAD_SHOWN} shown)" if bad.num_rows > _BAD_SHOWN else ")")
        + "</h2>",
        _table(bad.column_names, errors) if errors else "<p>None.</p>",
        "<h2>Time by plan</h2>",
        _table(["plan", "seconds", "groups"], plans),
    ]
    return "\n".join(parts) + "</html>\n"


def _table(head: list[str], rows: list[list[Any]]) -> str:
    def line(cells: list[Any], tag: str) -> str:
        inside = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
        return f"<tr>{inside}</tr>"

    body = "\n".join([line(head, "th"), *(line(row, "td") for row in rows)])
    return f"<table>{body}</table>"
