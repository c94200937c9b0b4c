"""Runs one command and leaves nothing of it behind, however the process that asked for it ends.

Started as a plain script with a pipe on standard input: when the pipe closes, because the caller
is done or because it was killed, every process of the trial is killed. torchrun starts each rank
in a session of its own (torch 2.13), so killing its process group would leave the ranks running;
they are found by an environment variable that they all inherit.

Standard library only, and no import of the package: it must be up in a few milliseconds.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

MARK = "MLCD_TRIAL"
_PR_SET_CHILD_SUBREAPER = 36


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
    """Returns every process below `root`, for systems without /proc."""
    listing = subprocess.run(
        ["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=False
    ).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    ahead = [root]
    while ahead:
        pid = ahead.pop()
        if pid not in found:
            found.add(pid)
            ahead += children.get(pid, [])
    return found


def kill_all(token: str, root: int, patience_s: float = 10.0) -> None:
    """Kills the whole trial and waits until none of it is left."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        alive = marked(token) if os.path.isdir("/proc") else descendants(root)
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
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, MARK: token})
    status = 0

    def watch_caller() -> None:
        while os.read(0, 4096):
            pass
        kill_all(token, child.pid)
        os._exit(128 + signal.SIGKILL)

    # A terminal's Ctrl-C goes to the caller, which closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch_caller, daemon=True).start()
    status = child.wait()
    kill_all(token, child.pid)
    # os._exit: the watching thread still sits in read().
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
