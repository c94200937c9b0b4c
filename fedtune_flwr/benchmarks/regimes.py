"""Where per-client hyperparameters gain, and where they do not.

For every regime and seed: a federation, its metrics, and arms that all see the same clients,
initial models and orders of examples. Arms that tune get the same number of proxy evaluations.
Arms named "best" choose their setting on the test set, which nobody can: rivals at their best.

    python benchmarks/regimes.py --data fashion --seeds 8     # appends rows, resumes
    python benchmarks/regimes.py --data fashion --table       # prints what there is
    python benchmarks/regimes.py --regimes flip --report a.png  # the plots of a tuning run

The trained federations are emulated in this process (the same code as the tuner's, checked against
one client after another in the tests), with the real clients and the test set.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).parent))
import federations
import regimes_table
import rivals
from rivals import Outcome

from fedtune_flwr import Emulator, Int, Linear, Log, Policy, ProxyTask, SearchSpace, tune
from fedtune_flwr._metrics import NAMES, as_matrix, label_entropy
from fedtune_flwr._options import TuneOptions
from fedtune_flwr._plots import figure
from fedtune_flwr._report import TuneReport
from fedtune_flwr._simulate import Candidate, Emulation, candidate

BATCH = 16
GRID_LR = (0.05, 0.15, 0.45, 1.2)
GRID_EPOCHS = (1, 2, 4)
GRID = [{"lr": lr, "local-epochs": e} for lr in GRID_LR for e in GRID_EPOCHS]
SPACE = {"lr": Log(0.02, 2.0), "local-epochs": Int(1, 5)}
ADJUSTED = {**SPACE, "logit-adjustment": Linear(0.0, 1.2)}
LAST = 4  # rounds whose mean accuracy counts


class Cell:
    """One regime with one seed, and every arm on it."""

    def __init__(self, data: str, regime: str, seed: int, budget: int) -> None:
        self.source = getattr(federations, data)(seed)
        self.federation = federations.federation(self.source, regime, seed)
        self.clients = self.federation.clients
        self.seed = seed
        self.options = TuneOptions(
            budget=budget,
            rounds=self.source.rounds,
            fraction=self.source.per_round / self.source.clients,
        )
        self.task = ProxyTask(
            self.source.model,
            data=self.source.proxy,
            defaults={"batch-size": BATCH},
            classes=self.source.classes,
        )
        self.emulator = Emulator(self.task, seed=seed)
        self.metrics = [self.emulator.measure(x, y) for x, y in self.clients]
        self.matrix = as_matrix(self.metrics)
        self.log_size = np.log([len(y) for _, y in self.clients])
        self.real = [self._real(sampling) for sampling in range(2)]

    def _real(self, sampling: int) -> Emulation:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * self.seed + sampling)
            model = self.source.model()
        return Emulation(
            tuple(x for x, _ in self.clients),
            tuple(y for _, y in self.clients),
            self.matrix,
            *self.source.test,
            {k: v.detach().clone() for k, v in model.state_dict().items()},
            self.source.per_round,
            1000 * self.seed + sampling,
        )

    def row(self, outcomes: list[Outcome]) -> dict[str, Any]:
        """Figures of one arm: means over the two runs."""
        model = self.task.model_fn()
        worst = []
        for outcome in outcomes:
            with torch.no_grad():
                each = self.federation.accuracy_by_client(
                    lambda x, state=outcome.state: functional_call(model, state, (x,)).argmax(1),
                    self.source.test,
                )
            worst.append(100 * np.sort(each)[: max(1, len(each) // 10)].mean())
        curve = np.mean([o.curve for o in outcomes], axis=0)
        return {
            "accuracy": round(float(curve[-LAST:].mean()), 3),
            "worst": round(float(np.mean(worst)), 3),
            "steps": int(np.mean([sum(o.steps) for o in outcomes])),
            "curve": [round(float(c), 2) for c in curve],
            "work": [int(s) for s in np.mean([o.steps for o in outcomes], axis=0)],
        }

    def run(self, settings: list[Candidate], method: str = "fedavg") -> list[dict[str, Any]]:
        """Figures of several settings, both runs of each, scored after every round."""
        runs = [(e, c) for c in settings for e in self.real]
        outcomes = rivals.train(
            self.task, runs, self.source.rounds, scored=self.source.rounds, method=method
        )
        return [self.row(outcomes[i : i + 2]) for i in range(0, len(outcomes), 2)]

    @functools.cache  # noqa: B019 - a cell lives as long as its arms
    def grid_scores(self, kind: str, method: str = "fedavg", **extra: float) -> list[float]:
        """Test accuracy of each of the 12 settings, with weights of a kind."""
        weights = self.weights(kind)
        return self.chosen_on_test([self.of({**p, **extra}, weights) for p in GRID], method)

    def chosen_on_test(self, settings: list[Candidate], method: str = "fedavg") -> list[float]:
        """Test accuracy of the first of the two runs, to choose by."""
        runs = [(self.real[0], c) for c in settings]
        outcomes = rivals.train(self.task, runs, self.source.rounds, scored=LAST, method=method)
        return [float(np.mean(o.curve)) for o in outcomes]

    def of(self, setting: dict[str, float], log_weight: np.ndarray) -> Candidate:
        """One setting for all clients."""
        return Candidate((setting,) * len(self.clients), log_weight)  # type: ignore[arg-type]

    def of_policy(self, policy: Policy) -> Candidate:
        """What a policy gives the real clients."""
        return candidate(policy, self.real[0])

    @functools.cache  # noqa: B019 - a cell lives as long as its arms
    def tuned(self, tuner: str, customize: bool, adjusted: bool = False) -> TuneReport:
        """A tuning run on the proxy."""
        return tune(
            SearchSpace(**(ADJUSTED if adjusted else SPACE)), self.emulator, self.metrics,
            tuner=tuner, options=replace(self.options, customize=customize), seed=self.seed,
            progress=lambda line: None,
        )  # fmt: skip

    def weights(self, kind: str) -> np.ndarray:
        """Logarithms of aggregation weights."""
        if kind == "n":
            return self.log_size
        if kind == "equal":
            return 0 * self.log_size
        if kind == "loss":
            return self.log_size - 1.5 * self.matrix[:, NAMES.index("reference-loss")]
        if kind != "entropy":
            raise ValueError(f"kind={kind!r} is unknown; allowed: n, equal, loss, entropy")
        counts = [np.bincount(y.numpy(), minlength=self.source.classes) for _, y in self.clients]
        return self.log_size + 3 * np.asarray([label_entropy(c) for c in counts])


def tuned_arm(tuner: str, customize: bool, adjusted: bool = False) -> "Arm":
    """An arm that tunes on the proxy."""

    def run(cell: Cell) -> dict[str, Any]:
        report = cell.tuned(tuner, customize, adjusted)
        row = cell.run([cell.of_policy(report.policy)])[0]
        gain = report.gain
        return row | {
            "seconds": round(report.seconds, 2),
            "evaluations": report.cost,
            "kept": report.policy.customizes,
            "emulated": None if gain is None else [100 * gain.mean, 100 * gain.standard_error],
        }

    return run


def grid_arm(kind: str, method: str = "fedavg", **extra: float) -> "Arm":
    """An arm that takes the best of 12 settings on the test set."""

    def run(cell: Cell) -> dict[str, Any]:
        best = int(np.argmax(cell.grid_scores(kind, method, **extra)))
        setting = cell.of({**GRID[best], **extra}, cell.weights(kind))
        return cell.run([setting], method)[0] | {"setting": GRID[best]}

    return run


def disco(cell: Cell) -> dict[str, Any]:
    """FedDisco's weights, of the published strength or a fifth of it, whichever tests better."""
    strengths = list(rivals.DISCO)
    best = max(strengths, key=lambda method: max(cell.grid_scores("n", method)))
    return grid_arm("n", best)(cell) | {"method": best}


