"""The extension point, and the models' own rules."""

import subprocess
import sys
from pathlib import Path

import pytest

from kingpin_ray import UnknownModelError, models
from kingpin_ray.models import GroupModel

THIRD_PARTY = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "kingpin-median"
version = "0.1"
[project.entry-points."kingpin_ray.models"]
median = "kingpin_ray.models.median:Median"
[tool.hatch.build.targets.wheel]
packages = ["src/kingpin_ray"]
""",
    "src/kingpin_ray/models/median/__init__.py": """
import numpy as np
from kingpin_ray.models import Fitted, GroupModel

class Median(GroupModel):
    name = "median"
    def __init__(self):
        pass
    def fit(self, block, configs):
        rows = np.split(block.y, block.offsets[1:-1])
        middle = np.array([np.median(part) for part in rows])
        return [Fitted({"middle": middle}) for _ in configs]
    def predict(self, stack, X, model, n_classes):
        return stack["middle"][model]
    def export(self, stack, at, naming, config):
        return float(stack["middle"][at])
""",
}


def test_built_in_models_are_found_and_described() -> None:
    names = models.available()
    assert {"linear", "logistic", "ridge"} <= set(names)
    for name in names:
        kind = models.get(name)
        assert issubclass(kind, GroupModel)
        assert kind.name == name
    with pytest.raises(UnknownModelError, match="available are"):
        models.get("nope")


def test_a_third_party_model_is_found_trained_and_stored(tmp_path: Path) -> None:
    for name, text in THIRD_PARTY.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    target = tmp_path / "site"
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run(
        [sys.executable, *install, str(target), str(tmp_path / "project")], check=True, timeout=150
    )
    code = f"""
import sys
sys.path.insert(0, {str(target)!r})
import numpy as np
from kingpin_ray import GroupedEstimator, models
from tests.kingpin_ray.data import FEATURES, grouped_frame
assert "median" in models.available()
frame = grouped_frame(n_groups=5)
model = GroupedEstimator(models.get("median")(), "key", "value", FEATURES, cv=3,
                         scoring="neg_mean_absolute_error").fit(frame)
expected = frame.groupby("key").value.transform("median")
np.testing.assert_allclose(model.predict(frame), expected)
model.save({str(tmp_path / "store")!r})
again = GroupedEstimator.load({str(tmp_path / "store")!r})
np.testing.assert_allclose(again.predict(frame), expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
