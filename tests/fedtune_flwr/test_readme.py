"""The README's Python runs, block after block, and as one script of its own."""

import re
import subprocess
import sys
from pathlib import Path

import fedtune_flwr

ROOT = Path(__file__).parents[2]
README = ROOT / "fedtune_flwr" / "README.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.S | re.M)


def test_the_readme_runs_as_a_script(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks()), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "emulated gain" in done.stdout
    assert done.stdout.count("weight x") == 6


def test_the_privacy_table_lists_what_the_code_allows():
    text = README.read_text(encoding="utf-8")
    for name in fedtune_flwr.METRICS:
        assert f"`{name}`" in text
    assert "reconstructed from the published abstracts" in re.sub(r"\s+", " ", text)
