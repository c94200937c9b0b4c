"""The command line: ``mlcd run`` and its kin."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from . import __version__
from ._catalog import Catalog
from ._errors import MLCDError, NoFeasibleDeployment
from ._job import Job
from ._optimizer import DeploymentOptimizer
from ._recommendation import Recommendation
from ._scenario import Scenario
from ._space import SearchSpace
from ._strategies import strategies
from ._trial import Trial, TrialCost
from .profilers._local import LocalTorchrun
from .profilers._trace import TraceProfiler

_INFEASIBLE = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    0: done. 2: something given is not allowed (one line says what). 3: no deployment is likely
    to keep the limit. 130: interrupted.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return int(args.command(args))
    except NoFeasibleDeployment as problem:
        print(f"mlcd: {problem}", file=sys.stderr)
        return _INFEASIBLE
    except MLCDError as problem:
        print(f"mlcd: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mlcd: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlcd", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mlcd-bo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="profile a script on this machine and recommend")
    run.add_argument("catalog", help="YAML file of instance types, prices and counts")
    run.add_argument("script", help="training script that calls mlcd_bo.step")
    run.add_argument("--args", default="", help="the script's arguments, as one string")
    _work(run)
    _scenario(run)
    run.add_argument("--probe-s", type=float, default=30.0, help="most seconds of measuring")
    run.add_argument("--startup-s", type=float, default=60.0, help="most seconds to a first step")
    run.set_defaults(command=_run)

    plan = commands.add_parser("plan", help="say what the first trials would be and cost at most")
    plan.add_argument("catalog", help="YAML file of instance types, prices and counts")
    _work(plan)
    _scenario(plan)
    plan.add_argument("--probe-s", type=float, default=30.0, help="most seconds of measuring")
    plan.add_argument("--startup-s", type=float, default=60.0, help="most seconds to a first step")
    plan.add_argument("--trials", type=int, default=3, help="how many trials to show")
    plan.set_defaults(command=_plan)

    replay = commands.add_parser("replay", help="search a table of measured runs, paying nothing")
    replay.add_argument("trace", help="CSV file of measured runs")
    replay.add_argument("--job", help="which job of the file")
    replay.add_argument("--hours", type=float, default=3.0, help="hours of the fastest run")
    replay.add_argument("--noise", type=float, default=0.0, help="relative noise of a trial")
    _scenario(replay)
    replay.set_defaults(command=_replay)
    return parser


def _work(parser: argparse.ArgumentParser) -> None:
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--samples", type=float, help="training samples of the whole job")
    work.add_argument("--steps", type=float, help="optimizer steps of the whole job")
    parser.add_argument("--batch-policy", choices=("global", "local"), default="global")


def _scenario(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", type=float, help="most dollars, exploration included")
    parser.add_argument("--deadline", type=float, help="most hours, exploration included")
    parser.add_argument("--objective", choices=("time", "cost"), help="what to minimise")
    parser.add_argument("--strategy", default="gittins", help=", ".join(strategies()))
    parser.add_argument("--seed", type=int, default=0)


def _search(args: argparse.Namespace, space: SearchSpace, job: Job) -> DeploymentOptimizer:
    scenario = Scenario(args.objective, args.budget, args.deadline)
    planned = TrialCost(args.startup_s, 0.0, args.probe_s)
    return DeploymentOptimizer(space, scenario, job, args.strategy, args.seed, trial_cost=planned)


def _job(args: argparse.Namespace, script: str | None = None) -> Job:
    return Job(args.steps, args.samples, script, batch_policy=args.batch_policy)


def _run(args: argparse.Namespace) -> int:
    profiler = LocalTorchrun(
        args.script, shlex.split(args.args), probe_s=args.probe_s, startup_s=args.startup_s
    )
    space = SearchSpace(Catalog.from_yaml(args.catalog))
    search = _search(args, space, _job(args, args.script))
    return _show(search.run(profiler, on_trial=_line))


def _plan(args: argparse.Namespace) -> int:
    space = SearchSpace(Catalog.from_yaml(args.catalog))
    search = _search(args, space, _job(args))
    print(f"{len(space)} deployments, {search.scenario.describe()}; first trials at most:")
    hours = (args.startup_s + args.probe_s) / 3600
    for deployment in search.ask(args.trials):
        dollars = hours * deployment.price_per_hour
        print(f"  {deployment}: {hours * 60:.3g} min, ${dollars:.4g}")
    return 0


def _replay(args: argparse.Namespace) -> int:
    profiler = TraceProfiler(args.trace, args.job, noise=args.noise, seed=args.seed)
    search = DeploymentOptimizer(
        profiler.space,
        Scenario(args.objective, args.budget, args.deadline),
        profiler.job_of(args.hours),
        args.strategy,
        args.seed,
        trial_cost=profiler.trial_seconds,
    )
    return _show(search.run(profiler, on_trial=_line))


def _line(trial: Trial) -> None:
    seen = trial.observation
    what = f"{seen.speed:,.4g}/s" if seen.status == "ok" else seen.status
    print(f"{trial.deployment}: {what} ({seen.seconds:.0f} s, ${seen.dollars:.4g})", flush=True)


def _show(best: Recommendation) -> int:
    print(best)
    for other in best.alternatives:
        print(f"  else {other.deployment}: {other.hours:.3g} h, ${other.dollars:.3g}")
    return 0
