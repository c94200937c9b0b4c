"""Where per-client hyperparameters gain, and where they do not.

For every regime and seed: a federation, its metrics, and arms that all see the same clients,
initial models and orders of examples. Arms that tune get the same number of proxy evaluations.
Arms named "oracle" choose their setting on the test set, which nobody can.

    python -m regimes --data digits --seeds 8 --out digits.json

The trained federations are emulated in this process (the same code as the tuner's, checked against
one client after another in the tests), with the real clients and the test set.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import federations

import fedtune_flwr
from fedtune_flwr import Emulator, Int, Linear, Log, ProxyTask, SearchSpace, tune
from fedtune_flwr._batched import simulate_batched
from fedtune_flwr._metrics import NAMES, as_matrix, label_entropy
from fedtune_flwr._simulate import Candidate, Emulation
from fedtune_flwr._tune import TuneOptions, candidate

BATCH = 16
GRID_LR = (0.05, 0.15, 0.45, 1.2)
GRID_EPOCHS = (1, 2, 4)
SPACE = {"lr": Log(0.02, 2.0), "local-epochs": Int(1, 5)}


class Cell:
    """One regime with one seed."""

    def __init__(self, data: str, regime: str, seed: int, budget: int) -> None:
        self.source = getattr(federations, data)(seed)
        self.clients = federations.federation(self.source, regime, seed)
        self.seed = seed
        self.options = TuneOptions(
            budget=budget,
            rounds=self.source.rounds,
            fraction=self.source.per_round / self.source.clients,
        )
        self.task = ProxyTask(
            self.source.new_model, data=self.source.proxy, defaults={"batch-size": BATCH}
        )
        self.emulator = Emulator(self.task, seed=seed)
        self.metrics = [self.emulator.measure(x, y) for x, y in self.clients]
        self.matrix = as_matrix(self.metrics)
        self.real = [self._real(s) for s in range(2)]

    def _real(self, sampling: int) -> Emulation:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * self.seed + sampling)
            model = self.source.new_model()
        return Emulation(
            tuple(x for x, _ in self.clients),
            tuple(y for _, y in self.clients),
            self.matrix,
            *self.source.test,
            {k: v.detach().clone() for k, v in model.state_dict().items()},
            self.source.per_round,
            1000 * self.seed + sampling,
        )

    def accuracy(self, candidates: list[Candidate]) -> np.ndarray:
        """Test accuracy, mean of the last 5 rounds and of two runs, in percent."""
        runs = [(e, c) for c in candidates for e in self.real]
        curves = simulate_batched(self.task, runs, self.source.rounds)
        return 100 * curves[:, -5:].mean(axis=1).reshape(-1, len(self.real)).mean(axis=1)

    def tuned(self, tuner: str, *, customize: bool, adjust: bool = False) -> dict[str, float]:
        """Accuracy after tuning, with what tuning took and decided."""
        space = dict(SPACE) | ({"logit-adjustment": Linear(0.0, 1.2)} if adjust else {})
        options = TuneOptions(**{**vars(self.options), "customize": customize})
        report = tune(
            SearchSpace(**space), self.emulator, self.metrics,
            tuner=tuner, options=options, seed=self.seed, progress=lambda line: None,
        )  # fmt: skip
        accuracy = float(self.accuracy([candidate(report.policy, self.real[0])])[0])
        work = candidate(report.policy, self.real[0]).values
        return {
            "accuracy": accuracy,
            "seconds": report.seconds,
            "evaluations": report.cost,
            "customizes": float(report.policy.customizes),
            "emulated_gain": 100 * report.gain.mean if report.gain else 0.0,
            "epochs": float(np.mean([float(v["local-epochs"]) for v in work])),
        }

    def grid(self, log_weight: Callable[[], np.ndarray], **extra: float) -> tuple[float, float]:
        """Best accuracy over the 12-point grid, chosen on the test set, and its epochs."""
        settings = [{"lr": lr, "local-epochs": e, **extra} for lr in GRID_LR for e in GRID_EPOCHS]
        weight = log_weight()
        candidates = [Candidate((s,) * len(self.clients), weight) for s in settings]
        scores = self.accuracy(candidates)
        best = int(scores.argmax())
        return float(scores[best]), float(settings[best]["local-epochs"])

    @property
    def log_size(self) -> np.ndarray:
        """Logarithm of the number of examples."""
        return np.log([len(y) for _, y in self.clients])

    def by_loss(self) -> np.ndarray:
        """Weights n exp(-1.5 loss)."""
        return self.log_size - 1.5 * self.matrix[:, NAMES.index("reference-loss")]

    def by_discrepancy(self) -> np.ndarray:
        """FedDisco-like weights relu(p - 0.5 d + 0.1), d the distance to equal classes."""
        shares = np.exp(self.log_size) / np.exp(self.log_size).sum()
        mixes = np.stack([np.bincount(y.numpy(), minlength=10) / len(y) for _, y in self.clients])
        distance = np.linalg.norm(mixes - 0.1, axis=1)
        # Relative, as the constants are made for shares of a few large clients.
        weight = np.maximum(shares * len(shares) - 0.5 * distance * 2 + 0.1, 1e-3)
        return np.log(weight)

    def by_entropy(self) -> np.ndarray:
        """Weights n exp(3 h), h the normalised label entropy."""
        entropy = [label_entropy(np.bincount(y.numpy(), minlength=10)) for _, y in self.clients]
        return self.log_size + 3 * np.asarray(entropy)


def arms(cell: Cell, wanted: set[str]) -> dict[str, dict[str, float]]:
    """Every wanted arm's figures."""
    makers: dict[str, Callable[[], dict[str, float]]] = {
        "global": lambda: cell.tuned("bayes", customize=False),
        "fedtune": lambda: cell.tuned("bayes", customize=True),
        "fedtune random": lambda: cell.tuned("random", customize=True),
        "global + adjustment": lambda: cell.tuned("bayes", customize=False, adjust=True),
        "fedtune + adjustment": lambda: cell.tuned("bayes", customize=True, adjust=True),
        "oracle grid": lambda: _named(cell.grid(lambda: cell.log_size)),
        "oracle grid, equal weights": lambda: _named(cell.grid(lambda: 0 * cell.log_size)),
        "oracle fedprox": lambda: _named(cell.grid(lambda: cell.log_size, **{"proximal-mu": 0.1})),
        "oracle loss weights": lambda: _named(cell.grid(cell.by_loss)),
        "oracle feddisco-like": lambda: _named(cell.grid(cell.by_discrepancy)),
        "oracle entropy weights": lambda: _named(cell.grid(cell.by_entropy)),
        "oracle adjustment": lambda: _named(
            cell.grid(lambda: cell.log_size, **{"logit-adjustment": 0.8})
        ),
    }
    return {name: make() for name, make in makers.items() if not wanted or name in wanted}


