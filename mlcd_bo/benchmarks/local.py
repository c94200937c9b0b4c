"""The live run: a real DDP script on this machine, the search against profiling everything.

    python3 -m ci bench mlcd_bo/local

World sizes 1 and 2 and one or two threads a rank are the catalogue, with an example price list.
Every deployment is profiled for long (the truth), then each scenario is searched with short
probes. Regret: final run of the recommendation over that of the best deployment, by the truth.
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

from _digits import ENV, SCRIPT, save_digits, space

import mlcd_bo as mlcd


def main() -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=float, default=2e7)
    parser.add_argument("--truth-s", type=float, default=12.0)
    parser.add_argument("--probe-s", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    job = mlcd.Job(total_samples=args.samples)
    with tempfile.TemporaryDirectory() as folder:
        arguments = save_digits(Path(folder))
        long = mlcd.LocalTorchrun(
            SCRIPT, arguments, probe_s=args.truth_s, least_s=args.truth_s, env=ENV
        )
        truth = {d: long.profile(d, mlcd.Limits(half_width=1e-9)) for d in space()}
        hours = {d: job.work / o.speed / 3600 for d, o in truth.items()}
        bill = {d: h * d.price_per_hour for d, h in hours.items()}
        print(
            f"{args.samples:g} samples; {platform.machine()}, {os.cpu_count()} cores, load "
            f"{os.getloadavg()[0]:.1f}\n"
        )
        print("| deployment | samples/s | final run | cost |\n|---|---|---|---|")
        for d, o in truth.items():
            print(f"| {d} | {o.speed:,.0f} | {hours[d] * 3600:.0f} s | ${bill[d]:.3f} |")
        deadline = 3.0 * min(hours.values())
        scenarios = {
            "fastest": (mlcd.Scenario.fastest(), hours),
            "cheapest by 3 x the fastest": (mlcd.Scenario.cheapest_by(deadline), bill),
        }
        print(
            "\n| scenario | recommended | best | regret | trials | exploration | of the final run |"
        )
        print("|---" * 7 + "|")
        rows = []
        for name, (scenario, value) in scenarios.items():
            best = min((d for d in value if hours[d] <= deadline), key=value.__getitem__)
            for seed in range(args.seeds):
                short = mlcd.LocalTorchrun(SCRIPT, arguments, probe_s=args.probe_s, env=ENV)
                search = mlcd.DeploymentOptimizer(space(), scenario, job, seed=seed)
                pick = search.run(short)
                regret = value[pick.deployment] / value[best] - 1
                part = pick.spent_dollars / bill[pick.deployment]
                rows.append((name, str(pick.deployment), str(best), regret, pick.trials, part))
                print(
                    f"| {name} | {pick.deployment} | {best} | {regret:.0%} | {pick.trials} | "
                    f"{pick.spent_hours * 3600:.0f} s, ${pick.spent_dollars:.3f} | {part:.0%} |",
                    flush=True,
                )
    if args.out:
        args.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
