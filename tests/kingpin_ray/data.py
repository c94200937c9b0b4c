"""Seeded tables for the tests."""

import numpy as np
import pandas as pd


def grouped_frame(
    n_groups: int = 30, rows: tuple[int, int] = (20, 120), features: int = 4, seed: int = 0
) -> pd.DataFrame:
    """A table with a string key, features on very different scales, a value and two labels."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(*rows, n_groups)
    group = np.repeat(np.arange(n_groups), counts)
    scale = 10.0 ** rng.integers(-2, 4, features)
    x = rng.normal(size=(len(group), features))
    weights = rng.normal(size=(n_groups, features))
    signal = (x * weights[group]).sum(1)
    noise = rng.normal(size=len(group))
    frame = pd.DataFrame({f"x{j}": x[:, j] * scale[j] + scale[j] for j in range(features)})
    frame.insert(0, "key", [f"g{g:03d}" for g in group])
    frame["value"] = 3 * signal + noise + group
    frame["label"] = signal + noise > 0
    frame["colour"] = np.array(["blue", "green", "red"])[np.digitize(signal + noise, [-0.5, 0.8])]
    return frame.sample(frac=1.0, random_state=seed).reset_index(drop=True)


FEATURES = ["x0", "x1", "x2", "x3"]
