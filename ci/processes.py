"""Runs a command so that nothing of it outlives it: no process, no temporary file.

On Linux this process declares itself the reaper of orphans (``prctl(PR_SET_CHILD_SUBREAPER)``),
so daemons that a command starts and forgets become its children and can be found and ended.
Elsewhere the command's process group is ended, which catches all but detached daemons.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ci.layout import BUILD, ROOT

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_BASE = 24  # characters of the temporary folder's parent, to keep Ray's sockets short enough
_PREFIX = "ci-"
_OWNER = ".ci-owner"
_GRACE_S = 8.0  # Ray's and Flower's helpers need some seconds to notice that their parent is gone


@dataclass(frozen=True)
class Finished:
    """How a command ended.

    Attributes:
        status: its exit status, negative for a signal.
        leftovers: command lines of processes that were still running after the grace period and
            had to be killed.
        timed_out: whether it was ended because its time was up.
    """

    status: int
    leftovers: tuple[str, ...]
    timed_out: bool = False


@contextmanager
def scratch() -> Iterator[dict[str, str]]:
    """Yields an environment whose temporary files and caches lie in places of this repository's.

    The temporary folder has a short name because Ray puts Unix sockets there, whose paths may
    not exceed 107 bytes; it is removed at the end. Caches stay in ``build/cache``.
    """
    base = tempfile.gettempdir()
    if len(base) > _MAX_BASE and os.access("/tmp", os.W_OK):
        base = "/tmp"
    _sweep(Path(base))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    (folder / _OWNER).write_text(str(os.getpid()), encoding="ascii")
    cache = BUILD / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "TMPDIR": str(folder),
        "RAY_TMPDIR": str(folder),
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "MPLCONFIGDIR": str(cache / "matplotlib"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "NUMBA_CACHE_DIR": str(cache / "numba"),
    }
    try:
        yield environment
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Removes what a killed command of this kind left: its folder and who still works there."""
    for owner in base.glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError):
            if owner.stat().st_uid != os.getuid() or _alive(int(owner.read_text("ascii"))):
                continue
            mark = f"TMPDIR={owner.parent}".encode()
            for entry in os.listdir("/proc") if sys.platform == "linux" else ():
                with contextlib.suppress(OSError):
                    if entry.isdigit() and mark in Path("/proc", entry, "environ").read_bytes():
                        os.kill(int(entry), signal.SIGKILL)
            shutil.rmtree(owner.parent, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
    cwd: Path = ROOT,
) -> Finished:
    """Runs a command to its end and ends whatever it leaves behind.

    Args:
        command: the program and its arguments.
        env: its environment; this process's own by default.
        on_line: called with each line of its output, which is then not shown; by default the
            command writes to this process's terminal.
        timeout_s: after this many seconds the command is ended.
        cwd: the folder it runs in.

    Returns:
        Its status and what it left behind. An interrupt ends the command and everything it
        started before it is passed on.
    """
    _adopt_orphans()
    others = frozenset(_descendants())
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if on_line else None,
        stderr=subprocess.STDOUT if on_line else None,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )
    # A thread reads, because a daemon that inherited the pipe would keep it open for ever.
    problems: list[Exception] = []
    reader = threading.Thread(target=_pump, args=(process, on_line, problems), daemon=True)
    reader.start()
    leftovers: tuple[str, ...] = ()
    timed_out = False
    grace_s = 0.0
    try:
        try:
            process.wait(timeout_s)
            grace_s = _GRACE_S
        except subprocess.TimeoutExpired:
            timed_out = True
        except KeyboardInterrupt:
            # A second interrupt does not wait for the command to tidy up.
            _signal_group(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(_GRACE_S)
            raise
    finally:
        leftovers = _end(process, others, grace_s)
        reader.join(5)
    if problems:
        raise problems[0]
    return Finished(process.returncode, () if timed_out else leftovers, timed_out)


def _pump(
    process: subprocess.Popen[str],
    on_line: Callable[[str], None] | None,
    problems: list[Exception],
) -> None:
    """Hands lines on; after a problem it reads on, so that the command is not held up."""
    if on_line and process.stdout:
        with process.stdout:
            for line in process.stdout:
                if not problems:
                    try:
                        on_line(line.rstrip("\n"))
                    except Exception as problem:  # raised again by run()
                        problems.append(problem)


def _end(process: subprocess.Popen[str], others: frozenset[int], grace_s: float) -> tuple[str, ...]:
    """Waits for what a command left running, then kills it, and returns what it was.

    Args:
        process: the command.
        others: this process's descendants from before the command, which are left alone.
        grace_s: how long to wait.
    """

    def remaining() -> list[int]:
        return [pid for pid in _descendants() if pid not in others]

    deadline = time.monotonic() + grace_s
    try:
        while remaining() and time.monotonic() < deadline:
            time.sleep(0.05)
        return tuple(filter(None, map(_command_line, remaining())))
    finally:
        with _undisturbed():
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            for _ in range(200):
                alive = remaining()
                if not alive:
                    break
                for pid in alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignores interrupts for the moment that the last kill takes."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):
        numbers.append(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _descendants() -> list[int]:
    """Returns the living processes below this one (Linux; elsewhere none are known)."""
    if sys.platform != "linux":
        return []
    parents: dict[int, int] = {}
    zombies: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            parents[int(entry)] = int(fields[1])
            if fields[0] == "Z":
                zombies.add(int(entry))
    found: list[int] = []
    layer = {os.getpid()}
    while layer:
        layer = {pid for pid, parent in parents.items() if parent in layer}
        found += layer
    for pid in zombies.intersection(found):
        # Only orphans that came to us are reaped here; a live parent reaps its own.
        if parents[pid] == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return [pid for pid in found if pid not in zombies]


def _command_line(pid: int) -> str:
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:160]


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Asks Linux, in a new child, to end it when its parent is gone, however that ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
