"""The development environment: made once, repaired when needed, at hand at once when it stands.

Standard library only. ``.venv/ready`` holds the hash of everything the environment was made
from; it is written last, so an environment without it, or with another hash, is not trusted.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ci import processes
from ci.layout import BUILD, PLUGINS, ROOT, VENV

READY = VENV / "ready"
LOG = BUILD / "setup.log"
BUILDING = "building"
NEEDED_GIB = 4  # the environment itself is about 3 GiB with a CPU build of torch

# Settings of the caller's that would have pip install elsewhere, or not at all, or believe that
# somebody else's packages are this environment's. Index, proxy, certificate and cache settings
# stay.
_MISLEADING = {
    *("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "PYTHONSTARTUP"),
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_USER", "PIP_REQUIRE_VIRTUALENV"),
    *("PIP_DRY_RUN", "PIP_NO_DEPS", "PIP_REQUIREMENT", "PIP_EDITABLE", "PIP_IGNORE_INSTALLED"),
    *("PIP_LOG", "PIP_REPORT"),
}

# What a standing environment must be able to say of itself.
_VERIFY = """
import importlib.metadata as m, json, sys
for name in json.loads(sys.argv[1]):
    m.version(name)
import torch, ray, flwr, pytest, rich
"""


class SetupError(Exception):
    """The environment cannot be made; the message says why and what to do."""


def python() -> Path:
    """Returns the environment's interpreter."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ensure() -> None:
    """Makes or repairs ``.venv``; returns at once when it is up to date.

    Raises:
        SetupError: no venv module, no network, a full disk, or pip's own complaint.
    """
    try:
        wanted = _fingerprint()
        if _state() == wanted and python().exists():
            return
        with _lock() as lock:
            if _state() != wanted or not python().exists():  # another call may have done it
                _build(wanted, lock)
    except OSError as error:
        raise SetupError(_explain_os_error(error)) from None


def enter(argv: Sequence[str]) -> None:
    """Replaces this process by the same command under the environment's interpreter."""
    if Path(sys.prefix) == VENV:
        return
    command = [str(python()), "-m", "ci", *argv]
    for name in ("PYTHONPATH", "PYTHONHOME"):
        os.environ.pop(name, None)
    if os.name == "nt":
        sys.exit(subprocess.call(command))
    os.execv(command[0], command)


def _fingerprint() -> str:
    """Returns what ``ready`` holds for the present files: a hash and the clone's place."""
    digest = hashlib.sha256()
    digest.update(str(sys.version_info[:2]).encode())
    sources = [*sorted((ROOT / "ci").glob("*.txt"))]
    sources += [ROOT / plugin / "pyproject.toml" for plugin in PLUGINS]
    for source in sources:
        digest.update(source.read_bytes())
        digest.update(b"\0")
    return f"{digest.hexdigest()} {_place()}"


def _place() -> str:
    # Scripts and editable installs remember where the clone lay: a moved one needs a new
    # environment. The path is written as hex because it may hold any byte.
    return os.fsencode(ROOT).hex()


def _state() -> str | None:
    try:
        return READY.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None


def _set_state(state: str) -> None:
    unfinished = READY.with_suffix(".part")
    unfinished.write_text(state, encoding="ascii")
    os.replace(unfinished, READY)


