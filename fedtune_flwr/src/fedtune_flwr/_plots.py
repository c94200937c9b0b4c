"""Plots of a tuning report; matplotlib is imported when they are made."""

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from ._errors import ConfigError
from ._metrics import as_matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ._report import TuneReport


def figure(report: "TuneReport") -> "Figure":
    """Four plots: clients by their metrics, what each gets, the gain, and the trials.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib; pip install 'fedtune-flwr[plot]'") from error
    made = Figure(figsize=(9, 6.4), layout="constrained")
    axes = made.subplots(2, 2)
    _metrics_map(axes[0, 0], report)
    _values(axes[0, 1], report)
    _gain(axes[1, 0], report)
    _trials(axes[1, 1], report)
    return made


def svg(report: "TuneReport") -> str:
    """The figure as an SVG element, the same for the same report."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedtune", "font.size": 9}):
        figure(report).savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _matrix(report: "TuneReport", name: str) -> np.ndarray:
    return np.asarray([row.get(name, np.nan) for row in report.metrics])


def _say(axes: "Axes", words: str) -> None:
    """What a panel says that has nothing to show."""
    axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes, color="#666666")
    axes.set(xticks=[], yticks=[])


def _metrics_map(axes: "Axes", report: "TuneReport") -> None:
    axes.set_title("Clients")
    shown = np.isfinite(_matrix(report, "reference-loss") + _matrix(report, "label-entropy"))
    if not shown.any():
        _say(axes, "no client reported both numbers")
        return
    weight = np.exp(report.policy.log_weight_many(as_matrix(report.metrics)))
    points = axes.scatter(
        _matrix(report, "reference-loss"),
        _matrix(report, "label-entropy"),
        c=weight / weight.sum(),
        cmap="viridis",
        edgecolors="black",
        linewidths=0.4,
    )
    axes.figure.colorbar(points, ax=axes, label="share, apart from size")
    axes.set(xlabel="reference loss (nats)", ylabel="label entropy")


def _values(axes: "Axes", report: "TuneReport") -> None:
    from matplotlib.ticker import MaxNLocator

    columns = report.policy.coordinates_many(as_matrix(report.metrics))
    order = np.argsort(_matrix(report, "reference-loss"), kind="stable")
    for name, column in columns.items():
        dimension = report.policy.space[name]
        low, high = dimension.bounds
        axes.plot((column[order] - low) / (high - low), marker=".", label=name)
    axes.set(
        xlabel="client, by reference loss",
        ylabel="place in its range",
        ylim=(-0.05, 1.05),
        title="What each client gets",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)


def _gain(axes: "Axes", report: "TuneReport") -> None:
    if report.gain is None:
        axes.set_title("Customization")
        _say(axes, "nothing to compare: one setting for all")
        return
    axes.axvline(0, color="#888888", linewidth=0.8)
    axes.set(xlabel="emulated gain over the best global setting (points)", yticks=[])
    gain = report.gain
    axes.errorbar([100 * gain.mean], [0], xerr=[196 * gain.standard_error], fmt="o", capsize=4)
    axes.set_title(
        f"Customization {'kept' if gain.kept else 'off'}: P(gain) = {gain.probability:.2f}"
    )


def _trials(axes: "Axes", report: "TuneReport") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title("Trials")
    if not report.trials:
        _say(axes, "no trial")
        return
    kinds: dict[str, Any] = {
        "global, short": ("#bbbbbb", lambda t: t.stage == "global" and t.fidelity < 1),
        "global": ("#444444", lambda t: t.stage == "global" and t.fidelity >= 1),
        "prior": ("#2ca02c", lambda t: t.stage == "prior"),
        "policy": ("#1f77b4", lambda t: t.stage == "policy"),
        "confirm": ("#d62728", lambda t: t.stage == "confirm"),
    }
    for label, (colour, wanted) in kinds.items():
        chosen = [(i, t.score) for i, t in enumerate(report.trials) if wanted(t)]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), ".", color=colour, label=label)
    axes.set(xlabel="trial", ylabel="score")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="lower right")
