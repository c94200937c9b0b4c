"""The command line: ``hipress`` or ``python -m hipress_torch``."""

import argparse
import sys
from collections.abc import Sequence

import torch

from hipress_torch import codecs
from hipress_torch._codec import Codec
from hipress_torch._compll._algorithm import Algorithm
from hipress_torch._errors import CodecError, HiPressError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, or 2 for wrong arguments.

    Args:
        argv: the arguments; those of the process if None.
    """
    parser = argparse.ArgumentParser(
        prog="hipress", description="Compressed gradient synchronization for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("codecs", help="list the codecs that are installed")
    listing.set_defaults(run=_codecs)
    checking = commands.add_parser("check", help="run the conformance suite on a codec")
    checking.add_argument("codec", help="its name")
    checking.add_argument(
        "options", nargs="*", metavar="option=value", help="its options, such as bits=4"
    )
    checking.set_defaults(run=_check)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except HiPressError as error:
        print(f"hipress: {error}", file=sys.stderr)
        return 2
    return status


def _codecs(arguments: argparse.Namespace) -> int:
    rows = [("codec", "bits", "feedback", "runs on", "what it sends")]
    for name in codecs.available():
        found = codecs.get(name)
        made = found()
        bits = made.wire_bytes(1 << 20) * 8 / (1 << 20)
        summary = (
            found.summary if isinstance(found, Algorithm) else (found.__doc__ or "").split("\n")[0]
        )
        feedback = "yes" if made.feedback else "no"
        rows.append((name, f"{bits:.2f}", feedback, made.backend, summary))
    print(table(rows))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from hipress_torch.testing import check_codec

    torch.set_num_threads(1)
    codec = make(arguments.codec, arguments.options)
    report = check_codec(codec)
    print(
        f"{codec!r}: {report.checks} checks passed on {report.backend}; "
        f"{report.bits_per_element:.2f} bits an element, relative error {report.relative_error:.3f}"
    )
    return 0


def make(name: str, options: Sequence[str]) -> Codec:
    """Returns a codec of ``option=value`` texts.

    Raises:
        CodecError: an option is no ``option=value``, or the codec refuses it.
    """
    chosen: dict[str, float | int | str | bool] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals:
            raise CodecError(f"options are written option=value, got {option!r}")
        chosen[key] = _value(text)
    return codecs.get(name)(**chosen)  # type: ignore[arg-type]


def _value(text: str) -> float | int | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of texts as aligned columns, the first row underlined."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)
