"""``python3 ci/gpu_check.py``: what only a CUDA device can show, in one run.

Runs the tests marked ``gpu`` of the plugins that have kernels, then each plugin's device
benchmark, whose table sets the kernels' speed against a copy on the same device. It needs an
interpreter with torch, triton and pytest; the plugins are taken from this clone, installed or
not. On a machine without a CUDA device it says so and exits 0.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {
    "hipress_torch": "benchmarks/kernels_device.py",
    "bifeat_pyg": "benchmarks/gather_device.py",
}


def _metadata(plugin: str, site: Path) -> None:
    """Writes the installation record that a plugin reads its version and entry points from."""
    project = tomllib.loads((ROOT / plugin / "pyproject.toml").read_text("utf-8"))["project"]
    info = site / f"{plugin}-{project['version']}.dist-info"
    info.mkdir()
    header = f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(header, encoding="utf-8")
    groups = project.get("entry-points", {})
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Returns 0 if all passed or there is nothing to check, else 1."""
    try:
        import torch
    except ImportError:
        print(f"gpu_check: {sys.executable} has no torch; run `python3 -m ci setup` and use .venv")
        return 1
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device on this machine; nothing was checked")
        return 0
    print(f"gpu_check: {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    status = 0
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        site = Path(name)
        for plugin in KERNELS:
            _metadata(plugin, site)
        sources = [str(ROOT / plugin / "src") for plugin in KERNELS]
        path = os.pathsep.join([*sources, name, os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path}
        for plugin, script in KERNELS.items():
            tests = f"tests/{plugin}"
            # The suite's own conftest asks for all five plugins; here only two matter.
            pytest = ["-m", "pytest", "-m", "gpu", "-q", f"--confcutdir={tests}", tests]
            for command in (pytest, [str(ROOT / plugin / script)]):
                print(f"\ngpu_check: {' '.join(command)}", flush=True)
                done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, check=False)
                status = status or int(done.returncode != 0)
    print("\ngpu_check:", "failed" if status else "all passed")
    return status


if __name__ == "__main__":
    sys.exit(main())
