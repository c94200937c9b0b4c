"""The wheel where there is no C compiler: it builds, carries no kernels, and runs."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="building a wheel here needs hatchling")

PLUGIN = Path(__file__).parents[2] / "hipress_torch"


def test_a_wheel_builds_and_runs_without_a_compiler(tmp_path):
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*pip, str(PLUGIN), "-w", str(tmp_path)],
        env={**os.environ, "CC": "no-such-compiler"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert "hipress_torch/_native/builtin.c" in names
    assert not [n for n in names if "/kernels_" in n]
    check = (
        "from hipress_torch import codecs; from hipress_torch.testing import check_codec; "
        "print(check_codec(codecs.get('onebit')()).backend, codecs.__file__)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", check],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "CC": "no-such-compiler"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    backend, where = ran.stdout.split()
    assert backend == "torch"
    assert where.startswith(str(tmp_path))
