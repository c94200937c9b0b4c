"""A report of a search: one self-contained HTML page, and its pictures as PNG."""

import base64
import html
import io
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import _plots
from ._errors import NoFeasibleDeployment, NothingObserved, StoreError
from ._recommendation import Estimate, Recommendation, counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ._optimizer import DeploymentOptimizer

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.pick { font-size: 1.3rem; } img { max-width: 100%; } .miss { color: #a00; }
"""


def write_report(search: "DeploymentOptimizer", folder: str | os.PathLike[str]) -> Path:
    """Writes ``report.html``, ``curves.png`` and ``ledger.png``; returns the page's path.

    Raises:
        NothingObserved: no trial has given a speed, so there is nothing to draw.
        MissingExtra: matplotlib is not installed.
        StoreError: the folder cannot be written.
    """
    best, failure = _answer(search)
    row = search.space.position(best.deployment)
    pictures = {
        "curves.png": _png(_plots.curves(search, row)),
        "ledger.png": _png(_plots.ledger(search, best.hours, best.dollars)),
    }
    page = _page(search, best, failure, pictures)
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in {**pictures, "report.html": page.encode()}.items():
            part = target / f"{name}.part"
            part.write_bytes(content)
            os.replace(part, target / name)
    except OSError as problem:
        raise StoreError(f"report folder {str(target)!r} cannot be written: {problem}") from problem
    return target / "report.html"


def ready_to_write(folder: str | os.PathLike[str]) -> None:
    """Makes the folder and looks for what pictures need, before any trial is paid for.

    Raises:
        MissingExtra: matplotlib is not installed.
        StoreError: the folder cannot be written.
    """
    _plots.empty_figure(1.0, 1.0)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise StoreError(
            f"report folder {str(folder)!r} cannot be written: {problem}; name another"
        ) from problem


def _answer(search: "DeploymentOptimizer") -> tuple[Recommendation, str]:
    try:
        # So that a search which was resumed or told by hand knows why it would stop.
        search.ask()
        return search.recommend(), ""
    except NoFeasibleDeployment as problem:
        if problem.nearest is None:
            raise NothingObserved(str(problem)) from problem
        return problem.nearest, str(problem)


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _page(
    search: "DeploymentOptimizer",
    best: Recommendation,
    failure: str,
    pictures: dict[str, bytes],
) -> str:
    images = {name: base64.b64encode(png).decode() for name, png in pictures.items()}
    low, high = best.hours_interval
    head = f"<p class=miss>{html.escape(failure)}</p>" if failure else ""
    limits = (
        f"<p>Chance that the limit is kept: {best.within_limit:.0%}.</p>"
        if np.isfinite([search.ledger.budget, search.ledger.deadline]).any()
        else ""
    )
    dated = search.space.catalog.dated
    prices = f" Prices: {html.escape(dated)}." if dated else ""
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>mlcd report</title><style>{_STYLE}</style>
<h1>Where to run: {html.escape(search.scenario.describe())}</h1>
{head}<p class=pick><b>{html.escape(str(best.deployment))}</b></p>
<p>{html.escape(best.reason)}</p>
<p>Final run {best.hours:.3g} h (95 %: {low:.3g} to {high:.3g}), ${best.dollars:.4g}
(95 %: {best.dollars_interval[0]:.4g} to {best.dollars_interval[1]:.4g}).
Finding it took {counted(best.trials)}, {best.spent_hours:.3g} h and ${best.spent_dollars:.4g}.
In all {best.total_hours:.3g} h and ${best.total_dollars:.4g}.{prices}</p>{limits}
<img alt="speed and cost curves" src="data:image/png;base64,{images["curves.png"]}">
<p>Lines are beliefs, points are trials (numbered in their order). Bands are 95 %, drawn for types
that were tried.</p>
<h2>Ledger</h2>
<img alt="what was spent" src="data:image/png;base64,{images["ledger.png"]}">
<h2>Trials</h2>
{_trials(search)}
<h2>Nearest alternatives</h2>
{_alternatives((best, *best.alternatives))}
</html>
"""


def _trials(search: "DeploymentOptimizer") -> str:
    rows = []
    for number, trial in enumerate(search.trials, start=1):
        seen = trial.observation
        half = 1.96 * seen.speed_sem
        speed = f"{seen.speed:,.4g} ± {half:.2g}" if seen.status == "ok" else seen.status
        rows.append(
            f"<tr><td class=n>{number}<td>{html.escape(str(trial.deployment))}"
            f"<td class=n>{speed}<td class=n>{seen.seconds:,.0f} s<td class=n>${seen.dollars:.4g}"
            f"<td class=n>${trial.price_per_hour:.4g}"
        )
    return (
        "<table><tr><th class=n>#<th>deployment"
        f"<th class=n>{search.job.unit} per second<th class=n>took<th class=n>cost"
        f"<th class=n>price per hour{''.join(rows)}</table>"
    )


def _alternatives(estimates: tuple[Estimate, ...]) -> str:
    rows = [
        f"<tr><td>{html.escape(str(e.deployment))}<td class=n>{e.hours:.3g} h"
        f"<td class=n>{e.hours_interval[0]:.3g} to {e.hours_interval[1]:.3g} h"
        f"<td class=n>${e.dollars:.4g}<td class=n>{e.within_limit:.0%}"
        f"<td>{'measured' if e.measured else 'predicted'}"
        for e in estimates
    ]
    return (
        "<table><tr><th>deployment<th class=n>final run<th class=n>95 %<th class=n>cost"
        f"<th class=n>keeps the limit<th>{''.join(rows)}</table>"
    )
