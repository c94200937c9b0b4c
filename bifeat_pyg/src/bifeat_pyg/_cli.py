"""The command line: ``python -m bifeat_pyg quantize in.npy out/ --bits 4``, info, verify."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from bifeat_pyg._errors import BiFeatError

# What needs torch is imported by the commands: `--help` and a wrong option answer at once.
if TYPE_CHECKING:
    from bifeat_pyg._store import QuantizedFeatureStore
    from bifeat_pyg.quantizers._base import Spec


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns 0, or 1 with one line on the error stream.

    Args:
        argv: arguments without the program's name; those of the process where None.
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except BiFeatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # What no layer below foresaw, e.g. a folder that may not be read.
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; call again to go on", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bifeat", description="Quantized node features on disk for PyTorch Geometric."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    made = commands.add_parser("quantize", help="pack a matrix into a store")
    made.add_argument("src", help=".npy, .safetensors, .pt, .parquet, .arrow or .feather file")
    made.add_argument("out", help="folder to make")
    how = made.add_argument_group("quantizer (4 bit where nothing is said)")
    how.add_argument("--bits", type=int, choices=(1, 2, 4, 8, 16), help="bits of a value")
    how.add_argument(
        "--scale", choices=("column", "tensor", "log"), default="column", help="default: column"
    )
    how.add_argument(
        "--vq", metavar="WIDTHxLENGTH[xSTAGES]", help="vector quantization, e.g. 8x256 or 32x256x4"
    )
    how.add_argument("--metric", choices=("l2", "cosine"), default="l2", help="default: l2")
    how.add_argument("--paper", action="store_true", help="as published: log scale, cosine")
    made.add_argument("--key", help="which tensor of a safetensors file")
    made.add_argument("--group", help="node type")
    made.add_argument("--attr", default="x", help="attribute name; default: x")
    made.add_argument("--chunk-rows", type=int, default=65536, help="default: 65536")
    made.add_argument("--nan", choices=("error", "zero"), default="error", help="default: error")
    made.add_argument("--restart", action="store_true", help="discard what a killed run left")
    made.set_defaults(run=_quantize)

    shown = commands.add_parser("info", help="show what a store holds and what it lost")
    shown.add_argument("path", help="folder of the store")
    shown.add_argument(
        "--against", metavar="FILE", help="measure the error anew, against these features"
    )
    shown.set_defaults(run=_info)

    checked = commands.add_parser("verify", help="compare all bytes with their checksums")
    checked.add_argument("path", help="folder of the store")
    checked.set_defaults(run=_verify)
    return parser


def _quantize(arguments: argparse.Namespace) -> None:
    from bifeat_pyg._file import quantize_file

    store = quantize_file(
        arguments.src,
        arguments.out,
        _spec(arguments),
        arguments.chunk_rows,
        not arguments.restart,
        group=arguments.group,
        attr=arguments.attr,
        key=arguments.key,
        nan=arguments.nan,
        progress=True,
    )
    print(store.report())


def _spec(arguments: argparse.Namespace) -> "Spec":
    from bifeat_pyg import SQ, VQ, paper

    if arguments.vq is None:
        bits = 4 if arguments.bits is None else arguments.bits
        return paper.sq(bits) if arguments.paper else SQ(bits, arguments.scale)
    try:
        width, length, *stages = (int(part) for part in arguments.vq.lower().split("x"))
        (count,) = stages or (1,)
    except ValueError:
        raise BiFeatError(
            f"--vq is {arguments.vq!r}; write WIDTHxLENGTH or WIDTHxLENGTHxSTAGES, e.g. 8x256"
        ) from None
    if arguments.bits is not None:
        raise BiFeatError("--bits and --vq exclude each other")
    if not arguments.paper:
        return VQ(width, length, arguments.metric, stages=count)
    if count > 1:
        raise BiFeatError("--paper has one stage: write --vq WIDTHxLENGTH")
    return paper.vq(width, length)


def _info(arguments: argparse.Namespace) -> None:
    from bifeat_pyg import QuantizedFeatureStore

    store = QuantizedFeatureStore.open(arguments.path)
    report = store.report(_against(arguments, store), progress=True)
    print(report)
    for table in report:
        name = table.attr if table.group is None else f"{table.group} {table.attr}"
        print(f"{name}: {table.spec}")


def _against(
    arguments: argparse.Namespace, store: "QuantizedFeatureStore"
) -> dict[tuple[str | None, str], str]:
    if arguments.against is None:
        return {}
    held = [(table.group, table.attr) for table in store.report()]
    if len(held) != 1:
        raise BiFeatError(f"--against needs a store of one attribute; this one has {len(held)}")
    return {held[0]: arguments.against}


def _verify(arguments: argparse.Namespace) -> None:
    from bifeat_pyg._report import size
    from bifeat_pyg._save import load

    folder = Path(arguments.path)
    total = sum(path.stat().st_size for path in folder.glob("*.codes"))
    with tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=None) as bar:
        load(folder, verify=True, progress=bar.update)
    print(f"{folder}: all {size(total)} of codes are as written")
