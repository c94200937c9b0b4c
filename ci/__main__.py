"""``python3 -m ci COMMAND``: sets up what the command needs, then runs it.

Only the standard library is used until the environment stands, and nothing newer than old
Pythons can parse, so that an old interpreter meets a sentence and not a syntax error.
"""

import os
import shutil
import sys

MINIMUM = (3, 11)


def _refuse_old_python() -> None:
    if sys.version_info >= MINIMUM:
        return
    newer = [name for name in (f"python3.{m}" for m in range(15, 10, -1)) if shutil.which(name)]
    advice = f"run `{newer[0]} -m ci ...`" if newer else "install one and run it with `-m ci`"
    have = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"ci: Python 3.11 or newer is needed; {sys.executable} is {have}: {advice}.")


if __name__ == "__main__":
    _refuse_old_python()
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.insert(0, os.getcwd())  # also for `python3 path/to/ci` from elsewhere

    from ci.command_line import main

    sys.exit(main(sys.argv[1:]))
