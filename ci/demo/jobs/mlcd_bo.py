"""Where to run a real DDP training job on this machine, and what finding it out costs.

The catalogue is two kinds of "machine", one thread or two a rank, with a price list; one machine
is one rank of torchrun. The job must be cheap and done by a deadline. Without the plugin one
profiles every candidate, or guesses the biggest.
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ci.demo.job import Measure, Progress, Result, main

if TYPE_CHECKING:
    from matplotlib.figure import Figure


EXAMPLE = Path(__file__).parents[3] / "mlcd_bo" / "examples" / "train_digits.py"
SAMPLES = 4e6
DEADLINE_S = 600.0


def run(progress: Progress) -> Result:
    """Returns the bill of three ways to choose, from trials measured in this run."""
    import numpy as np
    from sklearn.datasets import load_digits

    import mlcd_bo as mlcd

    space = mlcd.SearchSpace(
        mlcd.Catalog(
            [
                mlcd.InstanceType("thin", price=3.00, vcpus=1),
                mlcd.InstanceType("wide", price=5.40, vcpus=2, max_count=1),
            ]
        ),
        counts=[1, 2],
    )
    job = mlcd.Job(total_samples=SAMPLES)
    scenario = mlcd.Scenario.cheapest_by(deadline=DEADLINE_S / 3600)
    search = mlcd.DeploymentOptimizer(space, scenario, job)
    trials: dict[mlcd.Deployment, mlcd.Trial] = {}

    def tell(trial: "mlcd.Trial") -> None:
        trials[trial.deployment] = trial
        seen = trial.observation
        progress(f"{trial.deployment}: {seen.speed:,.0f} samples/s, {seen.seconds:.1f} s of trial")

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "digits.npz"
        images, labels = load_digits(return_X_y=True)
        np.savez(data, images=images, labels=labels)
        profiler = mlcd.LocalTorchrun(
            EXAMPLE,
            ["--data", str(data), "--width", "16"],
            probe_s=1.5,
            startup_s=60.0,
            # Threads that wait without spinning: two ranks share few cores here.
            env={"OMP_WAIT_POLICY": "PASSIVE"},
        )
        best = search.run(profiler, on_trial=tell)
        progress(f"picks {best.deployment} after {best.trials} of {len(space)} trials")
        ours = list(trials)
        for deployment in space:
            if deployment not in trials:
                limits = mlcd.Limits(seconds=profiler.trial_seconds(deployment))
                tell(mlcd.Trial(deployment, profiler.profile(deployment, limits)))

    def final(deployment: "mlcd.Deployment") -> float:
        hours = SAMPLES / trials[deployment].observation.speed / 3600
        return hours * deployment.price_per_hour

    measured = [d for d in space if trials[d].observation.status == "ok"]
    biggest = max(measured, key=lambda d: d.price_per_hour)
    cheapest = min(measured, key=final)
    every = sum(trial.observation.dollars for trial in trials.values())
    every_s = sum(trial.observation.seconds for trial in trials.values())
    bills = {
        "guess the biggest": (0.0, final(biggest)),
        "profile every one": (every, final(cheapest)),
        "mlcd_bo": (best.spent_dollars, final(best.deployment)),
    }
    total = {name: sum(parts) for name, parts in bills.items()}
    return Result(
        data=f"digits, DDP on gloo, {len(space)} deployments",
        without=(
            f"all {len(space)} tried ${total['profile every one']:.3f}, "
            f"biggest guessed ${total['guess the biggest']:.3f}"
        ),
        with_plugin=(
            f"${total['mlcd_bo']:.3f} in all: {len(ours)} trial{'s' * (len(ours) > 1)} "
            f"({best.spent_hours * 3600:.0f} s), {best.deployment}"
        ),
        measures=[
            Measure("exploration", every, best.spent_dollars, "$"),
            Measure("exploration time", every_s, best.spent_hours * 3600, "s"),
            Measure("trials", len(trials), len(ours)),
            Measure("final run", final(cheapest), final(best.deployment), "$"),
            Measure("total bill", total["profile every one"], total["mlcd_bo"], "$"),
            Measure("total bill of the biggest", total["guess the biggest"], total["mlcd_bo"], "$"),
        ],
        caption=(
            "Left: what the whole job would cost on each deployment; the band is the 95 % belief "
            "when the search stopped, filled points are its trials, hollow ones were measured "
            "afterwards to check it. Right: exploration plus the final run, projected from the "
            "measured speed; prices are an example list."
        ),
        figure=_figure(search, best, trials, ours, final, bills),
    )


def _figure(search, best, trials, ours, final, bills) -> "Figure":  # type: ignore[no-untyped-def]
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    curve, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    beliefs = {e.deployment: e for e in (best, *best.alternatives)}
    for name, colour in (("thin", "tab:blue"), ("wide", "tab:orange")):
        rows = [d for d in search.space if d.instance_type.name == name]
        shift = 0.0 if name == "thin" else 0.06
        x = np.array([d.count for d in rows]) + shift
        low = [beliefs[d].dollars_interval[0] for d in rows]
        high = [beliefs[d].dollars_interval[1] for d in rows]
        if len(rows) > 1:
            curve.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
        curve.vlines(x, low, high, color=colour, alpha=0.5)
        curve.plot([], [], "o", color=colour, label=name)
        for place, d in zip(x, rows, strict=True):
            if trials[d].observation.status == "ok":
                face = colour if d in ours else "white"
                curve.plot(place, final(d), "o", color=colour, mfc=face, ms=7)
                if d == best.deployment:
                    curve.plot(place, final(d), "*", color="black", ms=15, mfc="none", label="pick")
    curve.set(xticks=[1, 2], xlabel="machines (ranks)", ylabel="cost of the whole job, $")
    curve.set_ylim(bottom=0)
    curve.legend(frameon=False, fontsize=8)
    names = list(bills)
    spent = [bills[name][0] for name in names]
    bars.barh(names, spent, color="tab:red", label="exploration")
    bars.barh(names, [bills[n][1] for n in names], left=spent, color="tab:gray", label="final run")
    bars.set(xlabel="total bill, $")
    bars.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    bars.invert_yaxis()
    return figure


if __name__ == "__main__":
    main(run)
