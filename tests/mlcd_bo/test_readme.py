import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser

README = Path(__file__).parents[2] / "mlcd_bo" / "README.md"

pytestmark = pytest.mark.cluster


def blocks() -> Document:
    return Sybil(parsers=[PythonCodeBlockParser()]).parse(README)


def test_the_readme_runs_as_a_script(tmp_path):
    script = tmp_path / "ten_lines.py"
    # As a script of its own, which is how a reader runs it; the blocks are sybil's.
    parsed = [example.parsed for example in blocks().examples()]
    assert parsed
    script.write_text("\n".join(parsed))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "finding it cost $" in done.stdout