def _build(wanted: str, lock: int) -> None:
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise SetupError(
                f"this Python has no `{module}` module; on Debian or Ubuntu install it with "
                f"`apt install python{version}-venv`, then run the same command again."
            )
    BUILD.mkdir(exist_ok=True)
    # An environment that was being built when something killed the build may hold half-written
    # packages which pip would take for whole ones: start afresh. A complete but outdated one is
    # brought up to date in place.
    before = _state()
    fresh = not _is_complete()
    if fresh:
        _check_place()
    VENV.mkdir(exist_ok=True)
    _set_state(BUILDING)
    if fresh:
        _empty()
        _step("making .venv", [_base_python(), "-m", "venv", str(VENV)], lock)
    pip = [str(python()), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    try:
        _step(
            "installing", [*pip, "install", "--progress-bar=off", "-r", "ci/requirements.txt"], lock
        )
        names = json.dumps([plugin.replace("_", "-") for plugin in PLUGINS])
        _step("checking", [str(python()), "-I", "-c", _VERIFY, names], lock)
    except SetupError:
        # pip stopped by itself, so nothing is half-written: what stood before still stands.
        if not fresh and before is not None:
            _set_state(before)
        raise
    _set_state(wanted)


def _check_place() -> None:
    if VENV.exists() and not READY.exists() and any(VENV.iterdir()):
        raise SetupError(
            f"{VENV} exists but was not made by this command: move it away, "
            "then run the same command again."
        )
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < NEEDED_GIB:
        raise SetupError(
            f"{free:.1f} GiB free in {ROOT}, {NEEDED_GIB} GiB needed: free some space, "
            "then run the same command again."
        )


def _empty() -> None:
    # The marker stays throughout, so that a kill at any point leaves something recognizable.
    for entry in VENV.iterdir():
        if entry == READY:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _is_complete() -> bool:
    """Returns whether a finished environment of this clone stands, up to date or not."""
    state = re.fullmatch(r"[0-9a-f]{64} ([0-9a-f]+)", _state() or "")
    if state is None or state[1] != _place() or not python().exists():
        return False
    check = "import pip, sys; raise SystemExit(sys.version_info[:2] != (%d, %d))"
    test = [str(python()), "-I", "-c", check % sys.version_info[:2]]
    return subprocess.run(test, capture_output=True, check=False).returncode == 0


def _base_python() -> str:
    # Never the interpreter of the environment that is about to be cleared.
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def _step(label: str, command: Sequence[str], lock: int) -> None:
    """Runs a command with its output in the log and one line of progress on the terminal.

    The command inherits the lock, so that it keeps others out for as long as it really runs,
    also if this process is killed; and it is told to end when this process does.
    """
    live = sys.stderr.isatty()
    began = time.monotonic()
    print(f"ci: {label} (log: {os.path.relpath(LOG, ROOT)})", file=sys.stderr, flush=True)
    tail: list[str] = []
    temporary = BUILD / "tmp"  # what a killed pip leaves behind is then within reach
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in _MISLEADING}
    with (
        LOG.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**env, "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=() if os.name == "nt" else (lock,),
            preexec_fn=processes.die_with_parent if sys.platform == "linux" else None,
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                log.write(line)
                tail = [*tail[-199:], line.strip()] if line.strip() else tail
                words = line.split()
                if live and words and words[0] in ("Collecting", "Downloading", "Installing"):
                    note = f"  {time.monotonic() - began:4.0f} s  {' '.join(words[:2])}"
                    print(f"\r{note[:78]:78}", end="", file=sys.stderr, flush=True)
            status = process.wait()
        except BaseException:
            _kill_with_children(process)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if live:
                print(f"\r{'':78}\r", end="", file=sys.stderr, flush=True)
    if status < 0:
        # Killed from outside: what it was writing is half-written, so the marker stays.
        raise KeyboardInterrupt
    if status != 0:
        raise SetupError(_explain_failure(label, tail))


def _kill_with_children(process: subprocess.Popen[str]) -> None:
    # pip builds each plugin in a process of its own, which would otherwise go on.
    if os.name == "nt":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)


_CAUSES = (
    (r"No space left on device|ENOSPC|Disk quota exceeded", "the disk is full: free some space"),
    (
        r"NewConnectionError|Failed to establish a new connection|NameResolutionError|"
        r"Temporary failure in name resolution|Connection refused|Network is unreachable|"
        r"ConnectTimeout|ReadTimeout|ProxyError|SSLError|Connection broken|from versions: none",
        "no network: pip cannot reach the package index (or set PIP_INDEX_URL to one it can)",
    ),
)


def _explain_failure(label: str, tail: Sequence[str]) -> str:
    text = "\n".join(tail)
    causes = [cause for pattern, cause in _CAUSES if re.search(pattern, text)]
    causes += [line for line in tail if re.match(r"(ERROR|error|Error)\b", line)]
    cause = causes[0] if causes else (tail[-1] if tail else "no output")
    return f"{label} failed: {cause}; log: {LOG}. Then run the same command again."


def _explain_os_error(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"set-up failed: {error.strerror or error}{where}; then run the same command again."


@contextmanager
def _lock() -> Iterator[int]:
    """Lets one set-up at a time touch ``.venv``; the others wait and say so.

    Yields the lock's file descriptor: whoever holds a copy of it keeps the lock.
    """
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "setup.lock").open("w") as handle:
        if os.name != "nt":
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("ci: waiting for another set-up of this clone", file=sys.stderr, flush=True)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()
