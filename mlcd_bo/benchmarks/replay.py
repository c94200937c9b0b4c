"""All strategies on measured runs of real jobs: what the whole bill would have been.

    python3 -m ci bench mlcd_bo/replay
    python mlcd_bo/benchmarks/replay.py --files scout gavel cherrypick --seeds 5 --workers 2
    python mlcd_bo/benchmarks/replay.py --files scout --strategies gittins --earlier 3
    python mlcd_bo/benchmarks/replay.py --out outcomes.jsonl      # goes on where it was stopped

For each job, strategy, scenario, job length and probe length a search is replayed from a table of
measured runs. Every trial is charged in hours and in dollars. The total (exploration + final run)
is divided by the best run that keeps the limit with nothing spent on finding it. A search that
refuses to start, or finds nothing that runs, counts as a violation of infinite total.

floor: perfect knowledge, and one trial of the deployment it picks. unkeepable: share of jobs of
which no deployment keeps the limit after its own trial.
"""

import argparse
import json
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import mlcd_bo as mlcd
from mlcd_bo._trace import Trace, read_traces

DATA = Path(os.environ.get("MLCD_TRACES", "../shared/data/deployments"))
FILES = ("scout", "gavel", "cherrypick", "lynceus_tf")
SCENARIOS = ("unlimited", "budget x1.5", "budget x3", "deadline x1.5", "deadline x3")
# Probe minutes and the relative noise of a speed measured in that time: 3 % in ten minutes,
# growing with the square root as the probe shrinks.
PROBES = {2: 0.067, 10: 0.03}
PENALTY = 4.0


@dataclass(frozen=True)
class Outcome:
    """One replayed search."""

    file: str
    job: str
    strategy: str
    scenario: str
    hours: float
    probe: int
    seed: int
    total: float
    violated: bool
    trials: int
    spent: float


def cost_of(probe: int) -> mlcd.TrialCost:
    """Returns the charge of a trial: the probe and 20 s a machine."""
    return mlcd.TrialCost(startup_s=0.0, per_machine_s=20.0, probe_s=60.0 * probe)


def sizes() -> mlcd.Catalog:
    """Returns the sizes of the traces' instance types: AWS's, and gavel's three GPUs."""
    gpus = [("v100", 16.0), ("p100", 16.0), ("k80", 12.0)]
    extra = [mlcd.InstanceType(n, 1.0, vcpus=1, gpus=1, gpu_mem_gib=m) for n, m in gpus]
    return mlcd.Catalog([*mlcd.Catalog.aws().values(), *extra])


@dataclass(frozen=True)
class Truth:
    """Hours and dollars of every run that works, and the limits of a scenario."""

    hours: dict[mlcd.Deployment, float]
    scenario: mlcd.Scenario
    best: float

    @classmethod
    def of(cls, trace: Trace, scenario: str, hours: float) -> "Truth":
        """Returns the truth of a job whose fastest run takes `hours`."""
        took = {
            c.deployment: hours * trace.fastest / c.speed
            for c in trace.cells.values()
            if c.status == "ok"
        }
        bill = {d: h * d.price_per_hour for d, h in took.items()}
        kind, _, factor = scenario.partition(" x")
        if kind == "budget":
            limit = float(factor) * min(bill.values())
            best = min(took[d] for d in took if bill[d] <= limit)
            return cls(took, mlcd.Scenario.fastest_within(limit), best)
        if kind == "deadline":
            limit = float(factor) * min(took.values())
            best = min(bill[d] for d in took if took[d] <= limit)
            return cls(took, mlcd.Scenario.cheapest_by(limit), best)
        return cls(took, mlcd.Scenario.fastest(), min(took.values()))

    def total(
        self, deployment: mlcd.Deployment, spent_h: float, spent_d: float, left: float = 1.0
    ) -> tuple[float, bool]:
        """Returns the objective of the whole bill over the best, and whether a limit broke.

        Args:
            deployment: of the final run.
            spent_h: hours of exploration.
            spent_d: dollars of exploration.
            left: part of the job that the final run has still to do.
        """
        hours = spent_h + left * self.hours[deployment]
        dollars = spent_d + left * self.hours[deployment] * deployment.price_per_hour
        value = dollars if self.scenario.objective == "cost" else hours
        broken = (
            hours > (self.scenario.deadline or np.inf) * (1 + 1e-9)
            or dollars > (self.scenario.budget or np.inf) * (1 + 1e-9)
        )  # fmt: skip
        return value / self.best, broken


def floor_of(truth: Truth, probe: int) -> float:
    """Returns the total of perfect knowledge with one trial; infinite if none keeps the limit."""
    cost = cost_of(probe)
    totals = [np.inf]
    for deployment in truth.hours:
        trial_h = cost(deployment) / 3600
        value, broken = truth.total(deployment, trial_h, trial_h * deployment.price_per_hour)
        if not broken:
            totals.append(value)
    return min(totals)


