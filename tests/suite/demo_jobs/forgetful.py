"""A job that forgets a daemon."""

import subprocess
import sys

from ci.demo.job import Progress, Result, main
from tests.suite.demo_jobs import good

SLEEP = "import time; time.sleep(600)  # forgotten"


def run(progress: Progress) -> Result:
    subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    return good.run(progress)


if __name__ == "__main__":
    main(run)
