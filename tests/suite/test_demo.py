"""The demo's runner: one bad job does not hide the others, and nothing stays behind."""

import json
import re
from pathlib import Path

import pytest

from ci import processes
from ci.demo import run_demo

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


def test_stale_result_is_not_shown_for_a_failing_job(tmp_path: Path, capsys):
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "result.json").write_text("{}")
    assert run_demo(["failing"], tmp_path, JOBS) == 1
    assert not (tmp_path / "failing" / "result.json").exists()


def test_forgotten_daemon_is_a_failure(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 0.5)
    assert run_demo(["forgetful"], tmp_path, JOBS) == 1
    assert "left processes behind" in capsys.readouterr().out
