"""Compiles the tree kernel into the wheel; without a compiler the wheel is built without it.

`KINGPIN_RAY_BUILD=0` leaves the kernel out. GBDT models then run on LightGBM.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

KERNELS = "src/kingpin_ray/_kernels"
# -ffast-math would take the tests for NaN away; these two alone let the loops be vectorised.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math"]


class TreeKernel(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles the kernel and marks the wheel with its platform; never fails a build."""
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / KERNELS
        suffix = ".dll" if sys.platform == "win32" else ".so"
        library = folder / f"gbdt{suffix}"
        library.unlink(missing_ok=True)
        compiler = _compiler()
        if compiler is None or os.environ.get("KINGPIN_RAY_BUILD") == "0":
            self.app.display_warning("kingpin-ray: built without the tree kernel")
            return
        unfinished = folder / f"gbdt.{os.getpid()}{suffix}"
        command = [*compiler, *FLAGS, "-o", str(unfinished), str(folder / "gbdt.cpp")]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            os.replace(unfinished, library)
        except (OSError, subprocess.SubprocessError) as error:
            unfinished.unlink(missing_ok=True)
            self.app.display_warning(f"kingpin-ray: built without the tree kernel: {error}")
            return
        build_data["artifacts"].append(f"{KERNELS}/{library.name}")
        build_data["pure_python"] = False
        # A local build promises no more than this machine: no manylinux or musllinux tag.
        named = (t.platform for t in sys_tags() if not t.platform.startswith(("many", "musl")))
        build_data["tag"] = f"py3-none-{next(named)}"


def _compiler() -> list[str] | None:
    wanted = os.environ.get("CXX", "").split()
    if wanted and shutil.which(wanted[0]):
        return wanted
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    return None
