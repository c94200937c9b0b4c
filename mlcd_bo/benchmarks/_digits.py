"""What the live benchmarks share: the example script, its data, an example price list."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import mlcd_bo as mlcd

SCRIPT = Path(__file__).parents[1] / "examples" / "train_digits.py"
# Threads that wait without spinning: ranks share the cores of one machine here.
ENV = {"OMP_WAIT_POLICY": "PASSIVE"}


def space() -> mlcd.SearchSpace:
    """Returns world sizes 1 and 2 of one thread a rank, and of two."""
    kinds = [
        mlcd.InstanceType("thin", price=3.00, vcpus=1),
        mlcd.InstanceType("wide", price=5.40, vcpus=2),
    ]
    return mlcd.SearchSpace(mlcd.Catalog(kinds), counts=[1, 2])


def save_digits(folder: Path) -> list[str]:
    """Writes the data; returns the script's arguments."""
    images, labels = load_digits(return_X_y=True)
    np.savez(folder / "digits.npz", images=images, labels=labels)
    return ["--data", str(folder / "digits.npz"), "--width", "16"]
