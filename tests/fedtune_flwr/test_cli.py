import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtune_flwr import METRICS, Log, Policy, SearchSpace, TuneReport
from fedtune_flwr._cli import main
from fedtune_flwr._plots import svg
from fedtune_flwr._tables import read_metrics, write_metrics
from tests.fedtune_flwr.apps import blobs, new_model

MODEL = "tests.fedtune_flwr.apps:new_model"


@pytest.fixture
def files(tmp_path):
    for name, data in (("proxy", blobs(99, 150)), ("a", blobs(1, 40)), ("b", blobs(2, 40, 0.9))):
        np.savez(tmp_path / f"{name}.npz", x=data[0].numpy(), y=data[1].numpy())
    torch.save(new_model().state_dict(), tmp_path / "reference.pt")
    return tmp_path


def test_profile_tune_explain_plot(files, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    table = files / "metrics.csv"
    for name in ("a", "b", "a", "b"):
        assert main(["profile", str(files / f"{name}.npz"), "--model", MODEL,
                     "--reference", str(files / "reference.pt"), "--append", str(table)]) == 0  # fmt: skip  # noqa: E501
    assert len(read_metrics(table)) == 4
    assert "label-entropy" in capsys.readouterr().out
    policy, report = files / "policy.json", files / "report.json"
    assert main(["tune", str(table), "--proxy", str(files / "proxy.npz"), "--model", MODEL,
                 "--dim", "lr=log:0.05:1", "--dim", "local-epochs=int:1:2", "--tuner", "sobol",
                 "--dim", "momentum=choice:0.0:0.5", "--default", "batch-size=8",
                 "--budget", "12", "--rounds", "2", "--objective", "personal",
                 "--policy", str(policy), "--report", str(report)]) == 0  # fmt: skip
    for path in (policy, files / "policy-personal.json"):
        assert set(Policy.load(path).space) == {"lr", "local-epochs", "momentum"}
    assert main(["explain", str(policy), "--metrics", str(table)]) == 0
    out = capsys.readouterr().out
    assert out.count("weight x") == 4
    assert main(["explain", str(report)]) == 0
    assert "evaluations" in capsys.readouterr().out
    assert main(["bench", str(policy), str(table), "--proxy", str(files / "proxy.npz"),
                 "--model", MODEL, "--emulations", "3", "--rounds", "2"]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "equal weights" in out
    assert out.count("+-") == 4
    page = files / "report.html"
    assert main(["plot", str(report), "--out", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 1
    assert all(name in text for name in METRICS)
    # Self-contained: nothing is loaded from elsewhere.
    assert "src=" not in text
    assert "@import" not in text
    assert main(["plot", str(report), "--out", str(files / "plot.png")]) == 0
    assert (files / "plot.png").stat().st_size > 1000
    assert TuneReport.load(report).personal is not None


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["profile", "absent.npz"], "npz"),
        (["profile", "{a}"], "classes="),
        (["profile", "{a}", "--model", "nowhere:f"], "MODULE:FUNCTION"),
        (["profile", "{a}", "--model", "math:pi"], "not a function"),
        (["tune", "no.csv", "--proxy", "{a}", "--model", MODEL, "--dim", "lr=log:1:2"], "no.csv"),
        (["tune", "m", "--proxy", "{a}", "--model", MODEL, "--dim", "lr=cubic:1:2"], "--dim"),
        (["tune", "m", "--proxy", "{a}", "--model", MODEL, "--dim", "lr=log:a:2"], "--dim"),
        (["tune", "m", "--proxy", "{a}", "--model", MODEL, "--dim", "lr=log:2:1"], "below high"),
        (["tune", "m", "--proxy", "{a}", "--model", MODEL, "--dim", "lr=log:1:2",
          "--default", "b=x"], "NUMBER"),
        (["explain", "absent.json"], "absent.json"),
        (["bench", "x.json", "m", "--proxy", "{a}", "--model", MODEL, "--rounds", "0"], "--rounds"),
        (["bench", "x.json", "m", "--proxy", "{a}", "--model", MODEL], "x.json"),
        (["plot", "absent.json"], "absent.json"),
        (["new", "3app"], "identifier"),
    ],
)  # fmt: skip
def test_mistakes_get_one_line_and_status_1(files, command, words, capsys, monkeypatch):
    monkeypatch.chdir(files)
    filled = [part.format(a=files / "a.npz") for part in command]
    assert main(filled) == 1
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "tune",
            ["{bayes,random,sobol}", "(default: bayes)", "(default: 48)", "{global,personal}"],
        ),
        ("bench", ["(default: 8)", "(default: 20)"]),
        ("plot", ["(default: report.html)"]),
        ("profile", ["npz with x and y"]),
        ("explain", ["policy.json or report.json"]),
        ("new", ["of the app and its folder"]),
    ],
)
def test_help_shows_choices_and_defaults(command, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for word in words:
        assert word in shown


def test_plots_of_a_report_with_nothing_to_show_say_so():
    pytest.importorskip("matplotlib")
    policy = Policy.constant(SearchSpace(lr=Log(0.1, 1.0)))
    text = svg(TuneReport(policy, None, (), ({}, {}), 0.0, 0.0, "bayes"))
    for words in ("no client reported both", "nothing to compare", "no trial", "What each client"):
        assert words in text


def test_metrics_files(tmp_path):
    path = tmp_path / "m.csv"
    rows = [{"log-size": 3.1192, "label-entropy": 0.5}, {"reference-loss": 2.0}]
    write_metrics(path, rows)
    assert read_metrics(path) == [pytest.approx(r) for r in rows]
    for text, words in (("a,b\n1,2\n", "no column"), ("log-size\n", "no row"),
                        ("log-size\nbig\n", "line 2")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(Exception, match=words):
            read_metrics(path)


def test_the_template_is_a_flower_app_that_imports(tmp_path, monkeypatch):
    assert main(["new", "my-app", "--folder", str(tmp_path)]) == 0
    assert main(["new", "my-app", "--folder", str(tmp_path)]) == 1
    root = tmp_path / "my-app"
    for path in root.rglob("*.py"):
        ast.parse(path.read_text())
        assert "@" not in path.read_text().replace("@app", "").replace("@cache", "")
    monkeypatch.syspath_prepend(str(root))
    import importlib

    client = importlib.import_module("my_app.client_app").app
    assert set(client._registered_funcs) == {"train.default", "evaluate.default", "query.fedtune"}
    importlib.import_module("my_app.server_app")


def test_module_and_console_script_agree():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fedtune_flwr", "--help"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(sys.prefix),
        check=True,
    )
    assert "profile" in done.stdout
