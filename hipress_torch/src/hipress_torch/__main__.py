"""Runs the command line as ``python -m hipress_torch``."""

import sys

from hipress_torch._cli import main

sys.exit(main())