def best_global(cell: Cell) -> dict[str, Any]:
    """The best on the test set of every setting for all that any arm without adjustment tried."""
    settings, scores = [], []
    for kind, mu in (("n", 0.0), ("n", 0.1), ("equal", 0.0)):
        extra = {"proximal-mu": mu} if mu else {}
        settings += [cell.of({**point, **extra}, cell.weights(kind)) for point in GRID]
        scores += cell.grid_scores(kind, **extra)
    tuned = []
    for tuner, customize in (("random", False), ("bayes", True)):
        report = cell.tuned(tuner, customize)
        for trial in report.trials:
            if not trial.customizes and trial.fidelity >= 1 and trial.stage == "global":
                space = report.policy.space
                base = space.coordinates(trial.values)
                exponent = trial.point[len(space)]
                policy = Policy(space, base, report.policy.scaler, weight_exponent=exponent)
                tuned.append(cell.of_policy(policy))
    scores += cell.chosen_on_test(tuned)
    settings += tuned
    return cell.run([settings[int(np.argmax(scores))]])[0] | {"tried": len(settings)}


def delta_sgd(cell: Cell) -> dict[str, Any]:
    """Per-client adaptive steps; the local epochs are chosen on the test set."""
    settings = [cell.of({"local-epochs": e}, cell.weights("n")) for e in GRID_EPOCHS]
    best = int(np.argmax(cell.chosen_on_test(settings, "delta-sgd")))
    return cell.run([settings[best]], "delta-sgd")[0]


