"""Chooses where to train on digits: world sizes and threads of this machine as a price list.

    python choose_local.py --deadline-s 600
    python choose_local.py --objective time

Takes under a minute on a laptop; needs scikit-learn for the data.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import mlcd_bo as mlcd

SCRIPT = Path(__file__).with_name("train_digits.py")


def show(trial: mlcd.Trial) -> None:
    """Prints what a trial found and cost."""
    seen = trial.observation
    found = f"{seen.speed:,.0f} samples/s" if seen.status == "ok" else seen.status
    print(f"{trial.deployment}: {found} ({seen.seconds:.0f} s, ${seen.dollars:.4f})")


def main() -> None:
    """Searches, then prints the trials and the recommendation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=float, default=4e6, help="samples of the whole job")
    parser.add_argument("--deadline-s", type=float, help="most seconds, finding out included")
    parser.add_argument("--objective", choices=("time", "cost"), default="cost")
    parser.add_argument("--probe-s", type=float, default=3.0)
    args = parser.parse_args()

    types = [
        mlcd.InstanceType("thin", price=3.00, vcpus=1),
        mlcd.InstanceType("wide", price=5.40, vcpus=2, max_count=1),
    ]
    space = mlcd.SearchSpace(mlcd.Catalog(types), counts=[1, 2])
    deadline = None if args.deadline_s is None else args.deadline_s / 3600
    search = mlcd.DeploymentOptimizer(
        space,
        mlcd.Scenario(args.objective, deadline=deadline),
        mlcd.Job(total_samples=args.samples),
    )
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "digits.npz"
        images, labels = load_digits(return_X_y=True)
        np.savez(data, images=images, labels=labels)
        best = search.run(
            mlcd.LocalTorchrun(SCRIPT, ["--data", str(data)], probe_s=args.probe_s),
            on_trial=show,
        )
    print(best)


if __name__ == "__main__":
    main()
