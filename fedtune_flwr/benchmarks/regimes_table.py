"""Tables and a plot of what `regimes.py` measured."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def rows(path: Path) -> list[Row]:
    """The rows of a results file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def by_cell(found: list[Row]) -> dict[str, dict[str, dict[int, Row]]]:
    """Rows by regime, arm and seed."""
    result: dict[str, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in found:
        result[row["regime"]][row["arm"]][row["seed"]] = row
    return result


def error(values: np.ndarray) -> float:
    """Standard error of a mean; NaN for one value."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def paired(
    own: dict[int, Row], other: dict[int, Row], key: str = "accuracy"
) -> tuple[float, float, int]:
    """Mean difference over the seeds that both have, its standard error, and their number."""
    seeds = sorted(set(own) & set(other))
    gap = np.asarray([own[s][key] - other[s][key] for s in seeds])
    return (float(gap.mean()), error(gap), len(gap)) if len(gap) else (np.nan, np.nan, 0)


def at_equal_steps(own: Row, other: Row) -> float:
    """Difference in accuracy where both have taken as many client steps as the shorter in all."""
    most = min(sum(own["work"]), sum(other["work"]))

    def reached(row: Row) -> float:
        last = int(np.searchsorted(np.cumsum(row["work"]), most, side="right"))
        return float(np.mean(row["curve"][max(0, last - 4) : max(1, last)]))

    return reached(own) - reached(other)


def table(found: list[Row]) -> str:
    """For each regime a line an arm: accuracy, worst tenth, FedTune's paired difference, work."""
    lines = []
    for regime, arms in by_cell(found).items():
        own = arms.get("fedtune", {})
        lines.append(f"\n{regime}")
        lines.append(
            f"  {'arm':28} {'seeds':>5} {'accuracy':>16} {'worst tenth':>16} "
            f"{'fedtune minus it':>18} {'at equal steps':>16} {'steps':>6}"
        )
        for name, seeds in arms.items():
            figures = {
                key: np.asarray([row[key] for row in seeds.values()])
                for key in ("accuracy", "worst", "steps")
            }
            text = f"  {name:28} {len(seeds):5}"
            for key in ("accuracy", "worst"):
                text += f" {figures[key].mean():8.2f} +- {error(figures[key]):4.2f}"
            shared = sorted(set(own) & set(seeds))
            if name != "fedtune" and shared:
                gap, deviation, _ = paired(own, seeds)
                text += f"   {gap:+6.2f} +- {deviation:5.2f}"
                equal = np.asarray([at_equal_steps(own[s], seeds[s]) for s in shared])
                text += f"   {equal.mean():+6.2f} +- {error(equal):4.2f}"
            else:
                kept = sum(row.get("kept", False) for row in seeds.values())
                text += f"   {f'customized in {kept}':34}"
            base = own or seeds
            ratio = np.mean([seeds[s]["steps"] / base[s]["steps"] for s in set(seeds) & set(base)])
            lines.append(f"{text} {ratio:6.2f}")
    return "\n".join(lines)


LABELS = {
    "clean": "clean",
    "dirichlet-0.1": "Dirichlet 0.1",
    "dirichlet-0.05": "Dirichlet 0.05",
    "two-class": "two classes each",
    "size": "sizes apart",
    "mixture-20-single": "20 % well mixed, the rest one class each",
    "mixture-10-single": "10 % well mixed, the rest one class each",
    "mixture-20-two": "20 % well mixed, the rest two classes each",
    "noise": "half the clients 30 to 90 % random labels",
    "flip": "half the clients 30 to 90 % labels off by one",
    "gain": "input gain, Dirichlet 0.3",
    "mixed": "noise, input gain, Dirichlet 0.3",
    "natural": "natural roles",
}
RIVALS = {
    "global, proxy random": "one setting, proxy",
    "best of 12": "best of 12",
    "best global tried": "best setting for all",
    "best, equal weights": "equal weights",
    "best, fedprox": "FedProx",
    "best, fednova": "FedNova",
    "best, loss weights": "loss weights",
    "best, entropy weights": "entropy weights",
    "best, feddisco-like": "FedDisco",
    "best, adjustment 0.8": "logit adjustment",
    "delta-sgd": "Delta-SGD",
    "fedex-like": "FedEx-like",
    "fedtune, random tuner": "FedTune, random tuner",
}


def in_order(found: list[Row]) -> dict[str, dict[str, dict[int, Row]]]:
    """`by_cell` in the order of `LABELS`."""
    cells = by_cell(found)
    return {name: cells[name] for name in LABELS if name in cells}


def _signed(gap: tuple[float, float, int]) -> str:
    if not gap[2]:
        return ""
    return f"{gap[0]:+.1f}" if gap[2] == 1 else f"{gap[0]:+.1f} ± {gap[1]:.1f}"


def markdown(found: list[Row]) -> str:
    """Two tables: accuracies with the worst tenth, and FedTune minus each rival."""
    lines = [
        "| regime | seeds | one setting, proxy | FedTune | customized | worst tenth: one setting | "
        "worst tenth: FedTune |",
        "|---|---|---|---|---|---|---|",
    ]
    cells = in_order(found)
    for regime, arms in cells.items():
        own, rival = arms.get("fedtune", {}), arms.get("global, proxy random", {})
        seeds = sorted(set(own) & set(rival))
        if not seeds:
            continue
        parts = [LABELS[regime], str(len(seeds))]
        figures = []
        for key in ("accuracy", "worst"):
            for rows_ in (rival, own):
                values = np.asarray([rows_[s][key] for s in seeds])
                spread = f" ± {error(values):.1f}" if len(values) > 1 else ""
                figures.append(f"{values.mean():.1f}{spread}")
        kept = f"{sum(own[s]['kept'] for s in seeds)} of {len(seeds)}"
        lines.append("| " + " | ".join([*parts, *figures[:2], kept, *figures[2:]]) + " |")
    lines += [
        "",
        "| regime | " + " | ".join(RIVALS.values()) + " |",
        "|---" * (len(RIVALS) + 1) + "|",
    ]
    for regime, arms in cells.items():
        if "fedtune" in arms:
            gaps = [_signed(paired(arms["fedtune"], arms.get(name, {}))) for name in RIVALS]
            lines.append(f"| {LABELS[regime]} | " + " | ".join(gaps) + " |")
    tuned = [row for row in found if row["arm"] == "fedtune"]
    seconds = [row["seconds"] for row in tuned]
    lines += [
        "",
        f"FedTune's tuning on the server: {np.median(seconds):.0f} s "
        f"({min(seconds):.0f} to {max(seconds):.0f}), "
        f"{np.mean([row['evaluations'] for row in tuned]):.0f} evaluations.",
    ]
    tuner = [
        paired(arms["fedtune"], arms["fedtune, random tuner"])[0]
        for arms in cells.values()
        if set(arms.get("fedtune", {})) & set(arms.get("fedtune, random tuner", {}))
    ]
    lines.append(
        f"The Bayesian tuner less the random one, over {len(tuner)} regime(s): "
        f"{np.mean(tuner):+.1f} ± {error(np.asarray(tuner)):.1f} points, ahead in "
        f"{sum(gap > 0 for gap in tuner)}."
    )
    return "\n".join(lines)


def plot(found: list[Row], path: Path) -> None:
    """FedTune's difference to four rivals in every regime, with standard errors."""
    from matplotlib.figure import Figure

    cells = in_order(found)
    compared = {
        "global, proxy random": ("one setting, tuned on the proxy", "#1f77b4"),
        "best global tried": ("best setting for all, chosen on the test set", "#444444"),
        "best, loss weights": ("loss weights, chosen on the test set", "#d62728"),
        "best, adjustment 0.8": ("logit adjustment, chosen on the test set", "#2ca02c"),
    }
    figure = Figure(figsize=(8, 0.42 * len(cells) + 1.6), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="#999999", linewidth=0.8)
    for j, (arm, (label, colour)) in enumerate(compared.items()):
        gaps = [paired(arms.get("fedtune", {}), arms.get(arm, {})) for arms in cells.values()]
        axes.errorbar(
            [g[0] for g in gaps],
            [i + 0.16 * (j - 1.5) for i in range(len(gaps))],
            xerr=[g[1] for g in gaps],
            fmt="o",
            markersize=4,
            color=colour,
            label=label,
            linewidth=1,
        )
    names = [f"{name} ({len(arms.get('fedtune', {}))})" for name, arms in cells.items()]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="FedTune minus rival, points of test accuracy (mean, standard error)")
    axes.set_ylabel("regime (seeds)")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
