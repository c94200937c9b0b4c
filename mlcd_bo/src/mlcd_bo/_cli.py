"""The cheapest or fastest deployment for a training job, counting what finding it costs."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from ._catalog import Catalog
from ._check import positive_int
from ._errors import CatalogError, InvalidInput, MLCDError, NoFeasibleDeployment
from ._job import Job
from ._optimizer import DeploymentOptimizer
from ._recommendation import Recommendation
from ._report import ready_to_write
from ._scenario import Scenario
from ._space import SearchSpace
from ._store import Store
from ._strategies import strategies
from ._trace import read_traces
from ._trial import Trial, TrialCost
from .profilers._local import LocalTorchrun
from .profilers._trace import TraceProfiler

_INFEASIBLE = 3
# How a search is profiled is kept in its store beside it; what holds where nothing is kept.
_KEPT = {"probe_s": 30.0, "startup_s": 60.0, "pattern": None}
_COLUMNS = """\
columns of the table, one line for each measured run:
  instance_type   name of the type
  count           number of machines
  price_per_hour  dollars of one machine
  runtime_s       seconds of the whole job; empty if it failed
  job             optional: which job the run is of (none: all of one job)
  status          optional: empty or ok; else failed, oom, quota, preempted, error, timeout
  speed           optional: work per second, used instead of runtime_s where given
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    0: done. 2: something given is not allowed, or profiling failed (one line says what). 3: no
    deployment is likely to keep the limit. 130: interrupted; a store can be resumed.
    """
    args = _parser().parse_args(argv)
    try:
        return int(args.command(args))
    except NoFeasibleDeployment as problem:
        print(f"mlcd: {problem}", file=sys.stderr)
        return _INFEASIBLE
    except MLCDError as problem:
        print(f"mlcd: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as problem:
        print(f"mlcd: {problem}; check the path, its rights and the disk", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mlcd: interrupted; with --store, go on by `mlcd resume STORE`", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlcd", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mlcd-bo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="say what the first trials would be and cost at most")
    plan.add_argument("catalog", help="YAML or CSV file of instance types and prices")
    _add_counts(plan)
    _add_job(plan)
    _add_scenario(plan)
    _add_probe(plan)
    plan.add_argument("--trials", type=int, default=3, help="how many trials to show")
    plan.set_defaults(command=_plan)

    run = commands.add_parser("run", help="profile a script on this machine and recommend")
    run.add_argument("catalog", help="YAML or CSV file of instance types and prices")
    run.add_argument("script", help="training script that calls mlcd_bo.step")
    run.add_argument("--args", default="", help="the script's arguments, as one string")
    _add_pattern(run)
    run.add_argument("--checkpoint", help="where the script keeps its progress, to carry it on")
    _add_counts(run)
    _add_job(run)
    _add_scenario(run)
    _add_probe(run)
    run.add_argument("--store", help="file to keep the search in, for `mlcd resume`")
    run.add_argument("--report", help="folder for a report")
    run.set_defaults(command=_run)

    resume = commands.add_parser("resume", help="go on with a search that was interrupted")
    resume.add_argument("store", help="file given to `mlcd run --store`")
    resume.add_argument("--catalog", help="today's catalogue, if it may differ from the kept one")
    _add_counts(resume)
    resume.add_argument(
        "--accept-prices", action="store_true", help="go on although the catalogue has changed"
    )
    _add_probe(resume, kept=True)
    _add_pattern(resume)
    resume.add_argument("--report", help="folder for a report")
    resume.set_defaults(command=_resume)

    replay = commands.add_parser(
        "replay",
        help="search a table of measured runs, paying nothing",
        epilog=_COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replay.add_argument("trace", help="CSV file of measured runs; its columns: see below")
    replay.add_argument("--job", help="which job of the file; not needed if there is one")
    replay.add_argument("--list-jobs", action="store_true", help="print the file's jobs and stop")
    replay.add_argument("--hours", type=float, default=3.0, help="hours of the fastest run")
    replay.add_argument("--noise", type=float, default=0.0, help="relative noise of a trial")
    _add_scenario(replay)
    replay.add_argument("--report", help="folder for a report")
    replay.set_defaults(command=_replay)

    report = commands.add_parser("report", help="write the report of a kept search")
    report.add_argument("store", help="file given to `mlcd run --store`")
    report.add_argument("folder", help="where to write report.html and its pictures")
    report.set_defaults(command=_report)

    catalog = commands.add_parser("catalog", help="show a catalogue, or part of the AWS one")
    catalog.add_argument("file", nargs="?", help="YAML or CSV file; none: the bundled AWS types")
    catalog.add_argument("--names", nargs="+", help="only these types")
    catalog.add_argument("--prices", help="CSV file of prices, instead of the bundled AWS ones")
    catalog.set_defaults(command=_catalog)
    return parser


def _add_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--counts", type=int, nargs="+", help="numbers of machines; none: the catalogue's own"
    )


def _add_job(parser: argparse.ArgumentParser) -> None:
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--samples", type=float, help="training samples of the whole job")
    work.add_argument("--steps", type=float, help="optimizer steps of the whole job")
    parser.add_argument(
        "--batch-policy",
        choices=("global", "local"),
        default="global",
        help="whether the global batch or that of each worker stays fixed",
    )


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", type=float, help="most dollars, exploration included")
    parser.add_argument("--deadline", type=float, help="most hours, exploration included")
    parser.add_argument("--objective", choices=("time", "cost"), help="what to minimise")
    parser.add_argument("--strategy", default="gittins", help=", ".join(strategies()))
    parser.add_argument("--seed", type=int, default=0)


def _add_probe(parser: argparse.ArgumentParser, kept: bool = False) -> None:
    note = "; none: as the search was begun" if kept else " (%(default)s)"
    for option, seconds, words in (
        ("--probe-s", 30.0, "most seconds of measuring"),
        ("--startup-s", 60.0, "most seconds to a first step"),
    ):
        default = None if kept else seconds
        parser.add_argument(option, type=float, default=default, help=words + note)


def _add_pattern(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pattern",
        help="read progress from the log instead of mlcd_bo.step: a regular expression with a "
        "group (?P<step>...) or (?P<samples>...) for what is done so far",
    )


def _read_catalog(path: str) -> Catalog:
    is_csv = Path(path).suffix.lower() == ".csv"
    return Catalog.from_csv(path) if is_csv else Catalog.from_yaml(path)


def _space(path: str, counts: list[int] | None) -> SearchSpace:
    catalog = _read_catalog(path)
    if counts is None and catalog.counts is None:
        raise CatalogError(f"{path!r} gives no counts; say for instance --counts 1 2 4")
    return SearchSpace(catalog, counts)


def _scenario(args: argparse.Namespace) -> Scenario:
    return Scenario(args.objective, args.budget, args.deadline)


def _trial_cost(args: argparse.Namespace) -> TrialCost:
    return TrialCost(args.startup_s, 0.0, args.probe_s)


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as problem:
        raise InvalidInput(
            f"--args {text!r} cannot be split as a shell would: {problem}; close every quote"
        ) from problem


def _plan(args: argparse.Namespace) -> int:
    positive_int("--trials", args.trials)
    space = _space(args.catalog, args.counts)
    job = Job(args.steps, args.samples, batch_policy=args.batch_policy)
    cost = _trial_cost(args)
    search = DeploymentOptimizer(
        space, _scenario(args), job, args.strategy, args.seed, trial_cost=cost
    )
    print(f"{len(space)} deployments, {search.scenario.describe()}.")
    print("If they went as expected, the first trials would be, each at most:")
    for deployment in search.ask(args.trials):
        hours = cost(deployment) / 3600
        print(f"  {deployment}: {hours * 60:.3g} min, ${hours * deployment.price_per_hour:.4g}")
    dearest = max(cost(d) / 3600 * d.price_per_hour for d in space)
    print(f"The dearest trial of all costs at most ${dearest:.4g}.")
    return 0


def _run(args: argparse.Namespace) -> int:
    words = _words(args.args)
    profiler = LocalTorchrun(
        args.script,
        words,
        pattern=args.pattern,
        probe_s=args.probe_s,
        startup_s=args.startup_s,
    )
    # Whole paths: the search may be resumed from another folder.
    keep = None if args.checkpoint is None else os.path.abspath(args.checkpoint)
    search = DeploymentOptimizer(
        _space(args.catalog, args.counts),
        _scenario(args),
        Job(
            args.steps,
            args.samples,
            os.path.abspath(args.script),
            words,
            keep,
            args.batch_policy,
        ),
        args.strategy,
        args.seed,
        args.store,
        trial_cost=_trial_cost(args),
    )
    if args.store is not None:
        options = {name: getattr(args, name) for name in _KEPT}
        Store(args.store).keep_options({**options, "folder": os.getcwd()})
    return _finish(search, profiler, args.report)


def _resume(args: argparse.Namespace) -> int:
    space = None
    if args.catalog is not None:
        space = _space(args.catalog, args.counts)
    elif args.counts is not None:
        raise InvalidInput("--counts goes with --catalog; without it the kept ones are used")
    kept: dict[str, Any] = {**_KEPT}
    if Path(args.store).is_file():
        kept.update(Store(args.store).options())
    for name in _KEPT:
        if getattr(args, name) is None:
            setattr(args, name, kept[name])
    search = DeploymentOptimizer.resume(
        args.store, space, accept_prices=args.accept_prices, trial_cost=_trial_cost(args)
    )
    if search.job.script is None:
        raise InvalidInput(f"the search in {args.store!r} names no script to profile")
    for trial in search.trials:
        _line(trial)
    profiler = LocalTorchrun(
        search.job.script,
        search.job.args,
        pattern=args.pattern,
        probe_s=args.probe_s,
        startup_s=args.startup_s,
    )
    report = None if args.report is None else os.path.abspath(args.report)
    folder = str(kept.get("folder", os.curdir))
    # The script's arguments may be paths that are relative to where it was begun.
    with contextlib.chdir(folder if os.path.isdir(folder) else os.curdir):
        return _finish(search, profiler, report)


def _replay(args: argparse.Namespace) -> int:
    if args.list_jobs:
        for name, trace in read_traces(args.trace).items():
            print(f"{name}  (measured runs: {len(trace.cells)})")
        return 0
    profiler = TraceProfiler(
        args.trace, args.job, noise=args.noise, seed=args.seed, catalog=Catalog.aws()
    )
    search = DeploymentOptimizer(
        profiler.space,
        _scenario(args),
        profiler.job_of(args.hours),
        args.strategy,
        args.seed,
        trial_cost=profiler.trial_seconds,
    )
    return _finish(search, profiler, args.report)


def _report(args: argparse.Namespace) -> int:
    print(DeploymentOptimizer.look(args.store).report(args.folder))
    return 0


def _catalog(args: argparse.Namespace) -> int:
    if args.file is None:
        catalog = Catalog.aws(args.names, prices=args.prices)
    else:
        if args.prices is not None:
            raise InvalidInput("--prices goes with the bundled AWS types; a file has its own")
        catalog = _read_catalog(args.file)
        unknown = sorted(set(args.names or ()) - set(catalog))
        if unknown:
            raise InvalidInput(f"{args.file!r} has no type {unknown[0]!r}")
    print(f"{'name':<16}{'$/h':>9}{'vcpus':>7}{'GiB':>8}  accelerators")
    for name in args.names or catalog:
        kind = catalog[name]
        gpus = f"{kind.gpus:g} x {kind.gpu_name or '?'}" if kind.gpus else ""
        print(
            f"{kind.name:<16}{kind.price:>9.4g}{kind.vcpus or '':>7}{kind.mem_gib or '':>8}  {gpus}"
        )
    if catalog.dated:
        print(f"prices: {catalog.dated}")
    return 0


def _finish(
    search: DeploymentOptimizer, profiler: LocalTorchrun | TraceProfiler, report: str | None
) -> int:
    if report is not None:
        # Before anything is paid for.
        ready_to_write(report)
    try:
        _show(search.run(profiler, on_trial=_line))
    finally:
        # Also of a search that found nothing feasible: that is when one wants to look.
        if report is not None and any(t.observation.status == "ok" for t in search.trials):
            print(f"report: {search.report(report)}")
    return 0


def _line(trial: Trial) -> None:
    seen = trial.observation
    what = f"{seen.speed:,.4g}/s" if seen.status == "ok" else seen.status
    print(f"{trial.deployment}: {what} ({seen.seconds:.0f} s, ${seen.dollars:.4g})", flush=True)


def _show(best: Recommendation) -> None:
    print(best)
    for other in best.alternatives:
        print(f"  else {other.deployment}: {other.hours:.3g} h, ${other.dollars:.3g}")
