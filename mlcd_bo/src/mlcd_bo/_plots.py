"""The pictures of a search: speed and cost curves, and the ledger against the limit."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ._errors import MissingExtra
from ._explain import Z95
from ._situation import Situation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ._optimizer import DeploymentOptimizer

# Curves beyond this many types cannot be told apart.
_MOST_TYPES = 8
_MOST_LETTERS = 40


def empty_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of so many inches.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise MissingExtra(
            "pictures need matplotlib; install mlcd-bo with its extra: pip install 'mlcd-bo[plot]'"
        ) from problem
    return Figure(figsize=(width, height), layout="constrained")


def curves(search: "DeploymentOptimizer", picked: int | None) -> "Figure":
    """Returns speed and cost against the number of machines, by type, with 95 % bands.

    Args:
        search: with at least one measured trial.
        picked: row of the recommended deployment, marked by a star.
    """
    s = search.situation()
    figure = empty_figure(10, 4)
    left, right = figure.subplots(1, 2)
    work = search.work_left or search.job.work
    for colour, (name, rows) in enumerate(_shown(search, s).items()):
        count = s.count[rows]
        for axes, scale, sign in ((left, work / 3600, -1.0), (right, None, 1.0)):
            rate = np.ones(len(rows)) if scale is not None else s.rate[rows]
            factor = scale if scale is not None else 1.0
            middle = factor * rate * np.exp(sign * s.mean[rows])
            spread = np.exp(Z95 * s.sd[rows])
            axes.plot(count, middle, color=f"C{colour}", lw=1.5, label=_legible(name))
            # Bands of types never tried are wide and would hide the others.
            if len(rows) > 1 and s.observed[rows].any():
                axes.fill_between(
                    count, middle / spread, middle * spread, color=f"C{colour}", alpha=0.15, lw=0
                )
            measured = s.observed[rows]
            if measured.any():
                seen = factor * rate[measured] * s.measured[rows][measured] ** sign
                axes.plot(count[measured], seen, "o", color=f"C{colour}", ms=6)
    for number, row in enumerate(dict.fromkeys(s.tried.tolist()), start=1):
        if s.observed[row]:
            place = (s.count[row], s.measured[row] * s.rate[row])
            right.annotate(str(number), place, (5, 5), textcoords="offset points", fontsize=8)
    if picked is not None:
        hours = s.measured[picked] if s.observed[picked] else np.exp(s.mean[picked])
        for axes, value in ((left, work / hours / 3600), (right, hours * s.rate[picked])):
            axes.plot(s.count[picked], value, "*", color="black", ms=16, mfc="none", label="pick")
    for axes, label in ((left, f"speed, {search.job.unit} per second"), (right, "final run, $")):
        axes.set(xscale="log", yscale="log", xlabel="machines", ylabel=label)
        ticks = sorted(set(s.count.tolist()))
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off() if len(ticks) > 1 else None
        _label_values(axes)
    left.plot([], [], "o", color="gray", ms=6, label="trial")
    left.fill_between([], [], [], color="gray", alpha=0.3, lw=0, label="95 % band of the belief")
    left.legend(frameon=False, fontsize=8)
    return figure


def _legible(name: str) -> str:
    """Returns a name as a legend can show it: short, and no dollar taken for mathematics."""
    short = name if len(name) <= _MOST_LETTERS else name[: _MOST_LETTERS - 1] + "…"
    return short.replace("$", r"\$")


def _label_values(axes: "Axes") -> None:
    """Labels a logarithmic y axis with plain numbers, often enough to read values off."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    # Over many decades each of them is label enough.
    subs: tuple[float, ...] = (1.0, 2.0, 5.0) if decades < 4 else (1.0,)
    if decades < 1:
        subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))


def ledger(search: "DeploymentOptimizer", hours: float, dollars: float) -> "Figure":
    """Returns what each trial and the final run add to the bill, against the limits.

    Args:
        search: the search.
        hours: of the final run.
        dollars: of the final run.
    """
    figure = empty_figure(10, 1.8)
    axes = figure.subplots(1, 2)
    trials = [t.observation for t in search.trials]
    spent = search.ledger
    panels: list[tuple[Any, list[float], float, float, float, str]] = [
        (axes[0], [t.seconds / 3600 for t in trials], spent.hours, hours, spent.deadline, "hours"),
        (axes[1], [t.dollars for t in trials], spent.dollars, dollars, spent.budget, "dollars"),
    ]
    for ax, parts, total, final, limit, label in panels:
        start = 0.0
        # Trials that ran side by side overlap in time: shown to scale within what they took.
        shrink = total / sum(parts) if sum(parts) > 0 else 1.0
        for number, part in enumerate(parts):
            ax.barh(0, part * shrink, left=start, color=f"C{number % 10}", edgecolor="white")
            start += part * shrink
        ax.barh(0, final, left=total, color="lightgray", edgecolor="white")
        ax.text(total + final / 2, 0, "final run", ha="center", va="center", fontsize=8)
        if np.isfinite(limit):
            ax.axvline(limit, color="black", ls="--")
            ax.text(limit, 0.45, " limit", fontsize=8, va="bottom", ha="right")
        ax.set(yticks=[], xlabel=f"{label}: trials (coloured) and final run", xlim=(0, None))
    return figure


def _shown(search: "DeploymentOptimizer", s: Situation) -> dict[str, np.ndarray[Any, Any]]:
    """Returns rows by curve name, tried types first."""
    groups: dict[str, list[int]] = {}
    for row, deployment in enumerate(search.space):
        settings = [f"{name}={value}" for name, value in deployment.knobs]
        purchase = ["spot"] if deployment.spot else []
        name = " ".join([deployment.instance_type.name, *purchase, *settings])
        groups.setdefault(name, []).append(row)
    tried = set(s.tried.tolist())
    order = sorted(
        groups, key=lambda name: (not tried & set(groups[name]), s.mean[groups[name]].min())
    )
    chosen = {name: np.array(groups[name]) for name in order[:_MOST_TYPES]}
    return {name: rows[np.argsort(s.count[rows])] for name, rows in chosen.items()}
