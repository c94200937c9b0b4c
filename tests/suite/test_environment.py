"""Set-up: every foreseeable trouble is one clear line, and a half-made environment is not used."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci import environment
from ci.layout import PLUGINS, ROOT

FRESH = ["making .venv", "installing", "checking"]


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
        environment._step("installing", [sys.executable, "-c", code], lock=0)
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


def test_interrupted_setup_starts_afresh(clone: Path, monkeypatch):
    """A kill at any point leaves the marker, and the next call clears what it finds."""
    (clone / ".venv").mkdir()
    (clone / ".venv" / "ready").write_text(environment.BUILDING)
    (clone / ".venv" / "half-written").write_text("")
    steps: list[str] = []
    monkeypatch.setattr(environment, "_step", lambda label, command, lock: steps.append(label))
    environment.ensure()
    assert steps == FRESH
    assert not (clone / ".venv" / "half-written").exists()
    _pretend_interpreter(clone)
    environment.ensure()
    assert steps == FRESH, "an environment that stands is not touched again"


@pytest.fixture
def standing(clone: Path, monkeypatch) -> list[str]:
    """A finished environment of the clone; returns the steps of later set-ups."""
    steps: list[str] = []
    monkeypatch.setattr(environment, "_step", lambda label, command, lock: steps.append(label))
    environment.ensure()
    _pretend_interpreter(clone)
    (clone / ".venv" / "kept").write_text("")
    steps.clear()
    return steps


def _pretend_interpreter(clone: Path) -> None:
    interpreter = clone / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(exist_ok=True)
    interpreter.symlink_to(sys.executable)


def _change_requirements(clone: Path) -> None:
    with (clone / "ci" / "requirements.txt").open("a") as file:
        file.write("\n# one more\n")


def test_changed_requirements_update_in_place(clone: Path, standing: list[str]):
    _change_requirements(clone)
    environment.ensure()
    assert standing == FRESH[1:]
    assert (clone / ".venv" / "kept").exists()


def test_moved_clone_gets_a_new_environment(clone: Path, standing: list[str], monkeypatch):
    monkeypatch.setattr(environment, "_place", lambda: b"/elsewhere".hex())
    environment.ensure()
    assert standing == FRESH
    assert not (clone / ".venv" / "kept").exists()


@pytest.mark.parametrize("spoiled", [b"", b"\xff\xfe\x00", b"0" * 64, b"true\n"])
def test_spoiled_marker_is_not_trusted(clone: Path, standing: list[str], spoiled: bytes):
    environment.READY.write_bytes(spoiled)
    environment.ensure()
    assert standing == FRESH


def test_lost_interpreter_is_replaced(clone: Path, standing: list[str]):
    (clone / ".venv" / "bin" / "python").unlink()
    environment.ensure()
    assert standing == FRESH


def test_failed_update_keeps_what_stood(clone: Path, standing: list[str], monkeypatch):
    """pip that stops by itself, for lack of a network, has not written anything by halves."""

    def fail(label: str, command: object, lock: int) -> None:
        raise environment.SetupError("no network")

    before = environment.READY.read_text()
    _change_requirements(clone)
    with monkeypatch.context() as patch:
        patch.setattr(environment, "_step", fail)
        with pytest.raises(environment.SetupError):
            environment.ensure()
    assert environment.READY.read_text() == before
    environment.ensure()
    assert standing == FRESH[1:]


@pytest.mark.parametrize("failing", ["installing", "checking"])
def test_failed_install_is_not_taken_for_a_good_one(clone: Path, monkeypatch, failing: str):
    def fail(label: str, command: object, lock: int) -> None:
        if label == failing:
            raise environment.SetupError(f"{failing} failed")

    monkeypatch.setattr(environment, "_step", fail)
    for _ in range(2):
        with pytest.raises(environment.SetupError):
            environment.ensure()
        assert environment.READY.read_text() == environment.BUILDING


def test_killed_step_leaves_the_marker(clone: Path, monkeypatch):
    """An update that is killed from outside may have left a package half-written."""
    (clone / "build").mkdir()
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(KeyboardInterrupt):
        environment._step("installing", [sys.executable, "-c", code], lock=0)


def test_callers_settings_do_not_lead_pip_elsewhere(clone: Path, monkeypatch, tmp_path: Path):
    (clone / "build").mkdir()
    monkeypatch.setenv("PIP_TARGET", str(tmp_path))
    monkeypatch.setenv("PIP_DRY_RUN", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    environment._step("installing", [sys.executable, "-c", code], lock=0)
    seen = json.loads((clone / "build" / "setup.log").read_text())
    assert not environment._MISLEADING.intersection(seen)
    assert seen["PIP_INDEX_URL"] == "https://index.example/simple"
    assert seen["TMPDIR"] == str(clone / "build" / "tmp")
    assert not (clone / "build" / "tmp").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is signalled on Linux")
def test_killed_setup_takes_pip_along_and_keeps_others_out_until_then(clone: Path):
    pid_file = clone / "pid"
    command = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); "
    command += "time.sleep(600)"
    script = (
        "import sys\nfrom pathlib import Path\nfrom ci import environment as e\n"
        f"root = Path({str(clone)!r})\n"
        "e.ROOT, e.BUILD, e.LOG = root, root / 'build', root / 'build' / 'setup.log'\n"
        f"with e._lock() as lock:\n    e._step('installing', [sys.executable, '-c', {command!r}],"
        " lock)\n"
    )
    outer = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.02)
    outer.kill()
    outer.wait()
    child = Path("/proc", pid_file.read_text(), "stat")
    with environment._lock():  # granted once the child, which holds a copy, lets go of it
        while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.02)  # its last moments; a child that lives on is this test's timeout


def test_unwritable_folder_is_one_line(clone: Path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(clone / "build"))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(environment.SetupError, match=r"Permission denied \(.*build\)"):
        environment.ensure()
