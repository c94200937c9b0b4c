import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import mlcd_bo as mlcd
from mlcd_bo._cli import main

YAML = """
dated: 2026-01
counts: [1, 2]
types:
  - {name: thin, price: 3.0, vcpus: 1}
  - {name: wide, price: 5.4, vcpus: 2, counts: [1]}
"""
TRACE = """job,instance_type,count,runtime_s,price_per_hour,status,speed
a,m5.large,1,1000,0.1,ok,
a,m5.large,2,600,0.1,ok,
a,m5.large,4,400,0.1,ok,
a,c5.large,1,,0.09,failed,
a,c5.large,2,650,0.09,ok,
a,c5.large,4,380,0.09,ok,
"""


@pytest.fixture
def catalog(tmp_path):
    path = tmp_path / "catalog.yaml"
    path.write_text(YAML)
    return str(path)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(TRACE)
    return str(path)


def test_plan_says_what_trials_would_cost(catalog, capsys):
    assert main(["plan", catalog, "--samples", "1e6", "--deadline", "5", "--probe-s", "120"]) == 0
    said = capsys.readouterr().out
    assert "3 deployments, cheapest by 5 h" in said
    assert "thin x1: 3 min, $0.15" in said
    assert "dearest trial of all costs at most $0.3" in said


def test_replay_and_its_report(trace, tmp_path, capsys):
    folder = tmp_path / "report"
    assert main(["replay", trace, "--deadline", "6", "--report", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "stops because" in said
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "ledger.png").stat().st_size > 1000
    assert not list(folder.glob("*.part"))


def test_replay_lists_jobs_and_columns(trace, capsys):
    with open(trace, "a") as file:
        file.write("b,m5.large,1,900,0.1,ok,\n")
    assert main(["replay", trace]) == 2
    assert "--list-jobs" in capsys.readouterr().err
    assert main(["replay", trace, "--list-jobs"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a  (measured runs: 6)",
        "b  (measured runs: 1)",
    ]
    with pytest.raises(SystemExit, match="0"):
        main(["replay", "--help"])
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in TRACE.splitlines()[0].split(","))


def test_nothing_feasible_has_its_own_status_and_still_a_report(trace, tmp_path, capsys):
    folder = tmp_path / "report"
    command = ["replay", trace, "--deadline", "0.5", "--report", str(folder)]
    assert main(command) == 3
    said = capsys.readouterr()
    assert "nearest miss" in said.err
    assert "nearest miss" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["plan", "CATALOG", "--samples", "0"], "total_samples"),
        (["plan", "CATALOG", "--samples", "1", "--budget", "-2"], "budget"),
        (["plan", "CATALOG", "--samples", "1", "--budget", "2", "--deadline", "2"], "objective"),
        (["plan", "CATALOG", "--samples", "1", "--strategy", "best"], "gittins"),
        (["plan", "CATALOG", "--samples", "1", "--counts", "0"], "counts"),
        (["plan", "CATALOG", "--samples", "1", "--seed", "-1"], "seed must be a whole number"),
        (["plan", "CATALOG", "--samples", "nan"], "total_samples"),
        (["run", "CATALOG", "x.py", "--samples", "1", "--args", '"x'], "--args '\"x' cannot be"),
        (["plan", "no.yaml", "--samples", "1"], "cannot be read"),
        (["run", "CATALOG", "no_script.py", "--samples", "1"], "not a file"),
        (["replay", "no.csv"], "cannot be read"),
        (["resume", "no.db"], "is not there"),
        (["report", "no.db", "folder"], "is not there"),
        (["catalog", "CATALOG", "--names", "x"], "no type 'x'"),
        (["catalog", "--names", "x9.huge"], "x9.huge"),
        (["catalog", "CATALOG", "--prices", "nofile"], "--prices goes with"),
        (["plan", "CATALOG", "--samples", "1", "--trials", "0"], "--trials must be at least 1"),
        (["resume", "no.db", "--counts", "1"], "--counts goes with --catalog"),
    ],
)
def test_bad_input_is_one_line(command, says, catalog, capsys):
    assert main([catalog if word == "CATALOG" else word for word in command]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.startswith("mlcd: ")
    assert "Traceback" not in said


def test_edited_stores_and_full_disks_are_one_line(tmp_path, capsys, monkeypatch):
    store = tmp_path / "search.db"
    kinds = mlcd.Catalog([mlcd.InstanceType("a", 1.0)])
    space = mlcd.SearchSpace(kinds, [1, 2])
    mlcd.DeploymentOptimizer(space, mlcd.Scenario.fastest(), mlcd.Job(total_steps=9), store=store)
    with closing(sqlite3.connect(store)) as database, database:
        database.execute("UPDATE search SET content = '[]'")
    for command in (["resume", str(store)], ["report", str(store), str(tmp_path / "out")]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.startswith("mlcd: store")
        assert "damaged or was edited" in said

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mlcd.Catalog, "aws", full)
    assert main(["catalog"]) == 2
    assert "No space left on device; check the path" in capsys.readouterr().err


def test_catalog_lists(catalog, capsys):
    assert main(["catalog", "--names", "g5.xlarge", "m5.large"]) == 0
    said = capsys.readouterr().out
    assert "1 x A10G" in said
    assert "prices: 2024-12, from memory" in said
    assert main(["catalog", catalog]) == 0
    assert "prices: 2026-01" in capsys.readouterr().out


def test_a_csv_catalogue_needs_counts_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "PRICES.CSV"
    path.write_text("name,price\na,1\n")
    assert main(["plan", str(path), "--samples", "1"]) == 2
    assert "--counts 1 2 4" in capsys.readouterr().err
    assert main(["plan", str(path), "--samples", "1", "--counts", "1", "2"]) == 0


def test_a_report_that_cannot_be_written_is_refused_before_any_trial(
    trace, tmp_path, capsys, monkeypatch
):
    (tmp_path / "file").touch()
    command = ["replay", trace, "--deadline", "6", "--report"]
    assert main([*command, str(tmp_path / "file" / "out")]) == 2
    said = capsys.readouterr()
    assert "cannot be written" in said.err
    assert said.out == ""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*command, str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert "mlcd-bo[plot]" in said.err
    assert said.out == ""


def test_the_recommendation_is_printed_whatever_the_report_does(
    trace, tmp_path, capsys, monkeypatch
):
    def fails(*_args):
        raise mlcd.StoreError("the disk is full")

    monkeypatch.setattr(mlcd.DeploymentOptimizer, "report", fails)
    command = ["replay", trace, "--deadline", "6", "--report", str(tmp_path / "out")]
    assert main(command) == 2
    said = capsys.readouterr()
    assert "stops because" in said.out
    assert "the disk is full" in said.err


def test_output_that_nobody_reads_to_its_end_is_no_error():
    command = [sys.executable, "-m", "mlcd_bo", "catalog"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as listing:
        listing.stdout.close()
        assert listing.stderr.read() == b""
    assert listing.returncode == 0


def test_a_single_candidate_says_why_it_stops(tmp_path, capsys):
    path = tmp_path / "one.csv"
    path.write_text(TRACE.split("a,m5.large,2")[0])
    assert main(["replay", str(path)]) == 0
    assert "there is no other deployment to try" in capsys.readouterr().out


def test_usage_of_both_entry_points():
    for command in ([sys.executable, "-m", "mlcd_bo"], [Path(sys.executable).with_name("mlcd")]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"mlcd-bo {mlcd.__version__}"


@pytest.mark.cluster
def test_run_then_resume_on_a_real_script(catalog, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = Path("train.py")
    script.write_text(
        "import sys, time, mlcd_bo\n"
        "assert sys.argv[1:] == ['--pace', '0.004']\n"
        "while mlcd_bo.step(8): time.sleep(0.004)\n"
    )
    store = tmp_path / "search.db"
    options = ["--probe-s", "1.2", "--startup-s", "100"]
    command = ["run", catalog, str(script), "--args=--pace 0.004", "--samples", "1e5"]
    command += ["--deadline", "2", "--store", str(store), *options]
    assert main(command) == 0
    first = capsys.readouterr().out
    # From another folder, and with nothing said again.
    monkeypatch.chdir(tmp_path.parent)
    assert main(["resume", str(store)]) == 0
    again = capsys.readouterr().out
    assert again.splitlines() == first.splitlines()
    kept = mlcd._store.Store(store).options()
    assert kept == {"probe_s": 1.2, "startup_s": 100.0, "pattern": None, "folder": str(tmp_path)}
    assert main(["report", str(store), str(tmp_path / "report")]) == 0
    assert os.path.exists(tmp_path / "report" / "report.html")
    cheaper = YAML.replace("price: 3.0", "price: 2.0")
    Path(catalog).write_text(cheaper)
    assert main(["resume", str(store), "--catalog", catalog, *options]) == 2
    assert "accept_prices" in capsys.readouterr().err
