"""`python -m kingpin_ray`: the command line."""

import sys

from kingpin_ray._cli import main

sys.exit(main())
