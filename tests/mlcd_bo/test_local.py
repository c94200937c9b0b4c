import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import mlcd_bo as mlcd

EXAMPLE = Path(__file__).parents[2] / "mlcd_bo" / "examples" / "train_digits.py"
SPACE = mlcd.SearchSpace(
    mlcd.Catalog([mlcd.InstanceType("thin", 3.0, vcpus=1)]), [1, 2], knobs={"pace_ms": [5]}
)
ONE, TWO = SPACE

pytestmark = pytest.mark.cluster


def script(folder, body):
    """A script that torchrun can start; most need no torch, which takes seconds to import."""
    path = folder / "train.py"
    path.write_text("import os, sys, time\nimport mlcd_bo\n" + textwrap.dedent(body))
    return path


def processes_of(path):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(path).encode() in words:
                found.append(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """After every test: no process of its script, nothing in the temporary folder."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    yield
    assert processes_of(tmp_path / "train.py") == []
    # torch keeps a cache of its own there.
    assert [f for f in temporary.iterdir() if not f.name.startswith("torchinductor")] == []


def wait_for(what):
    until = time.monotonic() + 120
    while not what() and time.monotonic() < until:
        time.sleep(0.05)
    assert what()


def profile(path, deployment=ONE, limits=None, **options):
    options = {"startup_s": 100.0, "probe_s": 10.0, **options}
    return mlcd.LocalTorchrun(path, **options).profile(
        deployment, limits or mlcd.Limits(seconds=120)
    )


def test_a_known_pace_is_measured_on_two_ranks(tmp_path):
    path = script(
        tmp_path,
        """
        assert os.environ["OMP_NUM_THREADS"] == "1" and os.environ["WORLD_SIZE"] == "2"
        pace = float(os.environ["MLCD_KNOB_PACE_MS"]) / 1000
        begun = time.monotonic() + 0.2
        for i in range(10**6):
            time.sleep(max(begun + pace * i - time.monotonic(), 0))
            assert mlcd_bo.step(32)
        """,
    )
    seen = profile(path, TWO, mlcd.Limits(seconds=120, half_width=0.05))
    assert seen.status == "ok", seen.detail
    # Two ranks of 32 samples every 5 ms.
    assert seen.speed == pytest.approx(64 / 0.005, rel=0.35)
    assert 0 < seen.speed_sem < seen.speed
    assert seen.dollars == pytest.approx(seen.seconds / 3600 * 6.0)


def test_steps_are_counted_where_the_job_counts_steps(tmp_path):
    path = script(tmp_path, "while mlcd_bo.step(): time.sleep(0.01)")
    limits = mlcd.Limits(seconds=120, half_width=0.2, unit="steps")
    seen = profile(path, limits=limits)
    assert seen.status == "ok", seen.detail
    # Each step takes 10 ms at least, and on a busy machine more.
    assert 2 < seen.speed <= 100.0


def test_a_surely_useless_speed_ends_the_trial_early(tmp_path):
    path = script(
        tmp_path,
        """
        for i in range(10**6):
            time.sleep(0.004 if i % 5 else 0.012)
            mlcd_bo.step(1)
        """,
    )
    limits = mlcd.Limits(seconds=120, half_width=1e-9, useful_speed=1e6)
    seen = profile(path, limits=limits, probe_s=20.0)
    assert seen.status == "ok", seen.detail
    # Not at the time limit.
    assert seen.detail == ""


def test_progress_is_read_from_the_log_of_a_script_that_cannot_be_changed(tmp_path):
    path = script(
        tmp_path,
        """
        begun = time.monotonic() + 0.2
        for i in range(1, 10**6):
            time.sleep(max(begun + 0.005 * i - time.monotonic(), 0))
            if i % 4 == 0:
                print(f"[{os.environ['RANK']}] step {i} loss 0.1 seen {1000 + 64 * i:,}")
        """,
    )
    pattern = r"step (?P<step>\d+) .* seen (?P<samples>[\d,]+)"
    limits = mlcd.Limits(seconds=120, half_width=0.05)
    seen = profile(path, TWO, limits, pattern=pattern)
    assert seen.status == "ok", seen.detail
    assert seen.speed == pytest.approx(64 / 0.005, rel=0.35)
    only_steps = profile(path, ONE, limits, pattern=r"step (?P<step>\d+)")
    assert only_steps.status == "error"
    assert "(?P<samples>...)" in only_steps.detail


CRASHES = {
    "on one rank": (
        """
        for i in range(10**6):
            mlcd_bo.step(1); time.sleep(0.01)
            if i == 3 and os.environ["RANK"] == "1":
                raise RuntimeError("rank one has had enough")
        """,
        "error",
        "rank one has had enough",
    ),
    "out of memory": (
        """
        mlcd_bo.step(1)
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        """,
        "oom",
        "out of memory",
    ),
    "killed by the kernel": ("import signal; os.kill(os.getpid(), signal.SIGKILL)", "oom", "-9"),
    "at once": ("raise SystemExit('no such data')", "error", "no such data"),
    "ended early": ("mlcd_bo.step(1)", "error", "too few to measure"),
    "never a step": ("time.sleep(0.1)", "error", "mlcd_bo.step"),
    "hangs": ("time.sleep(1000)", "timeout", "no step was reported"),
    "hangs after a few steps": (
        """
        for i in range(40): mlcd_bo.step(1)
        time.sleep(1000)
        """,
        "timeout",
        "after 40 steps: the script hangs",
    ),
    "one rank ends before the other": (
        """
        for i in range(10**6):
            if i == 40 and os.environ["RANK"] == "1": break
            time.sleep(0.002); mlcd_bo.step(1)
        """,
        "timeout",
        "one of its ranks has ended",
    ),
    "remarks on memory before it fails": (
        """
        print("note: offload avoids out of memory", flush=True)
        mlcd_bo.step(1)
        raise KeyError("batch")
        """,
        "error",
        "KeyError",
    ),
    "one rank silent": (
        """
        while True:
            time.sleep(0.05)
            if os.environ["RANK"] == "0": mlcd_bo.step(1)
        """,
        "timeout",
        r"ranks \[1\]",
    ),
    "NaN samples": (
        """
        while True:
            time.sleep(0.01); mlcd_bo.step(float("nan"))
        """,
        "error",
        "finite",
    ),
    "no samples": (
        """
        while True:
            time.sleep(0.01); mlcd_bo.step()
        """,
        "error",
        "without samples",
    ),
    "clock running backwards": (
        """
        import itertools
        clock = itertools.count(1000, -1)
        time.monotonic = lambda: float(next(clock))
        while True:
            time.sleep(0.01); mlcd_bo.step(1)
        """,
        "error",
        "backwards",
    ),
}


@pytest.mark.parametrize("name", CRASHES)
def test_failures_are_typed_and_leave_nothing(name, tmp_path):
    body, status, says = CRASHES[name]
    deployment = TWO if "rank" in name else ONE
    # How long until a first step, and then: only what is to time out is waited for to its end.
    waits = {"hangs": (9.0, 2.0), "one rank silent": (15.0, 2.0)}
    patience = waits.get(name, (100.0, 3.0) if status == "timeout" else (100.0, 60.0))
    seen = profile(
        script(tmp_path, body),
        deployment,
        mlcd.Limits(seconds=200),
        startup_s=patience[0],
        probe_s=patience[1],
    )
    assert seen.status == status, seen.detail
    assert math.isnan(seen.speed)
    assert seen.seconds > 0
    assert seen.dollars > 0
    assert re.search(says, seen.detail), seen.detail


def test_ranks_die_when_the_profiling_process_is_killed(tmp_path):
    path = script(tmp_path, "while True: time.sleep(0.05)")
    program = (
        "import mlcd_bo, sys\n"
        "d = mlcd_bo.Deployment(mlcd_bo.InstanceType('a', 1.0), 2)\n"
        "mlcd_bo.LocalTorchrun(sys.argv[1]).profile(d, mlcd_bo.Limits())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(path)])
    # This program, supervisor, launcher and both ranks name the script.
    wait_for(lambda: len(processes_of(path)) >= 5)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: processes_of(path) == [])
    # The folder of the trial, which its maker cannot remove any more, is gone as well.
    assert not list(Path(tempfile.gettempdir()).glob("mlcd-*"))


DISGUISED = """
import subprocess
if "MLCD_TRIAL" in os.environ:
    # As a changed process title does: nothing of the rank's environment can be read any more.
    kept = {k: v for k, v in os.environ.items() if k != "MLCD_TRIAL"}
    os.execve(sys.executable, [sys.executable, *sys.argv], kept)
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(1000)", __file__]
subprocess.Popen(sleep, start_new_session=True, env={})
while True: time.sleep(0.002); mlcd_bo.step(1)
"""


def test_what_hides_from_the_profiler_is_killed_too(tmp_path):
    seen = profile(script(tmp_path, DISGUISED), TWO, mlcd.Limits(seconds=120, half_width=0.5))
    assert seen.status == "ok", seen.detail
    assert processes_of(tmp_path / "train.py") == []


def test_ranks_die_although_the_pipe_to_the_killed_process_stays_open(tmp_path):
    path = script(tmp_path, "while True: time.sleep(0.05)")
    program = (
        "import mlcd_bo, os, subprocess, sys, threading, time\n"
        "d = mlcd_bo.Deployment(mlcd_bo.InstanceType('a', 1.0), 1)\n"
        "profiler = mlcd_bo.LocalTorchrun(sys.argv[1])\n"
        "run = lambda: profiler.profile(d, mlcd_bo.Limits())\n"
        "threading.Thread(target=run).start()\n"
        "sys.stdin.readline()\n"
        # Forked as a data loader's worker is, with every open file of its parent.
        "print(os.fork(), flush=True)\n"
        "time.sleep(1000)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    forked = None
    with parent:
        try:
            wait_for(lambda: len(processes_of(path)) >= 4)
            parent.stdin.write("\n")
            parent.stdin.flush()
            forked = int(parent.stdout.readline())
            parent.kill()
            parent.wait()
            wait_for(lambda: processes_of(path) == [forked])
        finally:
            parent.kill()
            if forked is not None:
                os.kill(forked, signal.SIGKILL)
    wait_for(lambda: processes_of(path) == [])
    assert not list(Path(tempfile.gettempdir()).glob("mlcd-*"))


def test_an_interrupt_from_another_thread_ends_the_trial(tmp_path):
    path = script(tmp_path, "while True: time.sleep(0.05)")
    profiler = mlcd.LocalTorchrun(path, startup_s=600.0)
    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(profiler.profile, ONE, mlcd.Limits(seconds=1200))
        wait_for(lambda: len(processes_of(path)) >= 3)
        profiler.interrupt()
        with pytest.raises(KeyboardInterrupt):
            trial.result(120)
    assert processes_of(path) == []


def test_refuses():
    with pytest.raises(mlcd.InvalidInput, match="not a file"):
        mlcd.LocalTorchrun("no/such/script.py")
    with pytest.raises(mlcd.InvalidInput, match="probe_s"):
        mlcd.LocalTorchrun(EXAMPLE, probe_s=0)
    with pytest.raises(mlcd.InvalidInput, match="regular expression"):
        mlcd.LocalTorchrun(EXAMPLE, pattern="(")
    with pytest.raises(mlcd.InvalidInput, match="needs a group"):
        mlcd.LocalTorchrun(EXAMPLE, pattern="step (.*)")


def test_recommends_for_a_real_ddp_script(tmp_path):
    images, labels = load_digits(return_X_y=True)
    data = tmp_path / "digits.npz"
    np.savez(data, images=images, labels=labels)
    kinds = [mlcd.InstanceType("plain", 3.0, vcpus=1), mlcd.InstanceType("golden", 30.0, vcpus=1)]
    space = mlcd.SearchSpace(mlcd.Catalog(kinds), [1, 2])
    search = mlcd.DeploymentOptimizer(
        space, mlcd.Scenario.cheapest_by(deadline=2.0), mlcd.Job(total_samples=4e6)
    )
    profiler = mlcd.LocalTorchrun(
        EXAMPLE, ["--data", str(data), "--width", "8"], probe_s=1.5, startup_s=100.0
    )
    best = search.run(profiler)
    # The same machine at ten times the price is never the cheapest.
    assert best.deployment.instance_type.name == "plain"
    assert best.measured
    assert best.total_dollars >= best.dollars + sum(t.observation.dollars for t in search.trials)
    assert all(t.observation.status == "ok" for t in search.trials)


KEEPS = """
import json
path = os.environ["MLCD_CHECKPOINT"]
done = json.load(open(path)) if os.path.exists(path) else 0
go_on = True
while go_on:
    time.sleep(0.002)
    done += 32 * int(os.environ["WORLD_SIZE"])
    go_on = mlcd_bo.step(32)
if os.environ["RANK"] == "0" and not os.environ.get("FORGETFUL"):
    json.dump(done, open(path, "w"))
"""


def test_what_a_trial_trains_is_kept_and_carried_on(tmp_path):
    kept = tmp_path / "progress.json"
    path = script(tmp_path, KEEPS)
    limits = mlcd.Limits(seconds=120, half_width=0.2, checkpoint=str(kept))
    first = profile(path, ONE, limits)
    assert first.work_done == json.loads(kept.read_text()) > 0
    second = profile(path, TWO, limits)
    # Both ranks stopped at one step, and the second trial went on from the first.
    assert first.work_done + second.work_done == json.loads(kept.read_text())
    search = mlcd.DeploymentOptimizer(
        SPACE, mlcd.Scenario.fastest(), mlcd.Job(total_samples=1e6, checkpoint=kept)
    )
    search.tell(mlcd.Trial(ONE, first))
    search.tell(mlcd.Trial(TWO, second))
    assert search.work_left == 1e6 - json.loads(kept.read_text())
    assert search.recommend().hours == pytest.approx(
        search.work_left / second.speed / 3600, rel=0.2
    )


def test_progress_that_was_not_saved_does_not_count(tmp_path):
    path = script(tmp_path, KEEPS)
    limits = mlcd.Limits(seconds=120, half_width=0.2, checkpoint=str(tmp_path / "progress.json"))
    seen = profile(path, ONE, limits, env={"FORGETFUL": "1"})
    assert seen.status == "ok"
    assert seen.work_done == 0.0
    assert "not kept" in seen.detail
