"""``python3 -m ci lint``: style, types, layers, dependencies and metadata."""

import sys
import time

from ci import processes
from ci.layout import PLUGINS, ROOT, VENV

_BIN = VENV / "bin"


def _checks() -> list[tuple[str, list[str], str]]:
    """Returns (name, command, folder) of each check."""
    code = [*PLUGINS, "ci", "tests"]
    checks = [
        ("ruff check", ["ruff", "check", *code], "."),
        ("ruff format", ["ruff", "format", "--check", *code], "."),
        ("mypy", ["mypy"], "."),
        ("import-linter", ["lint-imports", "--no-cache"], "."),
    ]
    for plugin in PLUGINS:
        checks.append((f"deptry {plugin}", ["deptry", "src"], plugin))
        checks.append((f"validate {plugin}", ["validate-pyproject", "pyproject.toml"], plugin))
    return checks


def run_lint() -> int:
    """Runs every check, shows what the failing ones say, returns 0 if all are clean."""
    failed = []
    with processes.scratch() as env:
        env["NO_COLOR"] = "1"
        for name, command, folder in _checks():
            lines: list[str] = []
            began = time.perf_counter()
            command = [str(_BIN / command[0]), *command[1:]]
            try:
                status = processes.run(
                    command, env=env, cwd=ROOT / folder, on_line=lines.append
                ).status
            except OSError as error:
                status, lines = 127, [str(error)]
            seconds = time.perf_counter() - began
            verdict = "ok" if status == 0 else f"failed ({status})"
            print(f"{name:26} {seconds:5.1f} s  {verdict}", flush=True)
            if status != 0:
                failed.append(name)
                print("\n".join(f"    {line}" for line in lines), flush=True)
    if failed:
        print(f"ci: lint: {len(failed)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
