"""Set-up: every foreseeable trouble is one clear line, and a half-made environment is not used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci import environment
from ci.layout import PLUGINS, ROOT


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of the parts that set-up reads, with the module's paths pointing into it."""
    root = tmp_path / "clone"
    root.mkdir()
    shutil.copytree(ROOT / "ci", root / "ci", ignore=shutil.ignore_patterns("__pycache__"))
    for plugin in PLUGINS:
        shutil.copytree(
            ROOT / plugin, root / plugin, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    monkeypatch.setattr(environment, "ROOT", root)
    monkeypatch.setattr(environment, "VENV", root / ".venv")
    monkeypatch.setattr(environment, "READY", root / ".venv" / "ready")
    monkeypatch.setattr(environment, "BUILD", root / "build")
    monkeypatch.setattr(environment, "LOG", root / "build" / "setup.log")
    return root


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )


def test_old_python_meets_one_sentence():
    done = _run(
        "import sys, runpy; sys.version_info = (3, 8, 0, 'final', 0); sys.argv = ['ci', 'demo'];"
        "runpy.run_module('ci', run_name='__main__')"
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Python 3.11 or newer is needed" in done.stderr
    assert "is 3.8" in done.stderr


def test_the_entry_point_parses_on_old_pythons():
    import ast

    ast.parse((ROOT / "ci" / "__main__.py").read_text(), feature_version=(3, 7))


def test_missing_venv_module(clone: Path, monkeypatch):
    monkeypatch.setattr(
        environment,
        "importlib",
        SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)),
    )
    with pytest.raises(environment.SetupError, match=r"no `venv` module.*apt install python3"):
        environment.ensure()
    assert not (clone / ".venv").exists()


def test_full_disk_is_told_before_anything_is_made(clone: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**29))
    with pytest.raises(environment.SetupError, match=r"0\.5 GiB free .* 4 GiB needed"):
        environment.ensure()
    assert not (clone / ".venv").exists()


def test_somebody_elses_environment_is_not_deleted(clone: Path):
    (clone / ".venv").mkdir()
    (clone / ".venv" / "precious").write_text("mine")
    with pytest.raises(environment.SetupError, match="was not made by this command"):
        environment.ensure()
    assert (clone / ".venv" / "precious").read_text() == "mine"


def test_no_network_is_one_line_and_leaves_nothing_trusted(clone: Path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    # A closed port of this machine stands for an unreachable index.
    env |= {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "ci", "setup"],
        cwd=clone,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    [complaint] = [line for line in done.stderr.splitlines() if "failed" in line]
    assert "no network: pip cannot reach the package index" in complaint
    assert (clone / ".venv" / "ready").read_text() == environment.BUILDING


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk is full"),
        ("WARNING: Retrying after NewConnectionError('x')\nERROR: No matching", "no network"),
        ("Collecting x\nERROR: ResolutionImpossible: y", "ERROR: ResolutionImpossible: y"),
        ("", "no output"),
    ],
)
def test_failures_are_explained(clone: Path, output: str, cause: str):
    (clone / "build").mkdir()
    code = f"print({output!r}); raise SystemExit(1)"
    with pytest.raises(environment.SetupError) as caught:
        environment._step("installing", [sys.executable, "-c", code])
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


def test_interrupted_setup_starts_afresh(clone: Path, monkeypatch):
    """A kill at any point leaves the marker, and the next call clears what it finds."""
    (clone / ".venv").mkdir()
    (clone / ".venv" / "ready").write_text(environment.BUILDING)
    (clone / ".venv" / "half-written").write_text("")
    steps: list[str] = []
    monkeypatch.setattr(environment, "_step", lambda label, command: steps.append(label))
    environment.ensure()
    assert steps == ["making .venv", "installing"]
    assert not (clone / ".venv" / "half-written").exists()
    environment.ensure()
    assert len(steps) == 2, "an environment that stands is not touched again"


def test_changed_requirements_update_in_place(clone: Path, monkeypatch):
    steps: list[str] = []
    monkeypatch.setattr(environment, "_step", lambda label, command: steps.append(label))
    environment.ensure()
    monkeypatch.setattr(environment, "_is_complete", lambda: True)
    (clone / ".venv" / "kept").write_text("")
    with (clone / "ci" / "requirements.txt").open("a") as file:
        file.write("\n# one more\n")
    steps.clear()
    environment.ensure()
    assert steps == ["installing"]
    assert (clone / ".venv" / "kept").exists()


def test_failed_install_is_not_taken_for_a_good_one(clone: Path, monkeypatch):
    def fail(label: str, command: object) -> None:
        if label == "installing":
            raise environment.SetupError("installing failed")

    monkeypatch.setattr(environment, "_step", fail)
    for _ in range(2):
        with pytest.raises(environment.SetupError):
            environment.ensure()
        assert environment.READY.read_text() == environment.BUILDING


def test_unwritable_folder_is_one_line(clone: Path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(clone / "build"))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(environment.SetupError, match=r"Permission denied \(.*build\)"):
        environment.ensure()
