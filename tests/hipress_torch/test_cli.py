"""The command line."""

import pytest

from hipress_torch import codecs
from hipress_torch._cli import main


def test_codecs_lists_every_codec(capsys):
    assert main(["codecs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(codecs.available())
    assert any(line.startswith("onebit") and " 1.02 " in line for line in lines)
    for name, bits in (("terngrad", "2.02, 4.02, 8.02"), ("nbit", "2.12, 4.12, 8.12")):
        assert any(line.startswith(name) and bits in line for line in lines)
    (plain,) = (line for line in lines if line.startswith("none"))
    assert plain.split()[:4] == ["none", "32.00", "no", "torch"]


def test_check_runs_the_suite(capsys):
    assert main(["check", "nbit", "bits=2", "random=true"]) == 0
    assert "nbit(bits=2, random=True): " in capsys.readouterr().out


def test_bench_times_what_it_is_told(capsys):
    assert main(["bench", "onebit", "fp16", "--megabytes", "0.25", "--rounds", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["onebit()", "fp16()"]
    assert all(float(cell) > 0 for line in lines[2:] for cell in line.split()[2:])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bench", "--rounds", "0"], "--rounds at least 1"),
        (["bench", "--megabytes", "nan"], "--megabytes must be more than 0"),
        (["bench", "--megabytes", "inf"], "at most 65536"),
        (["calibrate", "p.json", "--ranks", "0"], "--ranks must be from 1 to 1024, got 0"),
        (["calibrate", "p.json", "--ranks", "-1"], "--ranks must be from 1 to 1024, got -1"),
        (["check", "nope"], "no codec is named 'nope'"),
        (["check", "nbit", "bits=3"], "bits must be one of"),
        (["check", "nbit", "bits"], "option=value"),
        (["check", "tbq", "tau=big"], "tau must be float, got str"),
    ],
)
def test_errors_are_one_line_and_status_2(arguments, told, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


def test_no_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
