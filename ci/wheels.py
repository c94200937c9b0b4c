"""``python3 -m ci wheels``: builds the distributions, looks inside, tries each on its own."""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ci import processes
from ci.layout import PLUGINS, ROOT

DIST = ROOT / "dist"

# What each plugin hooks into. An environment with one plugin must not hold another's framework.
FRAMEWORKS = {
    "hipress_torch": {"torch"},
    "bifeat_pyg": {"torch", "torch-geometric"},
    "fedtune_flwr": {"torch", "flwr", "botorch"},
    "kingpin_ray": {"ray"},
    "mlcd_bo": {"torch", "botorch"},
}


class WheelError(Exception):
    """A wheel cannot be built, lacks something, or does not work on its own."""


def run_wheels(plugins: Sequence[str], *, check: bool) -> int:
    """Builds into ``dist/``; returns 0 if all is well, else 1 after saying what is not."""
    failed = 0
    for plugin in plugins:
        try:
            wheel = build(plugin, DIST)
            look_inside(wheel, plugin)
            print(f"{plugin}: {wheel.relative_to(ROOT)}, {wheel.stat().st_size / 1024:.0f} KiB")
            if check:
                print(f"{plugin}: alone in a new environment: {try_alone(wheel, plugin)}")
        except WheelError as error:
            failed += 1
            print(f"{plugin}: FAILED: {error}", file=sys.stderr)
    return 1 if failed else 0


def build(plugin: str, out: Path, *, sdist: bool = True) -> Path:
    """Builds a plugin's source archive and, from that, its wheel; returns the wheel's path."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in [*out.glob(f"{plugin}-*.whl"), *out.glob(f"{plugin}-*.tar.gz")]:
        stale.unlink()
    kinds = [] if sdist else ["--wheel"]
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(out)]
    done = subprocess.run(
        [*command, str(ROOT / plugin)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise WheelError(f"build failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    [wheel] = out.glob(f"{plugin}-*.whl")
    return wheel


def look_inside(wheel: Path, plugin: str) -> None:
    """Checks the names in a wheel.

    Raises:
        WheelError: something is missing, or something is in it that does not belong there.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata_name] = [n for n in names if n.endswith(".dist-info/METADATA")]
        metadata = archive.read(metadata_name).decode()
    wanted = [f"{plugin}/__init__.py", f"{plugin}/py.typed", "licenses/LICENSE", "entry_points.txt"]
    missing = [w for w in wanted if not any(n.endswith(w) for n in names)]
    if missing:
        raise WheelError(f"{wheel.name} lacks {', '.join(missing)}")
    alien = [n for n in names if not n.startswith((f"{plugin}/", f"{plugin}-"))]
    alien += [n for n in names if re.search(r"__pycache__|\.pyc$|(^|/)tests?/", n)]
    if alien:
        raise WheelError(f"{wheel.name} holds what does not belong in it: {', '.join(alien)}")
    if "\n\n#" not in metadata:
        raise WheelError(f"{wheel.name} has no README in its metadata")


def first_python_block(readme: Path) -> str:
    """Returns the first Python block of a README: the plugin's ten lines."""
    found = re.search(r"^```python\n(.*?)^```", readme.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    if not found:
        raise WheelError(f"{readme} has no Python block")
    return found.group(1)


def try_alone(wheel: Path, plugin: str) -> str:
    """Installs a wheel with its real dependencies in a new environment and uses it there.

    Returns:
        A line that says what was seen.

    Raises:
        WheelError: it does not install, another plugin's framework came along, the import or
            the README's ten lines fail, or a process is left behind.
    """
    with tempfile.TemporaryDirectory(prefix="alone-") as name, processes.scratch() as env:
        folder = Path(name)
        _call([sys.executable, "-m", "venv", str(folder / "venv")], env)
        python = str(folder / "venv" / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        constraints = str(ROOT / "ci" / "constraints.txt")
        _call([*pip, "install", "-q", "-c", constraints, str(wheel)], env)
        frozen = _call([*pip, "list", "--format=freeze"], env)
        installed = {line.partition("==")[0].lower() for line in frozen}
        others = set().union(*(FRAMEWORKS[p] for p in PLUGINS)) - FRAMEWORKS[plugin]
        intruders = installed & others
        if intruders:
            raise WheelError(f"other plugins' frameworks came along: {', '.join(intruders)}")
        version = _call(
            [python, "-c", f"import {plugin}; print({plugin}.__version__)"], env, cwd=Path("/")
        )
        script = folder / "readme.py"
        script.write_text(first_python_block(ROOT / plugin / "README.md"), encoding="utf-8")
        _call([python, str(script)], env, cwd=folder)
        shutil.rmtree(folder / "venv")
    return f"version {version[-1]}, {len(installed)} packages, README's ten lines run"


def _call(command: list[str], env: dict[str, str], cwd: Path = ROOT) -> list[str]:
    lines: list[str] = []
    finished = processes.run(command, env=env, cwd=cwd, on_line=lines.append, timeout_s=1800)
    if finished.status != 0:
        tail = "\n".join(lines[-15:])
        raise WheelError(f"`{' '.join(command[-3:])}` ended with {finished.status}:\n{tail}")
    if finished.leftovers:
        raise WheelError(f"`{' '.join(command[-3:])}` left behind: {finished.leftovers}")
    return lines
