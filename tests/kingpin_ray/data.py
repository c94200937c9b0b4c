"""Seeded tables for the tests."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq


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


def two_files(
    folder: Path, n_groups: int, at: int, sizes: tuple[int, int]
) -> tuple[pd.DataFrame, str]:
    """Writes a table as two Parquet files, cut at a row, and returns it and their glob.

    Labels are missing here and there, one group has a single one, and a column is not wanted.
    """
    frame = grouped_frame(n_groups=n_groups)
    frame["label"] = frame.label.astype(object)
    frame.loc[frame.index % 17 == 0, "label"] = None
    frame.loc[frame.key == "g003", "label"] = True
    frame["unused"] = np.random.default_rng(0).normal(size=len(frame))
    table = pa.Table.from_pandas(frame)
    pq.write_table(table.slice(0, at), folder / "a.parquet", row_group_size=sizes[0])
    pq.write_table(table.slice(at), folder / "b.parquet", row_group_size=sizes[1])
    return frame, str(folder / "*.parquet")
