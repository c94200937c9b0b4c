"""Compiles the C kernels when the package is built; never fails a build where that is not possible.

With a C compiler the wheel carries one shared library (no Python ABI: any Python 3.11 and up loads
it) and is tagged for its platform. Without one the wheel is a pure one, and the package runs on
torch alone. BIFEAT_NATIVE=0 asks for the pure one.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/bifeat_pyg/kernels")
# No fused multiply-add: results must equal the torch reference bit for bit.
FLAGS = ["-O3", "-std=c99", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"]
# Vectors are passed between inlined functions only, so how they would be passed does not matter.
FLAGS.append("-Wno-psabi")


class CustomBuildHook(BuildHookInterface):
    """Adds the compiled kernels to a wheel, or leaves them beside the source in editable mode."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles; `version` is "standard" or "editable"."""
        if self.target_name != "wheel" or os.environ.get("BIFEAT_NATIVE", "1") == "0":
            return
        root = Path(self.root)
        suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
        library = root / FOLDER / f"_bifeat{suffix}"
        if not compile_kernels(root / FOLDER / "native", library, self.app.display_warning):
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"
        build_data["artifacts"].append(str(FOLDER / library.name))


def platform_tag() -> str:
    """Returns this machine's wheel platform tag, e.g. linux_x86_64."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_kernels(folder: Path, library: Path, warn: Any) -> bool:
    """Compiles the C files of `folder` to `library` atomically; returns whether it is there."""
    chosen = (
        os.environ.get("CC", "").split()
        or [path for path in map(shutil.which, ("cc", "gcc", "clang")) if path][:1]
    )
    if not chosen:
        warn("bifeat-pyg: no C compiler found; installing without the C kernels (slower on a CPU)")
        return False
    # Beside the target, so that the rename stays within one file system.
    sources = [str(path) for path in sorted(folder.glob("*.c"))]
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as scratch:
        made = Path(scratch) / library.name
        # Several versions for several CPUs where the compiler can, the newest way first.
        for extra in (["-DBIFEAT_CLONES=2"], ["-DBIFEAT_CLONES=1"], []):
            command = [*chosen, *FLAGS, *extra, *sources, "-o", str(made), "-lm"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            except (OSError, subprocess.TimeoutExpired) as error:
                warn(f"bifeat-pyg: cannot run {chosen[0]} ({error}); no C kernels")
                return False
            if done.returncode == 0:
                os.replace(made, library)
                return True
    warn(f"bifeat-pyg: {chosen[0]} failed; installing without the C kernels\n{done.stderr[-500:]}")
    return False
