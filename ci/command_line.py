"""The command line: which command, and what is handed on to it."""

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from ci import environment
from ci.layout import PLUGINS

DESCRIPTION = """\
Work on the plugin suite. Every command first sets up `.venv` (a few minutes the first time,
at once afterwards); nothing outside this folder but pip's cache is written.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m ci",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="the main job of every plugin, measured")
    demo.add_argument("--only", action="append", choices=PLUGINS, help="run this one (repeatable)")

    test = commands.add_parser("test", help="the tests; further arguments go to pytest")
    test.add_argument("--coverage", action="store_true", help="measure and report coverage")

    commands.add_parser("lint", help="ruff, mypy, import-linter, deptry, validate-pyproject")

    bench = commands.add_parser("bench", help="list the benchmarks, or run one")
    bench.add_argument("name", nargs="?", help="PLUGIN/NAME, for example hipress_torch/kernels")

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
    if rest and args.command not in ("test", "bench"):
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    # A closed terminal or a plain kill cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        environment.ensure()
        environment.enter(argv)
        return _run(args, rest)
    except environment.SetupError as error:
        print(f"ci: {error}", file=sys.stderr)
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

            return run_bench(args.name, rest)
        case "wheels":
            from ci.wheels import run_wheels

            return run_wheels(tuple(args.only or PLUGINS), check=args.check)
    return 0
