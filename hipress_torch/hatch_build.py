"""Compiles the C kernels into the wheel, once for each instruction set.

A build never fails for want of a compiler: the package then runs on torch operations, or compiles
the kernels when they are first used.
"""

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

NATIVE = "src/hipress_torch/_native"


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook; ``HIPRESS_TORCH_BUILD=0`` leaves the kernels out."""

    PLUGIN_NAME = "custom"
    _built: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles what can be compiled, and marks the wheel with its platform if anything was."""
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / NATIVE
        toolchain = _load(folder / "_toolchain.py")
        cc = toolchain.compiler()
        if cc is None or os.environ.get("HIPRESS_TORCH_BUILD") == "0":
            self.app.display_warning("hipress-torch: built without C kernels (no C compiler)")
            return
        # An editable install finds them in the source tree; a wheel takes them from elsewhere, so
        # that building one does not disturb the tree.
        editable = version == "editable"
        self._built = Path(tempfile.mkdtemp(prefix="hipress-"))
        target_folder = folder if editable else self._built
        source = (folder / "builtin.c").read_text(encoding="utf-8")
        made = 0
        for instructions in toolchain.sets_to_build():
            target = target_folder / f"kernels_{instructions}{toolchain.suffix()}"
            try:
                toolchain.build(cc, source, toolchain.flags_of(instructions), target)
            except (OSError, subprocess.SubprocessError) as error:
                self.app.display_warning(f"hipress-torch: no {instructions} kernels: {error}")
                continue
            made += 1
            if not editable:
                place = f"hipress_torch/_native/{target.name}"
                build_data["force_include"][str(target)] = place
        if made and not editable:
            build_data["pure_python"] = False
            # A local build promises no more than this machine: no manylinux or musllinux tag.
            named = (t.platform for t in sys_tags() if not t.platform.startswith(("many", "musl")))
            build_data["tag"] = f"py3-none-{next(named)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what was compiled, once it is in the wheel."""
        del version, build_data, artifact_path
        if self._built is not None:
            shutil.rmtree(self._built, ignore_errors=True)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("toolchain", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
