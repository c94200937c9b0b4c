"""Parquet files that are larger than memory: read in parts, kept on the disk by group."""

import glob
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.tree import DecisionTreeRegressor

import kingpin_ray as kp
from kingpin_ray import GBDT, MLP, GroupedEstimator, Logistic, _prepare, _spill
from kingpin_ray._source import Files
from tests.kingpin_ray.data import FEATURES, two_files


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_prepare, "available_memory", lambda: 0)
    monkeypatch.setattr(_prepare, "_SPILL_BYTES", 10_000)


@pytest.fixture
def parquet(tmp_path: Path) -> tuple[pd.DataFrame, str]:
    return two_files(tmp_path, 25, 700, (150, 300))


CASES: list[tuple[Any, str, Any]] = [
    (DecisionTreeRegressor(max_depth=2), "value", None),
    (Logistic(), "label", {"C": [0.1, 1.0]}),
    (MLP((4,), epochs=1), "label", None),
    (GBDT(n_estimators=3), "label", None),
]


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize(("spec", "target", "grid"), CASES, ids=lambda v: str(v)[:20])
@pytest.mark.parametrize("plan", ["local", "auto"])
def test_spilled_rows_give_the_models_of_rows_in_memory(
    parquet: tuple[pd.DataFrame, str], spec: Any, target: str, grid: Any, plan: str
) -> None:
    frame, path = parquet
    before = set(glob.glob(f"{tempfile.gettempdir()}/kingpin-spill-*"))
    options: dict[str, Any] = {"param_grid": grid, "cv": 2 if grid else None, "random_state": 1}
    there = GroupedEstimator(spec, "key", target, FEATURES, plan=plan, **options).fit(path)
    here = GroupedEstimator(spec, "key", target, FEATURES, plan="local", **options).fit(frame)
    assert there.plan_ == "local"
    np.testing.assert_array_equal(there.predict(frame), here.predict(frame))
    drop = ["seconds"]
    assert there.results_.drop(drop).equals(here.results_.drop(drop))
    new = frame.head(9).assign(key="new")  # the fallback saw the same rows
    np.testing.assert_array_equal(there.predict(new), here.predict(new))
    needed = Files(path, ["key", target, *FEATURES]).column_bytes()
    assert needed <= there.bytes_read_ <= 1.01 * needed
    assert set(glob.glob(f"{tempfile.gettempdir()}/kingpin-spill-*")) == before


@pytest.mark.usefixtures("small_memory")
def test_a_full_disk_is_named(
    parquet: tuple[pd.DataFrame, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_spill.np, "save", full)
    with pytest.raises(kp.ResourceError, match=r"No space left on device.*TMPDIR"):
        GroupedEstimator(Logistic(), "key", "label", FEATURES, plan="local").fit(parquet[1])
