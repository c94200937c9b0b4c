"""``python3 -m ci bench``: lists the benchmarks, or runs one and keeps its figures."""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from ci import processes
from ci.layout import PLUGINS, ROOT


def _benchmarks() -> dict[str, Path]:
    """Returns every benchmark script by its name ``PLUGIN/NAME``."""
    return {
        f"{plugin}/{script.stem}": script
        for plugin in PLUGINS
        for script in sorted((ROOT / plugin / "benchmarks").glob("[!_]*.py"))
    }


def run_bench(name: str | None, arguments: Sequence[str]) -> int:
    """Runs the named benchmark with the given arguments, or lists all of them."""
    found = _benchmarks()
    if name is None or name.startswith("-"):
        if name not in (None, "-h", "--help"):
            print(f"ci: the benchmark's name comes before its options ({name})", file=sys.stderr)
            return 2
        for known, script in found.items():
            doc = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
            print(f"{known:32} {doc.partition(chr(10))[0]}")
        return 0
    if name not in found:
        known = ", ".join(found)
        print(f"ci: no benchmark is called {name!r}; there are: {known}", file=sys.stderr)
        return 2
    with processes.scratch() as env:
        finished = processes.run([sys.executable, str(found[name]), *arguments], env=env)
    return abs(finished.status)
