"""Runs one command and leaves nothing of it behind, however the process that asked for it ends.

Started as a plain script with a pipe on standard input: when the pipe closes, because the caller
is done or because it was killed, every process of the trial is killed. torchrun starts each rank
in a session of its own (torch 2.13), so killing its process group would leave the ranks running.
They are found in two ways: as descendants of this process, which adopts orphans on Linux, so also
those that changed their title or cleared their environment; and by an environment variable that
they inherit.

Standard library only, and no import of the package: it must be up in a few milliseconds.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

MARK = "MLCD_TRIAL"
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.5


def marked(token: str) -> set[int]:
    """Returns the processes that carry the trial's mark, apart from this one."""
    wanted = f"{MARK}={token}".encode()
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.add(int(name))
    return found


def descendants(root: int) -> set[int]:
    """Returns every process below `root`, zombies too."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    ahead = list(children.get(root, []))
    while ahead:
        pid = ahead.pop()
        if pid not in found:
            found.add(pid)
            ahead += children.get(pid, [])
    return found


def _parents() -> list[tuple[int, int]]:
    """Returns each process with its parent."""
    if not os.path.isdir("/proc"):
        listing = subprocess.run(
            ["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=False
        ).stdout
        return [(int(pid), int(parent)) for pid, parent in map(str.split, listing.splitlines())]
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name in parentheses may hold anything: the fields come after its last one.
                found.append((int(name), int(file.read().rpartition(b")")[2].split()[1])))
    return found


def kill_all(token: str, root: int, patience_s: float = 10.0) -> None:
    """Kills the whole trial and waits until none of it is left."""
    deadline = time.monotonic() + patience_s
    linux = os.path.isdir("/proc")
    while time.monotonic() < deadline:
        alive = marked(token) | descendants(os.getpid()) if linux else descendants(root) | {root}
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        # A second look that finds nothing: no process forked between listing and killing.
        if not alive:
            return
        time.sleep(0.01)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _adopt_orphans() -> None:
    # Ranks whose launcher was killed come to us, not to an init that may not collect them.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main() -> None:
    """Runs ``argv[2:]`` marked with the token ``argv[1]``; exits with its status."""
    token, command = sys.argv[1], sys.argv[2:]
    _adopt_orphans()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, MARK: token})
    except OSError as problem:
        print(f"{command[0]!r} cannot be started: {problem.strerror}", flush=True)
        os._exit(127)
    caller = os.getppid()
    ordered = threading.Event()

    def watch_caller() -> None:
        done = False
        # A process that the caller has forked may hold the pipe open after the caller's death.
        while os.getppid() == caller:
            if select.select([0], [], [], _LOOK_S)[0]:
                word = os.read(0, 4096)
                done |= bool(word)
                if not word:
                    break
        ordered.set()
        kill_all(token, child.pid)
        if not done and "MLCD_REPORT" in os.environ:
            # The caller was killed, so nobody else will remove the trial's folder.
            shutil.rmtree(os.environ["MLCD_REPORT"], ignore_errors=True)
        os._exit(128 + signal.SIGKILL)

    # A terminal's Ctrl-C goes to the caller, which closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watcher = threading.Thread(target=watch_caller, daemon=True)
    watcher.start()
    status = child.wait()
    if ordered.is_set():
        # The order has ended the child; whoever carries it out ends this process, too.
        watcher.join()
    kill_all(token, child.pid)
    # os._exit: the watching thread still sits in read().
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
