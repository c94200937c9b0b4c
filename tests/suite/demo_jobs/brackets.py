"""A job whose complaint holds brackets."""

from ci.demo.job import Progress, Result, main


def run(progress: Progress) -> Result:
    raise ValueError("no such folder [/tmp/ray] [red]")


if __name__ == "__main__":
    main(run)
