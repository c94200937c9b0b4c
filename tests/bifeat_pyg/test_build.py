"""The C kernels are built where they can be, and never stand in the way of an installation."""

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bifeat_pyg.kernels import cpu

PLUGIN = Path(__file__).parents[2] / "bifeat_pyg"
SOURCES = PLUGIN / "src" / "bifeat_pyg" / "kernels" / "native"

pytest.importorskip("hatchling")


@pytest.fixture
def compile_kernels():
    return runpy.run_path(str(PLUGIN / "hatch_build.py"))["compile_kernels"]


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_it_compiles_with_the_compiler_at_hand(compile_kernels, tmp_path):
    warnings = []
    library = tmp_path / "kernels.so"
    assert compile_kernels(SOURCES, library, warnings.append)
    assert not warnings
    assert ctypes.CDLL(str(library)).bf_abi() == cpu._ABI
    assert os.listdir(tmp_path) == ["kernels.so"]


TROUBLE = {
    "none": ({"PATH": "", "CC": ""}, "no C compiler found"),
    "gone": ({"CC": "/no/such/compiler"}, "cannot run"),
    "broken": ({"CC": shutil.which("false") or "false"}, "failed"),
}


@pytest.mark.parametrize("case", TROUBLE)
def test_without_one_it_warns_and_goes_on(case, compile_kernels, tmp_path, monkeypatch):
    environment, message = TROUBLE[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    warnings = []
    assert not compile_kernels(SOURCES, tmp_path / "kernels.so", warnings.append)
    assert message in warnings[0]
    assert not os.listdir(tmp_path)


def test_the_package_works_without_them():
    code = (
        "import torch; from torch_geometric.data import Data; import bifeat_pyg as b;"
        "from torch_geometric.loader import NodeLoader; from bifeat_pyg.kernels import cpu;"
        "assert not cpu.available();"
        "d = b.quantize(Data(x=torch.randn(50, 8), edge_index=torch.randint(0, 50, (2, 200))));"
        "s = b.CSCNeighborSampler(d, [3]);"
        "print(sum(len(x.x) > 0 for x in b.QuantizedLoader(NodeLoader(d, s, batch_size=25))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "BIFEAT_NATIVE": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "2", done.stderr
