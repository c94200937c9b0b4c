"""A job that fails with a very long line."""

from ci.demo.job import Progress, Result, main


def run(progress: Progress) -> Result:
    print("\x1b[31m" + "x" * 5_000_000)
    raise SystemExit(3)


if __name__ == "__main__":
    main(run)
