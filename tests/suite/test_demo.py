"""The demo's runner: one bad job does not hide the others, and nothing stays behind."""

import contextlib
import html
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from ci import demo, processes
from ci.demo import run_demo
from ci.layout import PLUGINS, ROOT

JOBS = "tests.suite.demo_jobs"


def test_good_job_gives_row_plot_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_demo(["good"], tmp_path, JOBS) == 0
    row = json.loads((tmp_path / "good" / "result.json").read_text())
    assert row["measures"] == [{"name": "size", "without": 2, "with_plugin": 1, "unit": "bytes"}]
    assert row["seconds"] > 0
    printed = capsys.readouterr()
    assert "2 bytes" in printed.out
    assert "1 byte" in printed.out
    assert str(tmp_path / "index.html") in printed.out
    assert "half way" in printed.err
    page = (tmp_path / "index.html").read_text()
    assert "two points &lt;of&gt; 1 &amp; 0" in page
    assert not re.search(r'(src|href)="(?!data:)', page), "the page must be self-contained"


def test_failing_job_is_named_and_the_next_still_runs(tmp_path: Path, capsys):
    assert run_demo(["failing", "good"], tmp_path, JOBS) == 1
    printed = capsys.readouterr()
    assert "the wheel came off" in printed.out
    assert "2 bytes" in printed.out
    page = (tmp_path / "index.html").read_text()
    assert "the wheel came off" in page
    assert "A falling line." in page


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("brackets", "no such folder [/tmp/ray] [red]"),
        ("unreadable", "left no whole result"),
        ("plotless", "left no whole result"),
        ("talkative", "xxx"),
        ("hanging", "stopped after 1 s"),
    ],
)
def test_odd_job_does_not_hide_the_next(job: str, why: str, tmp_path: Path, capsys, monkeypatch):
    if job == "hanging":
        monkeypatch.setattr(demo, "TIMEOUT_S", 1.0)
        (tmp_path / "good").mkdir()
        assert run_demo([job], tmp_path, JOBS) == 1
    else:
        assert run_demo([job, "good"], tmp_path, JOBS) == 1
        assert "A falling line." in (tmp_path / "index.html").read_text()
    printed = capsys.readouterr().out
    assert why.split()[0] in printed
    assert len(printed) < 10_000
    assert html.escape(why) in (tmp_path / "index.html").read_text()


def test_stale_result_is_not_shown_for_a_failing_job(tmp_path: Path, capsys):
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "result.json").write_text("{}")
    assert run_demo(["failing"], tmp_path, JOBS) == 1
    assert not (tmp_path / "failing" / "result.json").exists()


def test_forgotten_daemon_is_a_failure(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 0.5)
    assert run_demo(["forgetful"], tmp_path, JOBS) == 1
    assert "left processes behind" in capsys.readouterr().out


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_real_job_of_each_plugin(plugin: str, tmp_path: Path, capsys):
    status = run_demo([plugin], tmp_path)
    assert status == 0, capsys.readouterr().out
    row = json.loads((tmp_path / plugin / "result.json").read_text())
    assert row["measures"]
    for measure in row["measures"]:
        assert math.isfinite(measure["without"]), measure
        assert math.isfinite(measure["with_plugin"]), measure
    assert "<svg" in (tmp_path / plugin / "plot.svg").read_text()


@pytest.mark.cluster
@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_demo_leaves_no_process(signal_number: int):
    mark = f"DEMO_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    with subprocess.Popen(
        [sys.executable, "-m", "ci", "demo", "--only", "kingpin_ray"],
        cwd=ROOT,
        env={**os.environ, name: value},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        # Interrupted once Ray is up, which is when there is something to leave behind.
        while not any(b"raylet" in command for command in _marked(mark).values()):
            assert demo.poll() is None, demo.stderr and demo.stderr.read()
            time.sleep(0.1)
        demo.send_signal(signal_number)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert _marked(mark) == {}


def _marked(mark: str) -> dict[int, bytes]:
    """Returns the command lines of the living processes that inherited a mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # Ray's workers write their titles over the start of this.
                if mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes()
    return found
