"""The README's code runs, each block as a program of its own, and the example runs."""

import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser

import hipress_torch

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2] / "hipress_torch"


def run(script: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_program(example) -> None:
    """Runs a block from a file: processes that it starts have to find its functions there."""
    folder = example.namespace["folder"]
    script = folder / f"block_{example.line}.py"
    script.write_text(str(example.parsed), encoding="utf-8")
    example.namespace.setdefault("printed", []).append(run(script))


def blocks():
    parser = CodeBlockParser(language="python", evaluator=as_program)
    return list(Sybil(parsers=[parser]).parse(ROOT / "README.md"))


@pytest.mark.parametrize("index", range(len(blocks())))
def test_readme_block_runs(index, tmp_path):
    example = blocks()[index]
    example.namespace["folder"] = tmp_path
    example.evaluate()
    if "run_ranks" in str(example.parsed):
        words = example.namespace["printed"][-1].replace(",", "").split()
        sent, plain = int(words[1]), int(words[-1])
        assert plain == 20 * 4 * 1_001_000
        assert plain > 25 * sent


def test_readme_names_every_codec():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in hipress_torch.codecs.available():
        assert f"`{name}`" in text


def test_example_runs():
    line = run(ROOT / "examples" / "train_digits.py", "--epochs", "2")
    assert line.startswith("onebit: ")
    assert float(line.split()[1].rstrip("%")) > 60
