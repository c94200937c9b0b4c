"""The command line: arguments reach the right place, and no ending shows a traceback."""

import subprocess
import sys

import pytest

from ci.command_line import _parser
from ci.layout import ROOT


def _ci(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ci", *arguments],
        cwd=ROOT,
        text=True,
        check=False,
        **{"capture_output": True, **options},
    )


@pytest.mark.parametrize("option", ["--co", "--cov", "-x", "--lf"])
def test_pytest_options_are_not_taken_for_ours(option: str):
    args, rest = _parser().parse_known_args(["test", option])
    assert rest == [option]
    assert not args.coverage


def test_benchmark_options_come_after_its_name():
    args, rest = _parser().parse_known_args(["bench", "mlcd_bo/ask", "--n", "3", "--help"])
    assert (args.name, args.rest, rest) == ("mlcd_bo/ask", ["--n", "3", "--help"], [])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonsense"], "invalid choice"),
        (["demo", "--only", "nonsense"], "invalid choice"),
        (["lint", "--nonsense"], "unrecognized arguments"),
        (["bench", "nonsense"], "no benchmark is called 'nonsense'"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], complaint: str):
    done = _ci(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_benchmarks_are_listed_with_a_line_each():
    done = _ci("bench")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert any(line.startswith("mlcd_bo/") for line in lines)
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines), "a benchmark lacks its line"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        done = _ci("bench", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "ci: No space left on device\n"


def test_works_from_another_folder():
    command = [sys.executable, str(ROOT / "ci"), "bench"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
