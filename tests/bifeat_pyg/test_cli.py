"""The command line, reports, and what the package brings in before it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bifeat_pyg
from bifeat_pyg import (
    SQ,
    VQ,
    FeatureError,
    QuantizedFeatureStore,
    UnknownAttrError,
    quantize,
    quantize_file,
)
from bifeat_pyg._cli import main

from .graphs import features, graph, hetero


def test_a_report_can_be_measured_anew(tmp_path, capsys):
    data = graph()
    np.save(tmp_path / "x.npy", data.x.numpy())
    np.save(tmp_path / "other.npy", data.x[:-1].numpy())
    store = quantize_file(tmp_path / "x.npy", tmp_path / "s", SQ(4))
    known = store.report().tables[0]
    again = store.report({(None, "x"): tmp_path / "x.npy"}, progress=True).tables[0]
    assert again.error == pytest.approx(known.error)
    torch.testing.assert_close(again.column_rmse, known.column_rmse)
    # A packed Data was not packed by the store: what it lost is unknown until it is told.
    taken = QuantizedFeatureStore.from_data(quantize(data))
    assert taken.report().tables[0].error is None
    assert taken.report({(None, "x"): data.x}).tables[0].error == pytest.approx(known.error)
    with pytest.raises(FeatureError, match=r"shape \[399, 13\], but the store holds \[400, 13\]"):
        store.report({(None, "x"): tmp_path / "other.npy"})
    with pytest.raises(UnknownAttrError, match="holds no y"):
        store.report({(None, "y"): data.x})
    changed = data.x + 1
    np.save(tmp_path / "changed.npy", changed.numpy())
    assert main(["info", str(tmp_path / "s"), "--against", str(tmp_path / "changed.npy")]) == 0
    back = store.fetch(None, "x")
    error = float((back - changed).norm() / changed.norm())
    assert f"{error:.4f}" in capsys.readouterr().out
    QuantizedFeatureStore.from_data(hetero()).save(tmp_path / "h")
    assert main(["info", str(tmp_path / "h"), "--against", str(tmp_path / "x.npy")]) == 1
    assert "one attribute; this one has" in capsys.readouterr().err


def test_help_and_a_plain_import_need_no_torch():
    code = (
        "import sys, bifeat_pyg, bifeat_pyg._cli as c\n"
        "try: c.main(['quantize', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'torch_geometric' not in sys.modules\n"
        "assert {'SQ', 'quantize', 'paper', 'BiFeatError'} <= set(dir(bifeat_pyg))\n"
        "assert 'torch' not in sys.modules\n"
        "from bifeat_pyg import *; from bifeat_pyg import SQ, paper; assert paper.sq(1).bits == 1\n"
        "assert 'torch' in sys.modules and not hasattr(bifeat_pyg, 'nothing')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "WIDTHxLENGTH" in done.stdout


def test_every_public_name_is_where_the_package_says():
    # The list for type checkers and the one for the first use are two.
    tree = ast.parse(Path(bifeat_pyg.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {}
    for line in block.body:
        name = line.names[0].name
        home = f"{line.module}.{name}" if line.module == "bifeat_pyg" else line.module
        typed[name] = home.removeprefix("bifeat_pyg.")
    assert typed == bifeat_pyg._HOME
    for name in typed:
        assert getattr(bifeat_pyg, name) is not None


def test_the_command_line(tmp_path, capsys):
    np.save(tmp_path / "x.npy", features(3000, 16).numpy())
    out = str(tmp_path / "s")
    assert main(["quantize", str(tmp_path / "x.npy"), out, "--bits", "4"]) == 0
    assert "8.0x" in capsys.readouterr().out
    assert main(["info", out]) == 0
    assert "SQ(bits=4" in capsys.readouterr().out
    assert main(["verify", out]) == 0
    assert "as written" in capsys.readouterr().out
    codes = tmp_path / "s" / "0_x.codes"
    codes.write_bytes(codes.read_bytes()[:-1] + b"?")
    assert main(["verify", out]) == 1
    assert "SHA-256 differs" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "x.npy"), out]) == 1
    assert "exists already" in capsys.readouterr().err
    two = str(tmp_path / "two")
    assert (
        main(["quantize", str(tmp_path / "x.npy"), two, "--vq", "8x64", "--metric", "cosine"]) == 0
    )
    assert main(["quantize", str(tmp_path / "x.npy"), two + "a", "--paper", "--bits", "2"]) == 0
    three = str(tmp_path / "three")
    assert main(["quantize", str(tmp_path / "x.npy"), three, "--vq", "8x64x2"]) == 0
    assert QuantizedFeatureStore.open(three).codec(None, "x").spec == VQ(8, 64, stages=2)
    for wrong in (
        ["--vq", "8"],
        ["--vq", "8x64", "--bits", "4"],
        ["--vq", "8x64x2x1"],
        ["--vq", "8x64x2", "--paper"],
    ):
        assert main(["quantize", str(tmp_path / "x.npy"), two + "b", *wrong]) == 1
