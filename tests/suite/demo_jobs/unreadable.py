"""A job that leaves half a result."""

import sys
from pathlib import Path

if __name__ == "__main__":
    out = Path(sys.argv[1])
    (out / "result.json").write_text("{")
    (out / "plot.svg").write_text("<svg/>")
