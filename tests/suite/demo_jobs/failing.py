"""A job that raises."""

from ci.demo.job import Progress, Result, main


def run(progress: Progress) -> Result:
    progress("about to fail")
    raise RuntimeError("the wheel came off")


if __name__ == "__main__":
    main(run)
