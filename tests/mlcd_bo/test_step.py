import os
import subprocess
import sys
from pathlib import Path

import pytest

import mlcd_bo as mlcd
from mlcd_bo import profilers
from mlcd_bo.profilers._process import TorchrunProcess
from mlcd_bo.profilers._reports import StepReports
from mlcd_bo.profilers._sky import _Log


def run(program, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MLCD")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_outside_a_trial_it_does_nothing():
    assert run("import mlcd_bo; print(mlcd_bo.step(3), mlcd_bo.step())") == "True True\n"


def test_importing_is_light():
    loaded = run("import sys, mlcd_bo; print(*sorted(sys.modules))").split()
    heavy = {"torch", "botorch", "gpytorch", "scipy.special", "ray", "matplotlib", "sky", "sqlite3"}
    assert heavy & set(loaded) <= {"sqlite3"}


def test_reports_are_summed_over_ranks_and_end_with_the_slowest(tmp_path):
    program = "import mlcd_bo\nfor n in (1, 2, 3): mlcd_bo.step(10 * n)"
    for rank in range(2):
        run(program, MLCD_REPORT=str(tmp_path), RANK=str(rank))
    reports = StepReports(tmp_path, 2)
    assert reports.read()
    assert not reports.read()
    times, samples = reports.series("samples")
    assert samples.tolist() == [20, 40, 60]
    assert reports.series("steps")[1].tolist() == [1, 1, 1]
    last = [line.split()[0] for line in (tmp_path / "rank-1").read_text().splitlines()]
    assert times.tolist() == [float(stamp) for stamp in last]


def test_half_a_line_waits_for_its_end(tmp_path):
    reports = StepReports(tmp_path, 1)
    assert not reports.read()
    (tmp_path / "rank-0").write_text("1.5 1 8\n2.5 2")
    assert reports.read()
    assert reports.steps == 1
    with open(tmp_path / "rank-0", "a") as file:
        file.write(" 8\n")
    assert reports.read()
    assert reports.steps == 2
    assert reports.span_s == 1.0


def test_all_ranks_stop_at_one_step(tmp_path):
    reports = StepReports(tmp_path, 1)
    (tmp_path / "rank-0").write_text("1.0 1 8\n2.0 2 8\n")
    reports.read()
    reports.ask_to_stop(after=3)
    program = "import mlcd_bo\nprint(*[mlcd_bo.step(1) for _ in range(7)])"
    for rank in "0", "1":
        told = run(program, MLCD_REPORT=str(tmp_path), RANK=rank).split()
        assert told == ["True"] * 4 + ["False"] * 3


def test_printed_reports_are_what_the_log_reader_reads():
    program = "import mlcd_bo\nfor _ in range(8): assert mlcd_bo.step(16)"
    lines = "".join(run(program, MLCD_REPORT_LINES="1", RANK=str(rank)) for rank in range(2))

    class Client:
        def lines(self, cluster, job):
            yield from lines.splitlines()
            while True:
                yield None

    log = _Log(Client(), "c", 0, 2)
    assert log.read()
    assert log.steps == 8
    assert log.series("samples")[1].tolist() == [32] * 8


def test_profilers_are_found_by_name():
    assert {"local", "ray", "sky", "trace"} <= set(profilers.available())
    assert profilers.get("local") is mlcd.LocalTorchrun
    with pytest.raises(mlcd.UnknownName, match=r"'lokal'.*local"):
        profilers.get("lokal")


def test_another_distribution_adds_a_profiler(tmp_path):
    """As pip would lay it out: a package folder without our two ``__init__``, and its metadata."""
    package = tmp_path / "mlcd_bo" / "profilers" / "clay"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class Clay:\n    pass\n")
    info = tmp_path / "mlcd_clay-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlcd-clay\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[mlcd_bo.profilers]\nclay = mlcd_bo.profilers.clay:Clay\n"
    )
    program = (
        "from mlcd_bo import profilers\nimport mlcd_bo.profilers.clay as clay\n"
        "assert 'clay' in profilers.available() and profilers.get('clay') is clay.Clay"
    )
    run(program, PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path.cwd())]))


def test_the_end_of_a_log_is_short_whatever_the_script_prints(tmp_path):
    trial = TorchrunProcess.__new__(TorchrunProcess)
    trial._log = tmp_path / "log"
    trial._log.write_text("begin\n" + "x" * 5_000_000 + "end\nlast words\n")
    lines = trial.tail().splitlines()
    assert lines[-1] == "last words"
    assert lines[-2].endswith("xend")
    assert len(trial.tail()) < 2000
