"""The runner of commands: what a command leaves behind is found, named and ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ci import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux")

# A daemon in a session of its own, whose parent is gone: what Ray and Flower leave when killed.
DAEMON = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_status_and_output_are_handed_back():
    lines: list[str] = []
    command = [sys.executable, "-c", "print('one'); print('two'); raise SystemExit(7)"]
    finished = processes.run(command, on_line=lines.append)
    assert finished == processes.Finished(7, ())
    assert lines == ["one", "two"]


def test_daemon_is_reported_and_killed(monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 0.3)
    lines: list[str] = []
    finished = processes.run([sys.executable, "-c", DAEMON], on_line=lines.append)
    assert finished.status == 0
    [leftover] = finished.leftovers
    assert "time.sleep(600)" in leftover
    assert not _alive(int(lines[0]))


def test_own_children_from_before_are_left_alone(monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 0.2)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        finished = processes.run([sys.executable, "-c", "pass"])
        assert finished == processes.Finished(0, ())
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_timeout_ends_the_command():
    began = time.monotonic()
    finished = processes.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=0.5)
    assert finished == processes.Finished(-signal.SIGKILL, (), timed_out=True)
    assert time.monotonic() - began < 60


# How many interrupts, so close together that they meet the one before being dealt with.
@pytest.mark.parametrize("interrupts", [1, 4])
def test_interrupt_ends_command_and_daemon(tmp_path: Path, interrupts: int):
    script = tmp_path / "outer.py"
    script.write_text(
        "import sys\nfrom ci import processes\n"
        f"inner = {DAEMON + 'import time; time.sleep(600)'!r}\n"
        "processes.run([sys.executable, '-c', inner], on_line=lambda l: print(l, flush=True))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(processes.ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as outer:
        assert outer.stdout is not None
        daemon = int(outer.stdout.readline())
        for _ in range(interrupts):
            outer.send_signal(signal.SIGINT)
            time.sleep(0.2)
        outer.communicate(timeout=60)
    assert outer.returncode != 0
    assert not _alive(daemon)


def test_scratch_is_short_private_and_removed():
    with processes.scratch() as env:
        folder = Path(env["TMPDIR"])
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "left").write_text("over")
    assert not folder.exists()


def test_what_a_killed_command_left_is_swept_by_the_next(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(processes.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(processes, "_MAX_BASE", 1000)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, foreign = tmp_path / "ci-stale", tmp_path / "ci-foreign"
    stale.mkdir()
    foreign.mkdir()
    (stale / processes._OWNER).write_text(str(dead.pid))
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, "TMPDIR": str(stale)},
    ) as worker:
        with processes.scratch() as env:
            assert Path(env["TMPDIR"]).parent == tmp_path
            assert not stale.exists()
            assert foreign.exists(), "a folder without our mark is somebody else's"
        assert worker.wait(30) == -signal.SIGKILL


def test_problem_of_the_listener_is_raised_and_does_not_block():
    def refuse(line: str) -> None:
        raise OSError(28, "No space left on device")

    code = "for i in range(100_000): print(i)"
    with pytest.raises(OSError, match="No space left"):
        processes.run([sys.executable, "-c", code], on_line=refuse)
