"""`python -m fedtune_flwr` is the command `fedtune`."""

import sys

from ._cli import main

sys.exit(main())