def _named(result: tuple[float, float]) -> dict[str, float]:
    return {"accuracy": result[0], "epochs": result[1]}


def table(results: dict[str, Any]) -> str:
    """A row a regime: accuracies, and paired differences of FedTune with standard errors."""
    lines = []
    for regime, seeds in results.items():
        names = list(next(iter(seeds.values())))
        lines.append(f"\n{regime} ({len(seeds)} seeds)")
        own = np.asarray([s["fedtune"]["accuracy"] for s in seeds.values()])
        kept = sum(s["fedtune"]["customizes"] for s in seeds.values())
        for name in names:
            each = np.asarray([s[name]["accuracy"] for s in seeds.values()])
            text = f"  {name:28} {each.mean():6.2f}"
            if name != "fedtune":
                difference = own - each
                text += f"   fedtune {difference.mean():+5.2f} +- {error(difference):.2f}"
            else:
                text += f"   customized in {kept:.0f}"
            lines.append(text)
    return "\n".join(lines)


def error(values: np.ndarray) -> float:
    """Standard error of a mean; NaN for one value."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def main() -> None:
    """Runs what is missing in the results file and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("digits", "fashion"), default="digits")
    parser.add_argument("--regimes", nargs="*", default=list(federations.REGIMES))
    parser.add_argument("--arms", nargs="*", default=[], help="all by default")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--budget", type=int, default=48)
    parser.add_argument("--out", type=Path, default=None, help="JSON, continued where it exists")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    arguments = parser.parse_args()
    out = arguments.out or Path(f"regimes-{arguments.data}.json")
    torch.set_num_threads(1)
    document: dict[str, Any] = {"results": {}}
    if out.exists():
        document = json.loads(out.read_text(encoding="utf-8"))
    document |= {
        "data": arguments.data,
        "budget": arguments.budget,
        "machine": f"{platform.machine()}, {platform.python_version()}",
        "versions": {"torch": torch.__version__, "fedtune_flwr": fedtune_flwr.__version__},
    }
    results = document["results"]
    for seed in range(0 if arguments.table else arguments.seeds):
        for regime in arguments.regimes:
            done = results.setdefault(regime, {})
            if str(seed) in done:
                continue
            began = time.perf_counter()
            cell = Cell(arguments.data, regime, seed, arguments.budget)
            done[str(seed)] = arms(cell, set(arguments.arms))
            print(f"{regime}, seed {seed}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
            part = out.with_suffix(".part")
            part.write_text(json.dumps(document, indent=1), encoding="utf-8")
            part.replace(out)
    print(table({regime: seeds for regime, seeds in results.items() if seeds}))


if __name__ == "__main__":
    main()
