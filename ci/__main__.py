"""``python3 -m ci COMMAND``: sets up what the command needs, then runs it.

Only the standard library is used until the environment stands, and nothing newer than old
Pythons can parse, so that an old interpreter meets a sentence and not a syntax error.
"""

import os
import shutil
import sys

MINIMUM = (3, 11)


def _refuse_old_python():
    # type: () -> None
    if sys.version_info >= MINIMUM:
        return
    newer = [n for n in ("python3.%d" % m for m in range(15, 10, -1)) if shutil.which(n)]
    advice = "run `%s -m ci ...`" % newer[0] if newer else "install one and run it with `-m ci`"
    sys.exit(
        "ci: Python %d.%d or newer is needed; this is %d.%d (%s): %s."
        % (MINIMUM + sys.version_info[:2] + (sys.executable, advice))
    )


if __name__ == "__main__":
    _refuse_old_python()
    from ci.command_line import main

    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.exit(main(sys.argv[1:]))
