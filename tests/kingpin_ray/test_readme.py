"""The README's code runs, in order and as a script of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from sybil import Sybil
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser

README = Path(__file__).parents[2] / "kingpin_ray" / "README.md"


def blocks() -> Document:
    return Sybil(parsers=[PythonCodeBlockParser()]).parse(README)


def test_blocks_run_in_order(capsys: Any) -> None:
    examples = list(blocks().examples())
    assert examples
    for example in examples:
        example.evaluate()
    assert "1000 models, accuracy 0.7" in capsys.readouterr().out


def test_blocks_run_as_a_script(tmp_path: Path) -> None:
    script = tmp_path / "ten_lines.py"
    script.write_text("\n".join(example.parsed for example in blocks().examples()))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert "plan local" in done.stdout
