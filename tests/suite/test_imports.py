"""Where and how the plugins import: from everywhere, alone, and without starting anything."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ci.layout import PLUGINS, ROOT

# Import names of frameworks that importing a plugin must not bring in: those of the others.
ALIEN = {
    "hipress_torch": {"ray", "flwr", "botorch", "gpytorch", "torch_geometric"},
    "bifeat_pyg": {"ray", "flwr", "botorch", "gpytorch"},
    "fedtune_flwr": {"ray", "torch_geometric"},
    "kingpin_ray": {"flwr", "botorch", "gpytorch", "torch_geometric"},
    "mlcd_bo": {"ray", "flwr", "torch_geometric"},
}

PROBE = """
import json, logging, os, sys, threading
before = len(logging.getLogger().handlers)
import {plugin}
print(json.dumps({{
    "version": {plugin}.__version__,
    "file": {plugin}.__file__,
    "modules": sorted({{name.partition(".")[0] for name in sys.modules}}),
    "handlers": len(logging.getLogger().handlers) - before
                + len(logging.getLogger("{plugin}").handlers),
    "threads": [t.name for t in threading.enumerate()],
    "children": open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
                if os.path.exists(f"/proc/self/task/{{os.getpid()}}/children") else [],
    "cuda": "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized(),
    "own": sorted(n for n in vars({plugin}) if not n.startswith("_")),
}}))
"""


def _probe(plugin: str, folder: Path) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(plugin=plugin)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("folder", [ROOT, Path("/")], ids=["root", "elsewhere"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_imports_alone_and_starts_nothing(plugin: str, folder: Path):
    seen = _probe(plugin, folder)
    assert seen["version"] == "0.1.0" or seen["version"].count(".") == 2
    assert Path(seen["file"]).parent.name == plugin
    assert not ALIEN[plugin].intersection(seen["modules"])
    assert not set(PLUGINS).difference({plugin}).intersection(seen["modules"])
    assert seen["handlers"] == 0
    assert seen["threads"] == ["MainThread"]
    assert seen["children"] == []
    assert not seen["cuda"]
    assert seen["own"], "the package exports nothing"


@pytest.mark.cluster
def test_imports_inside_a_ray_actor():
    code = f"""
import ray
ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR",
         object_store_memory=100 * 2**20)
@ray.remote
class Importer:
    def version(self, name):
        import importlib
        return importlib.import_module(name).__version__
importer = Importer.remote()
print(ray.get([importer.version.remote(name) for name in {PLUGINS!r}]))
ray.shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    versions = done.stdout.splitlines()[-1]
    assert versions.count("'") == 2 * len(PLUGINS)