def earlier_jobs(file: str, job: str, data: Path, count: int, seed: int) -> list[mlcd.EarlierJob]:
    """Returns six measurements of each of `count` other jobs of the file."""
    rng = np.random.default_rng(seed)
    others = [trace for name, trace in load(file, data).items() if name != job]
    found = []
    for index in rng.permutation(len(others))[:count]:
        cells = [c for c in others[index].cells.values() if c.status == "ok"]
        chosen = [cells[i] for i in rng.permutation(len(cells))[:6]]
        found.append(
            mlcd.EarlierJob(
                tuple(c.deployment for c in chosen),
                tuple(c.speed for c in chosen),
                tuple(0.03 * c.speed for c in chosen),
            )
        )
    return found


def replay(
    trace: Trace,
    file: str,
    strategy: str,
    scenario: str,
    hours: float,
    probe: int,
    seed: int,
    earlier: list[mlcd.EarlierJob] | None = None,
    carry: bool = False,
) -> Outcome:
    """Returns the outcome of one search."""
    truth = Truth.of(trace, scenario, hours)
    profiler = mlcd.TraceProfiler(
        trace,
        trial_cost=cost_of(probe),
        noise=PROBES[probe],
        seed=seed,
        kept_s=60.0 * probe if carry else 0.0,
    )
    key = (file, trace.job, strategy, scenario, hours, probe, seed)
    try:
        search = mlcd.DeploymentOptimizer(
            trace.space,
            truth.scenario,
            profiler.job_of(hours),
            strategy,
            seed,
            trial_cost=profiler.trial_seconds,
            earlier=earlier or (),
        )
    except mlcd.InvalidInput:  # the limit is below the cheapest trial
        return Outcome(*key, np.inf, True, 0, 0.0)
    try:
        pick = search.run(profiler).deployment
    except mlcd.NoFeasibleDeployment as problem:
        pick = problem.nearest.deployment
    except (mlcd.NothingObserved, mlcd.ProfilingFailed):
        return Outcome(*key, np.inf, True, len(search.trials), 0.0)
    ledger = search.ledger
    if pick not in truth.hours:
        return Outcome(*key, np.inf, True, len(search.trials), 0.0)
    left = search.work_left / search.job.work
    total, broken = truth.total(pick, ledger.hours, ledger.dollars, left)
    spent = ledger.dollars if truth.scenario.objective == "cost" else ledger.hours
    return Outcome(*key, total, broken, len(search.trials), spent / truth.best)


_TRACES: dict[str, dict[str, Trace]] = {}


def load(file: str, data: Path) -> dict[str, Trace]:
    """Returns the traces of a file with at least six cells and one that works."""
    if file not in _TRACES:
        traces = read_traces(data / f"{file}.csv", sizes())
        _TRACES[file] = {
            name: t for name, t in traces.items() if len(t.cells) >= 6 and np.isfinite(t.fastest)
        }
    return _TRACES[file]


@dataclass(frozen=True)
class Unit:
    """What is computed, kept and skipped as one: all seeds of one search."""

    file: str
    job: str
    strategy: str
    scenario: str
    hours: float
    probe: int
    seeds: int
    earlier: int
    carry: bool


def work(task: tuple[Unit, str]) -> tuple[Unit, list[Outcome]]:
    """Returns a unit and its outcomes."""
    unit, data = task
    trace = load(unit.file, Path(data))[unit.job]
    outcomes = []
    for seed in range(unit.seeds):
        known = earlier_jobs(unit.file, unit.job, Path(data), unit.earlier, seed)
        outcomes.append(
            replay(
                *(trace, unit.file, unit.strategy, unit.scenario, unit.hours, unit.probe, seed),
                known,
                unit.carry,
            )
        )
    return unit, outcomes


def kept(path: Path | None) -> dict[Unit, list[Outcome]]:
    """Returns what an earlier call has written to `path`; a last line cut short is ignored."""
    found: dict[Unit, list[Outcome]] = {}
    if path is not None and path.is_file():
        for line in path.read_text().splitlines():
            try:
                fields = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[Unit(**fields["unit"])] = [Outcome(**o) for o in fields["outcomes"]]
    return found


def collect(units: list[Unit], data: Path, workers: int, path: Path | None) -> list[Outcome]:
    """Returns the outcomes of all units; those that `path` holds are not computed again."""
    known = kept(path)
    todo = [(unit, str(data)) for unit in units if unit not in known]
    with (
        open(os.devnull if path is None else path, "a", encoding="utf-8") as sink,
        ProcessPoolExecutor(workers) as pool,
    ):
        for unit, outcomes in pool.map(work, todo, chunksize=4):
            known[unit] = outcomes
            line = {"unit": asdict(unit), "outcomes": [asdict(o) for o in outcomes]}
            # A newline first: whatever a kill left of the line before ends here.
            sink.write("\n" + json.dumps(line))
            sink.flush()
    return [outcome for unit in units for outcome in known[unit]]


