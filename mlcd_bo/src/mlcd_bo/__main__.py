"""``python -m mlcd_bo``: the same as ``mlcd``."""

import sys

from ._cli import main

sys.exit(main())