def fedex(cell: Cell) -> dict[str, Any]:
    """Tuning while training, on the clients, around the setting that is best on the test set."""
    base = GRID[int(np.argmax(cell.grid_scores("n")))]
    near = rivals.perturbed(base, 9, cell.seed, 5)
    return cell.row([rivals.fedex(cell.task, e, near, cell.source.rounds) for e in cell.real])


Arm = Callable[[Cell], dict[str, Any]]
ARMS: dict[str, Arm] = {
    "global, proxy random": tuned_arm("random", False),
    "fedtune": tuned_arm("bayes", True),
    "fedtune, random tuner": tuned_arm("random", True),
    "best of 12": grid_arm("n"),
    "best global tried": best_global,
    "best, equal weights": grid_arm("equal"),
    "best, fedprox": grid_arm("n", **{"proximal-mu": 0.1}),
    "best, fednova": grid_arm("n", "fednova"),
    "best, loss weights": grid_arm("loss"),
    "best, entropy weights": grid_arm("entropy"),
    "best, feddisco-like": disco,
    "best, adjustment 0.8": grid_arm("n", **{"logit-adjustment": 0.8}),
    "delta-sgd": delta_sgd,
    "fedex-like": fedex,
    "global + adjustment, proxy": tuned_arm("random", False, True),
    "fedtune + adjustment": tuned_arm("bayes", True, True),
    "global, proxy bayes": tuned_arm("bayes", False),
}
EXTRA = list(ARMS)[-3:]
CORE = [name for name in ARMS if name not in EXTRA]


def main() -> None:
    """Runs what is missing in the results file and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ("digits", "fashion", "fashion_cnn", "shakespeare")
    parser.add_argument("--data", choices=known, default="digits")
    parser.add_argument("--regimes", nargs="*", help="all of the data set by default")
    parser.add_argument("--arms", nargs="*", help=f"all by default; core: {', '.join(CORE)}")
    parser.add_argument("--core", action="store_true", help="only the core arms")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--budget", type=int, default=36, help="proxy evaluations of a tuned arm")
    parser.add_argument("--out", type=Path, help="a JSON row an arm is appended here")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    parser.add_argument("--markdown", action="store_true", help="print it as the README has it")
    parser.add_argument("--plot", type=Path, help="also write a plot here")
    parser.add_argument(
        "--report", type=Path, help="only write the plots of one tuning run, of the first regime"
    )
    arguments = parser.parse_args()
    default = Path(__file__).parent / "results" / f"regimes-{arguments.data}.jsonl"
    out = arguments.out or default
    torch.set_num_threads(1)
    natural = arguments.data == "shakespeare"
    chosen = arguments.regimes or ([federations.NATURAL] if natural else list(federations.REGIMES))
    names = arguments.arms or (CORE if arguments.core else list(ARMS))
    if arguments.report is not None:
        cell = Cell(arguments.data, chosen[0], arguments.first_seed, arguments.budget)
        figure(cell.tuned("bayes", True)).savefig(arguments.report, dpi=80)
        return
    if not arguments.table:
        done = {(r["regime"], r["seed"], r["arm"]) for r in regimes_table.rows(out)}
        for seed in range(arguments.first_seed, arguments.seeds):
            for regime in chosen:
                missing = [n for n in names if (regime, seed, n) not in done]
                if missing:
                    run_cell(arguments.data, regime, seed, arguments.budget, missing, out)
    show = regimes_table.markdown if arguments.markdown else regimes_table.table
    print(show(regimes_table.rows(out)))
    if arguments.plot is not None:
        regimes_table.plot(regimes_table.rows(out), arguments.plot)


def run_cell(data: str, regime: str, seed: int, budget: int, names: list[str], out: Path) -> None:
    """Runs arms of one cell and appends a row for each as soon as it is there."""
    began = time.process_time()
    cell = Cell(data, regime, seed, budget)
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        start = time.process_time()
        row = {"regime": regime, "seed": seed, "arm": name} | ARMS[name](cell)
        row["cpu_s"] = round(time.process_time() - start, 2)
        # One write a line: several processes may append to the same file.
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print(f"{regime}, seed {seed}: {time.process_time() - began:.0f} s of CPU", file=sys.stderr)


if __name__ == "__main__":
    main()
