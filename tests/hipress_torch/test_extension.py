"""A codec that another distribution brings is found by name, imported and used."""

import subprocess
import sys
import textwrap
import zlib

import pytest

from hipress_torch import CodecError, codecs
from hipress_torch.testing import check_codec

CODEC = """
from hipress_torch import codec, ops


@codec(feedback=True, block=128)
def scaled(x, *, bits=2):
    top = ops.max(ops.abs(x))
    step = ops.where(top > 0, top, 1) / (2.0**bits - 1) * 2
    return ops.pack((x + top) / step + 0.5, bits=bits), top


@scaled.decoder
def scaled(code, top, *, bits):
    return code * top / (2.0**bits - 1) * 2 - top
"""


def install(site, name="scaled", target="hipress_torch.codecs.scaled:scaled", code=CODEC):
    """Lays a distribution out as an installer would."""
    package = site / "hipress_torch" / "codecs" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    info = site / f"hipress_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hipress-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hipress_torch.codecs]\n{name} = {target}\n")


def test_a_third_party_codec_is_found_by_a_new_interpreter(tmp_path):
    install(tmp_path)
    script = """
        import sys
        from hipress_torch import codecs
        from hipress_torch.testing import check_codec
        assert "scaled" in codecs.available()
        assert "hipress_torch.codecs.scaled" not in sys.modules
        print(check_codec(codecs.get("scaled")(bits=4)).bits_per_element)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={"PYTHONPATH": str(tmp_path), "PATH": "", "HIPRESS_TORCH_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(4.25)


@pytest.mark.parametrize(
    ("code", "told"),
    [("raise ImportError('half installed')", "half installed"), ("scaled = 3", "is a int")],
)
def test_a_broken_one_is_told(code, told, tmp_path, monkeypatch):
    name = f"broken{zlib.crc32(code.encode())}"
    install(tmp_path, name, f"broken_{name}:scaled", "")
    (tmp_path / f"broken_{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert name in codecs.available()
    with pytest.raises(CodecError, match=told):
        codecs.get(name)


def test_the_suite_runs_on_every_installed_codec():
    for name in codecs.available():
        options = {"tau": 4.0, "relative": False} if name == "tbq" else {}
        if name in ("graddrop", "dgc"):
            options = {"ratio": 0.05}
        check_codec(codecs.get(name)(**options))
