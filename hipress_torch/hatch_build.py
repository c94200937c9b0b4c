"""Compiles the C kernels into the wheel, once for each instruction set.

A build never fails for want of a compiler: the package then runs on torch operations, or compiles
the kernels when they are first used.
"""

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

NATIVE = "src/hipress_torch/_native"


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook; ``HIPRESS_TORCH_BUILD=0`` leaves the kernels out."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles what can be compiled, and marks the wheel with its platform if anything was."""
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / NATIVE
        for stale in folder.glob("kernels_*"):
            stale.unlink()
        toolchain = _load(folder / "_toolchain.py")
        cc = toolchain.compiler()
        if cc is None or os.environ.get("HIPRESS_TORCH_BUILD") == "0":
            self.app.display_warning("hipress-torch: built without C kernels (no C compiler)")
            return
        source = (folder / "builtin.c").read_text(encoding="utf-8")
        made = []
        for instructions in toolchain.sets_to_build():
            target = folder / f"kernels_{instructions}{toolchain.suffix()}"
            try:
                toolchain.build(cc, source, toolchain.flags_of(instructions), target)
                made.append(target.name)
            except (OSError, subprocess.SubprocessError) as error:
                self.app.display_warning(f"hipress-torch: no {instructions} kernels: {error}")
        if made:
            build_data["artifacts"] += [f"{NATIVE}/{name}" for name in made]
            build_data["pure_python"] = False
            # A local build promises no more than this machine: no manylinux or musllinux tag.
            named = (t.platform for t in sys_tags() if not t.platform.startswith(("many", "musl")))
            build_data["tag"] = f"py3-none-{next(named)}"


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("toolchain", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
