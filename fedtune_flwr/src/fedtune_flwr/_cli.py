"""`fedtune`: profile, tune, explain, plot, bench, new; also `python -m fedtune_flwr`."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import tuners
from ._compare import compare
from ._emulate import Emulator
from ._errors import ConfigError, FedTuneError
from ._options import MODES, OBJECTIVES, TuneOptions
from ._page import write_page
from ._plots import figure
from ._policy import Policy
from ._profile import profile
from ._report import TuneReport
from ._space import Choice, Dimension, Int, Linear, Log, SearchSpace
from ._tables import read_metrics, write_metrics
from ._task import ProxyTask
from ._template import new_app
from ._tune import tune

if TYPE_CHECKING:
    import torch


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 1 after printing one line about what was wrong."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except FedTuneError as error:
        print(f"fedtune: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fedtune: interrupted", file=sys.stderr)
        return 130
    return 0


class _DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to the help of an option, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, [], Path()):
            return action.help
        return super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedtune", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, words: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=words, description=words, formatter_class=_DefaultsFormatter
        )

    one = command("profile", "the metrics of a data file, as a client sends them")
    one.add_argument("data", type=Path, help="npz with x and y")
    _model_arguments(one, required=False)
    one.add_argument(
        "--reference", type=Path, help="state_dict of the reference model (torch.save)"
    )
    one.add_argument("--classes", type=int, help="number of labels, without --model")
    one.add_argument("--append", type=Path, metavar="CSV", help="add a row to this file")
    one.set_defaults(run=_profile)

    two = command("tune", "tune a policy from a metrics file and proxy data")
    two.add_argument("metrics", type=Path, help="CSV, a row a client")
    _proxy_arguments(two)
    two.add_argument(
        "--dim",
        action="append",
        required=True,
        metavar="NAME=KIND:...",
        help="lr=log:1e-3:1, local-epochs=int:1:8, mu=linear:0:1, bs=choice:16:32",
    )
    two.add_argument(
        "--tuner", default="bayes", choices=tuners.available(), help="what proposes settings"
    )
    two.add_argument(
        "--mode",
        default="policy",
        choices=MODES,
        help="steer values by metrics, or give each group of clients its own",
    )
    two.add_argument(
        "--objective",
        default="global",
        choices=OBJECTIVES,
        help="personal: also values for fine-tuning on each client",
    )
    two.add_argument("--budget", type=int, default=48, help="evaluations to spend")
    two.add_argument("--rounds", type=int, default=20, help="rounds of an emulated federation")
    two.add_argument("--seed", type=int, default=0, help="fixes the result")
    two.add_argument(
        "--policy", type=Path, default=Path("policy.json"), help="where to write the policy"
    )
    two.add_argument("--report", type=Path, help="also write the whole report here")
    two.set_defaults(run=_tune)

    three = command("explain", "a policy or report in words")
    three.add_argument("file", type=Path, help="policy.json or report.json")
    three.add_argument("--metrics", type=Path, help="CSV: print what each of these clients gets")
    three.set_defaults(run=_explain)

    four = command("plot", "a report as one HTML page, or its plots")
    four.add_argument("report", type=Path, help="report.json that tune wrote")
    four.add_argument(
        "--out", type=Path, default=Path("report.html"), help="ends in .html, .svg, .png or .pdf"
    )
    four.set_defaults(run=_plot)

    six = command("bench", "a policy against simple rivals, on fresh emulations")
    six.add_argument("file", type=Path, help="policy.json or report.json")
    six.add_argument("metrics", type=Path, help="CSV, a row a client")
    _proxy_arguments(six)
    six.add_argument("--emulations", type=int, default=8, help="federations to compare on")
    six.add_argument("--rounds", type=int, default=20, help="rounds of an emulated federation")
    six.add_argument("--seed", type=int, default=0, help="fixes the result")
    six.set_defaults(run=_bench)

    five = command("new", "write a Flower app to start from")
    five.add_argument("name", help="of the app and its folder")
    five.add_argument("--folder", type=Path, default=Path(), help="where to make the app's folder")
    five.set_defaults(run=lambda a: print(new_app(a.name, a.folder)))
    return parser  # fmt: skip


def _model_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--model",
        required=required,
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns a torch module",
    )


def _proxy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--proxy", type=Path, required=True, help="npz with x and y")
    _model_arguments(parser, required=True)
    parser.add_argument(
        "--default",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="a hyperparameter that clients use but that is not tuned, as batch-size=16",
    )


def _profile(arguments: argparse.Namespace) -> None:
    model = _function(arguments.model)() if arguments.model else None
    if model is not None and arguments.reference is not None:
        import torch

        try:
            model.load_state_dict(torch.load(arguments.reference, weights_only=True))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"--reference {arguments.reference}: {error}") from error
    values = profile([_arrays(arguments.data)], model, classes=arguments.classes)
    for name, value in values.items():
        print(f"{name:16} {value:g}")
    if arguments.append is not None:
        before = read_metrics(arguments.append) if arguments.append.exists() else []
        write_metrics(arguments.append, [*before, values])


def _tune(arguments: argparse.Namespace) -> None:
    space = SearchSpace(**dict(map(_dimension, arguments.dim)))
    options = TuneOptions(
        budget=arguments.budget,
        rounds=arguments.rounds,
        mode=arguments.mode,
        objective=arguments.objective,
    )
    report = tune(
        space,
        Emulator(_proxy(arguments), seed=arguments.seed),
        read_metrics(arguments.metrics),
        tuner=arguments.tuner,
        options=options,
        seed=arguments.seed,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    report.policy.save(arguments.policy)
    if arguments.report is not None:
        report.save(arguments.report)
    print(report.summary())
    print(f"policy: {arguments.policy}")
    if report.personal is not None:
        path = arguments.policy.with_stem(f"{arguments.policy.stem}-personal")
        report.personal.save(path)
        print(f"for fine-tuning: {path}")


def _explain(arguments: argparse.Namespace) -> None:
    rows = read_metrics(arguments.metrics) if arguments.metrics else []
    try:
        report = TuneReport.load(arguments.file)
    except FedTuneError:
        policy = Policy.load(arguments.file)
        print(policy.explain(rows))
    else:
        policy = report.policy
        print(report.summary())
    for i, row in enumerate(rows):
        given = policy.assign(row)
        values = ", ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in given.values.items()
        )
        print(f"client {i}: {values}, weight x {given.weight_factor:.3g}")


def _bench(arguments: argparse.Namespace) -> None:
    if arguments.emulations < 2 or arguments.rounds < 1:
        raise ConfigError("--emulations must be at least 2 and --rounds at least 1")
    arms = compare(
        _policy(arguments.file),
        Emulator(_proxy(arguments), seed=arguments.seed),
        read_metrics(arguments.metrics),
        emulations=arguments.emulations,
        rounds=arguments.rounds,
    )
    print(f"{'':36} {'score':>8}   policy minus this")
    for arm in arms:
        mean = sum(arm.scores) / len(arm.scores)
        gap = f"{arm.difference:+.4f} +- {arm.standard_error:.4f}" if arm is not arms[0] else ""
        print(f"{arm.name:36} {mean:8.4f}   {gap}")


def _policy(path: Path) -> Policy:
    try:
        return TuneReport.load(path).policy
    except FedTuneError:
        return Policy.load(path)


def _plot(arguments: argparse.Namespace) -> None:
    report = TuneReport.load(arguments.report)
    if arguments.out.suffix == ".html":
        write_page(report, arguments.out)
    elif arguments.out.suffix in (".svg", ".png", ".pdf"):
        figure(report).savefig(arguments.out)
    else:
        raise ConfigError(f"--out {arguments.out} must end in .html, .svg, .png or .pdf")
    print(arguments.out)


def _proxy(arguments: argparse.Namespace) -> ProxyTask:
    defaults = {}
    for text in arguments.default:
        name, _, number = text.partition("=")
        try:
            defaults[name] = float(number)
        except ValueError as error:
            raise ConfigError(f"--default {text!r} must be NAME=NUMBER") from error
    return ProxyTask(
        _function(arguments.model), data=_arrays(arguments.proxy), defaults=defaults or None
    )


def _arrays(path: Path) -> "tuple[torch.Tensor, torch.Tensor]":
    import numpy as np
    import torch

    try:
        with np.load(path, allow_pickle=False) as file:
            x, y = (torch.from_numpy(np.asarray(file[name])) for name in ("x", "y"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: expected an npz file with arrays x and y ({error})") from error
    return (x.to(torch.float32) if x.is_floating_point() else x), y.to(torch.int64)


def _function(reference: str) -> Callable[[], Any]:
    module, _, name = reference.partition(":")
    if "" not in sys.path:
        # A console script does not look in the current folder, where the user's module lies.
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--model {reference!r}: {error}; expected MODULE:FUNCTION") from error
    if not callable(found):
        raise ConfigError(f"--model {reference!r} is not a function")
    function: Callable[[], Any] = found
    return function


def _dimension(text: str) -> tuple[str, Dimension]:
    name, _, described = text.partition("=")
    kind, *parts = described.split(":")
    try:
        if kind == "choice":
            return name, Choice(*map(_literal, parts))
        if kind == "int":
            low, high = map(int, parts)
            return name, Int(low, high)
        if kind in ("log", "linear"):
            bottom, top = map(float, parts)
            return name, (Log if kind == "log" else Linear)(bottom, top)
    except ValueError as error:
        if isinstance(error, FedTuneError):
            raise
        raise ConfigError(f"--dim {text!r}: {error}") from error
    raise ConfigError(f"--dim {text!r} must be NAME=log|linear|int:LOW:HIGH or NAME=choice:A:B...")


def _literal(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
