"""A job that never ends."""

import time

from ci.demo.job import Progress, Result, main


def run(progress: Progress) -> Result:
    time.sleep(600)
    raise AssertionError


if __name__ == "__main__":
    main(run)
