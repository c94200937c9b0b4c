"""Shared settings of every test: hypothesis profiles, and a plain word when a plugin is missing."""

import importlib.util
import os

import pytest
from hypothesis import settings

PLUGINS = ("hipress_torch", "bifeat_pyg", "fedtune_flwr", "kingpin_ray", "mlcd_bo")

# Same examples on every run, and no deadline: a loaded machine is not a failure.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure() -> None:
    # From the repository root an uninstalled plugin's folder is found too, but as a bare
    # namespace without an __init__ file. Nothing is imported here: that takes seconds.
    found = {p: importlib.util.find_spec(p) for p in PLUGINS}
    missing = [p for p, spec in found.items() if spec is None or spec.origin is None]
    if missing:
        folders = " ".join(f"-e ./{p}" for p in missing)
        raise pytest.UsageError(
            f"not installed: {', '.join(missing)}. Run `python3 -m ci test`, "
            f"or `pip install {folders}` in this environment."
        )
