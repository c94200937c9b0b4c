"""The command line: which command, and what is handed on to it."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from ci import environment
from ci.layout import PLUGINS, VENV

DESCRIPTION = """\
Work on the plugin suite. Every command first sets up `.venv` (a few minutes the first time,
at once afterwards); nothing outside this folder but pip's cache is written.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m ci",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="the main job of every plugin, measured")
    demo.add_argument("--only", action="append", choices=PLUGINS, help="run this one (repeatable)")

    # No abbreviations: pytest's --co is not our --coverage.
    test = commands.add_parser(
        "test", help="the tests; further arguments go to pytest", allow_abbrev=False
    )
    test.add_argument("--coverage", action="store_true", help="measure and report coverage")

    commands.add_parser("lint", help="ruff, mypy, import-linter, deptry, validate-pyproject")

    bench = commands.add_parser("bench", help="list the benchmarks, or run one", add_help=False)
    bench.add_argument("name", nargs="?", help="PLUGIN/NAME, for example hipress_torch/kernels")
    bench.add_argument("rest", nargs=argparse.REMAINDER, help="arguments of the benchmark")

    wheels = commands.add_parser("wheels", help="build the five wheels and source archives")
    wheels.add_argument(
        "--check",
        action="store_true",
        help="also install each in a new environment of its own and run its README there",
    )
    wheels.add_argument("--only", action="append", choices=PLUGINS, help="this one (repeatable)")

    commands.add_parser("setup", help="only set up the environment")
    return parser


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str]) -> int:
    """Returns the exit status of the command; 130 if it was interrupted."""
    args, rest = _parser().parse_known_args(argv)
    if rest and args.command != "test":
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    # A plain kill or a closed terminal cleans up like Ctrl-C does; under nohup the latter is
    # already ignored, and stays so.
    signal.signal(signal.SIGTERM, _interrupt)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        environment.ensure()
        environment.enter(argv)
        status = _run(args, rest)
        sys.stdout.flush()
        return status
    except environment.SetupError as error:
        print(f"ci: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"ci: {error}; the environment is damaged: remove {VENV} and run the same "
            "command again, which makes it anew",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        # Nobody reads any more, or the disk is full. Python would complain again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"ci: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nci: interrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    # Imported here: these may use what only the environment has.
    match args.command:
        case "demo":
            from ci.demo import run_demo

            return run_demo(tuple(args.only or PLUGINS))
        case "test":
            from ci.testing import run_tests

            return run_tests(rest, coverage=args.coverage)
        case "lint":
            from ci.lint import run_lint

            return run_lint()
        case "bench":
            from ci.bench import run_bench

            return run_bench(args.name, args.rest)
        case "wheels":
            from ci.wheels import run_wheels

            return run_wheels(tuple(args.only or PLUGINS), check=args.check)
    return 0
