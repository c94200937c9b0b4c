"""The README's code runs, as blocks of one document and as a script of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

README = Path(__file__).parents[2] / "bifeat_pyg" / "README.md"


@pytest.mark.parametrize("how", ["blocks", "script"])
def test_readme_runs(how, tmp_path, capsys):
    if how == "blocks":
        document = Sybil(parsers=[PythonCodeBlockParser()]).parse(README)
        examples = list(document.examples())
        assert examples
        for example in examples:
            example.evaluate()
        shown = capsys.readouterr().out
    else:
        script = tmp_path / "readme.py"
        blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
        script.write_text("\n".join(blocks), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        shown = done.stdout
    assert re.search(r"^x +\d+ +64 .* [78]\.\dx +0\.\d+", shown, re.M)
