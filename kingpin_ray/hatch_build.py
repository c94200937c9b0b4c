"""Compiles the kernels into the wheel; without a compiler the wheel is built without them.

`KINGPIN_RAY_BUILD=0` leaves them out. Linear models then run on NumPy, GBDT models on LightGBM.
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
SUFFIX = ".dll" if sys.platform == "win32" else ".so"
# -ffast-math would take the tests for NaN away; these two alone let the loops be vectorised.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math"]
# Vectors of eight doubles are passed between inlined functions only.
FLAGS += ["-Wno-psabi"]
NAMES = ("gbdt", "linear")


class Kernels(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles the kernels and marks the wheel with its platform; never fails a build."""
        if self.target_name != "wheel":
            return
        compiler = None if os.environ.get("KINGPIN_RAY_BUILD") == "0" else _compiler()
        built = [name for name in NAMES if self._compile(compiler, name)]
        if built:
            build_data["pure_python"] = False
            # A local build promises no more than this machine: no manylinux or musllinux tag.
            named = (t.platform for t in sys_tags() if not t.platform.startswith(("many", "musl")))
            build_data["tag"] = f"py3-none-{next(named)}"
        build_data["artifacts"] += [f"{KERNELS}/{name}{SUFFIX}" for name in built]

    def _compile(self, compiler: list[str] | None, name: str) -> bool:
        folder = Path(self.root) / KERNELS
        library = folder / f"{name}{SUFFIX}"
        library.unlink(missing_ok=True)
        if compiler is None:
            self.app.display_warning(f"kingpin-ray: built without the {name} kernel")
            return False
        unfinished = folder / f"{name}.{os.getpid()}{SUFFIX}"
        command = [*compiler, *FLAGS, "-o", str(unfinished), str(folder / f"{name}.cpp")]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            os.replace(unfinished, library)
        except (OSError, subprocess.SubprocessError) as error:
            unfinished.unlink(missing_ok=True)
            self.app.display_warning(f"kingpin-ray: built without the {name} kernel: {error}")
            return False
        return True


def _compiler() -> list[str] | None:
    wanted = os.environ.get("CXX", "").split()
    if wanted and shutil.which(wanted[0]):
        return wanted
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    return None