def bootstrap(values: np.ndarray, jobs: np.ndarray, draws: int = 1000) -> tuple[float, float]:
    """Returns the 95 % interval of the median by resampling whole jobs."""
    rng = np.random.default_rng(0)
    groups = [values[jobs == job] for job in np.unique(jobs)]
    medians = [
        np.median(np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))]))
        for _ in range(draws)
    ]
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def table(outcomes: list[Outcome], strategies, scenarios, hours, probe, floors) -> list[str]:
    """Returns the Markdown table of one job length and probe length."""
    lines = [
        f"\nfastest run {hours:g} h, probes of {probe} min: median / p90 / violations (trials)",
        "| | " + " | ".join(scenarios) + " |",
        "|---" * (len(scenarios) + 1) + "|",
    ]
    row = []
    for scenario in scenarios:
        f = np.array(floors[scenario, hours, probe])
        finite = f[np.isfinite(f)]
        row.append(
            f"{np.median(finite):.2f} / {np.quantile(finite, 0.9):.2f} / {np.isinf(f).mean():.0%}"
            if len(finite)
            else "none"
        )
    lines.append("| floor (unkeepable) | " + " | ".join(row) + " |")
    for strategy in strategies:
        row = []
        for scenario in scenarios:
            chosen = [
                o
                for o in outcomes
                if (o.strategy, o.scenario, o.hours, o.probe) == (strategy, scenario, hours, probe)
            ]
            totals = np.array([o.total for o in chosen])
            row.append(
                f"{np.quantile(totals, 0.5, method='nearest'):.2f} / "
                f"{np.quantile(totals, 0.9, method='nearest'):.2f} / "
                f"{np.mean([o.violated for o in chosen]):.0%} "
                f"({np.mean([o.trials for o in chosen]):.1f})"
            )
        lines.append(f"| {strategy} | " + " | ".join(row) + " |")
    return lines


def ratios(outcomes: list[Outcome], strategies, scenarios) -> list[str]:
    """Returns paired ratios other / gittins, above 1 where gittins is better."""
    worth = {
        (o.file, o.job, o.scenario, o.hours, o.probe, o.seed, o.strategy): min(o.total, 1e3)
        * (PENALTY if o.violated else 1.0)
        for o in outcomes
    }
    lines = [
        f"\npaired over all lengths and probes, other / gittins, a violation counts x{PENALTY:g}: "
        "median [95 % interval over jobs], geometric mean, share won",
        "| | all | " + " | ".join(scenarios) + " |",
        "|---" * (len(scenarios) + 2) + "|",
    ]
    for strategy in strategies:
        if strategy == "gittins":
            continue
        cells = []
        for scenario in (None, *scenarios):
            pairs = [
                (value / worth[(*key[:-1], "gittins")], f"{key[0]}/{key[1]}")
                for key, value in worth.items()
                if key[-1] == strategy and scenario in (None, key[2])
            ]
            values = np.array([p[0] for p in pairs])
            low, high = bootstrap(values, np.array([p[1] for p in pairs]))
            cells.append(
                f"{np.median(values):.2f} [{low:.2f}, {high:.2f}], "
                f"{np.exp(np.log(values).mean()):.2f}, {np.mean(values > 1):.0%}"
            )
        lines.append(f"| {strategy} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the trace files")
    parser.add_argument("--files", nargs="+", default=list(FILES))
    parser.add_argument("--strategies", nargs="+", default=list(mlcd.strategies()))
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS))
    parser.add_argument("--hours", nargs="+", type=float, default=[3.0, 24.0, 72.0])
    parser.add_argument("--probes", nargs="+", type=int, default=list(PROBES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--earlier", type=int, default=0, help="other jobs to learn from")
    parser.add_argument(
        "--carry", action="store_true", help="what a trial trains is carried on and counts"
    )
    parser.add_argument("--out", type=Path, help="JSON lines of every outcome, to go on from")
    args = parser.parse_args()
    missing = [f for f in args.files if not (args.data / f"{f}.csv").is_file()]
    if missing:
        raise SystemExit(
            f"no {missing[0]}.csv in {args.data}; give a folder that has it by --data or "
            "MLCD_TRACES (the README says where the tables come from)"
        )

    began = time.perf_counter()
    jobs = [(file, job) for file in args.files for job in load(file, args.data)]
    units = [
        Unit(file, job, strategy, scenario, hours, probe, args.seeds, args.earlier, args.carry)
        for hours in args.hours
        for probe in args.probes
        for strategy in args.strategies
        for file, job in jobs
        for scenario in args.scenarios
    ]
    outcomes = collect(units, args.data, args.workers, args.out)
    floors = {
        (scenario, hours, probe): [
            floor_of(Truth.of(load(file, args.data)[job], scenario, hours), probe)
            for file, job in jobs
        ]
        for scenario in args.scenarios
        for hours in args.hours
        for probe in args.probes
    }
    lines = [
        f"{len(jobs)} jobs of {', '.join(args.files)}; {args.seeds} seeds; "
        f"{len(outcomes)} searches; {platform.machine()}, {os.cpu_count()} cores, "
        f"mlcd-bo {mlcd.__version__}, {time.perf_counter() - began:.0f} s"
    ]
    for probe in args.probes:
        for hours in args.hours:
            lines += table(outcomes, args.strategies, args.scenarios, hours, probe, floors)
    if "gittins" in args.strategies and len(args.strategies) > 1:
        lines += ratios(outcomes, args.strategies, args.scenarios)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
