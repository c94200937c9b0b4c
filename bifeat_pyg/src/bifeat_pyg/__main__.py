"""Runs the command line: ``python -m bifeat_pyg``."""

import sys

from bifeat_pyg._cli import main

if __name__ == "__main__":
    sys.exit(main())
