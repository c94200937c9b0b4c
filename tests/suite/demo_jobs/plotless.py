"""A job that leaves a result and no plot."""

import sys
from pathlib import Path

if __name__ == "__main__":
    out = Path(sys.argv[1])
    (out / "result.json").write_text("{}")
