"""The command line: ``hipress`` or ``python -m hipress_torch``."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hipress_torch import codecs
from hipress_torch._bench import bench_rows
from hipress_torch._calibrate import calibrate
from hipress_torch._codec import Codec
from hipress_torch._compll._algorithm import Algorithm
from hipress_torch._errors import CodecError, HiPressError, PlanError
from hipress_torch._plan import Plan, Profile
from hipress_torch._tables import table


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
    benching = commands.add_parser("bench", help="time the codecs against a copy in memory")
    benching.add_argument("codecs", nargs="*", help="names; all if none")
    benching.add_argument("--megabytes", type=float, default=16.0, help="size of the gradient")
    benching.add_argument("--rounds", type=int, default=7)
    benching.set_defaults(run=_bench)
    measuring = commands.add_parser("calibrate", help="measure the network and the kernels")
    measuring.add_argument("out", type=Path, help="where to write the profile (JSON)")
    measuring.add_argument("--codecs", default="onebit,fp16", help="codecs, separated by commas")
    measuring.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="processes on this machine; under torchrun its processes are measured instead",
    )
    measuring.set_defaults(run=_calibrate)
    explaining = commands.add_parser("explain", help="show what a profile makes of bucket sizes")
    explaining.add_argument("profile", type=Path, help="a file that calibrate wrote")
    explaining.add_argument(
        "elements", nargs="*", type=int, help="bucket sizes in elements; powers of 4 if none"
    )
    explaining.set_defaults(run=_explain)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except (HiPressError, OSError) as error:
        print(f"hipress: {error}", file=sys.stderr)
        return 2
    return status


def _codecs(arguments: argparse.Namespace) -> int:
    rows = [("codec", "bits", "feedback", "runs on", "what it sends")]
    for name in codecs.available():
        found = codecs.get(name)
        made = found()
        bits = ", ".join(f"{b:.2f}" for b in _bits(found, made))
        summary = (
            found.summary if isinstance(found, Algorithm) else (found.__doc__ or "").split("\n")[0]
        )
        feedback = "yes" if made.feedback else "no"
        # Plain all-reduce: torch sums the numbers, and no kernel codes them.
        backend = "torch" if name == "none" else made.backend
        rows.append((name, bits, feedback, backend, summary))
    print(table(rows))
    return 0


def _bits(algorithm: Callable[..., Codec], made: Codec) -> list[float]:
    """Returns the wire bits an element by default, or for each choice of ``bits`` if it has one."""
    choices = []
    if "bits" in made.options:
        for bits in (2, 4, 8):
            # A codec may take fewer widths.
            with contextlib.suppress(CodecError):
                choices.append(algorithm(bits=bits))
    return [c.wire_bytes(1 << 20) * 8 / (1 << 20) for c in choices or [made]]


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


def _bench(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.megabytes <= 65536 or arguments.rounds < 1:
        raise PlanError(
            "bench: --megabytes must be more than 0 and at most 65536, and --rounds at least 1"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = [codecs.get(name)() for name in arguments.codecs or codecs.available()]
    print(table(bench_rows(made, arguments.megabytes, arguments.rounds)))
    torch.set_num_threads(threads)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.ranks <= 1024:
        raise PlanError(f"calibrate: --ranks must be from 1 to 1024, got {arguments.ranks}")
    names = tuple(arguments.codecs.split(","))
    for name in names:
        codecs.get(name)
    if "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ:
        dist.init_process_group("gloo")
        profile = _measure(dist.get_rank(), dist.get_world_size(), names)
        last = dist.get_rank() == 0
        dist.destroy_process_group()
    else:
        from hipress_torch.testing import run_ranks

        profile, last = run_ranks(_measure, arguments.ranks, names)[0], True
    if last:
        Profile.from_dict(profile).save(arguments.out)
        print(f"{arguments.ranks if 'RANK' not in os.environ else profile['ranks']} ranks measured")
        print(_terms(profile))
    return 0


def _measure(rank: int, ranks: int, names: Sequence[str]) -> dict[str, Any]:
    del rank, ranks
    torch.set_num_threads(1)
    return calibrate(codecs=names).to_dict()


def _terms(profile: dict[str, Any]) -> str:
    rows = [["what", "at least (us)", "us a MB or a million elements"]]
    terms = dict(profile["collectives"])
    for codec, stages in profile["codecs"].items():
        terms |= {f"{codec} {stage}": term for stage, term in stages.items()}
    for name, term in terms.items():
        rows.append([name, f"{term['floor_s'] * 1e6:.0f}", f"{term['per_unit_s'] * 1e12:.0f}"])
    return table(rows)


def _explain(arguments: argparse.Namespace) -> int:
    profile = Profile.load(arguments.profile)
    if wrong := [e for e in arguments.elements if e < 1]:
        raise PlanError(f"explain: bucket sizes must be 1 element or more, got {wrong[0]}")
    made = {name: codecs.get(name)() for name in profile.codecs}
    plan = Plan(profile, tuple(made))
    names = ["none", *made]
    rows = [["elements", "codec", "part elements", *(f"{n} ms" for n in names)]]
    for elements in arguments.elements or [4**e for e in range(5, 13)]:
        choice = plan.choose(elements, made)
        times = [f"{seconds * 1e3:.2f}" for _, seconds in choice.candidates]
        part = str(min(elements, choice.part_elements))
        rows.append([str(elements), choice.label, part, *times])
    print(table(rows))
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
