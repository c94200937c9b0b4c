"""Server overhead of the wrapper with thousands of clients, in an in-process grid.

    python scale.py --clients 10000

The clients return the arrays they were sent, so that the time is the server's. The wrapper's share
is the difference between the wrapped and the plain strategy's configure_train and aggregate_train,
measured in turns in one process, in CPU time so that other work on the machine does not count.
"""

import argparse
import json
import logging
import platform
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedtune_flwr import FedTune, Int, Log, Policy, SearchSpace, fedtune_client
from fedtune_flwr._metrics import Scaler
from fedtune_flwr.testing import FakeGrid, task_identity

SPACE = SearchSpace(lr=Log(1e-3, 1.0), **{"local-epochs": Int(1, 8)})
POLICY = Policy(
    SPACE,
    SPACE.coordinates({"lr": 0.1, "local-epochs": 2}),
    Scaler((4.0, 0.5, 1.0, 0.2, 0.0), (1.0, 0.3, 1.0, 0.1, 0.5)),
    {("lr", "reference-loss"): -1.0, ("weight", "reference-loss"): -1.5},
)


def client() -> ClientApp:
    """Echoes the arrays; reports metrics that differ from node to node."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        n = 10 + int(context.node_config["partition-id"]) % 500
        content = {
            "arrays": message.content.array_records["arrays"],
            "metrics": MetricRecord({"num-examples": n, "loss": 1.0}),
            "fedtune.applied": ConfigRecord(dict(message.content.config_records["config"])),
        }
        return Message(RecordDict(content), reply_to=message)

    def profile(message: Message, context: Context) -> dict[str, float]:
        k = int(context.node_config["partition-id"])
        return {"log-size": 3 + k % 5, "label-entropy": (k % 10) / 10, "reference-loss": k % 7}

    return fedtune_client(app, profile)


def one_round(strategy: Strategy, grid: FakeGrid, arrays: ArrayRecord, number: int) -> float:
    """Server CPU seconds of a round: configuring and aggregating, without the clients."""
    began = time.process_time()
    messages = list(strategy.configure_train(number, arrays, ConfigRecord({"lr": 0.1}), grid))
    configured = time.process_time() - began
    replies = grid.send_and_receive(messages)
    began = time.process_time()
    strategy.aggregate_train(number, replies)
    strategy.aggregate_evaluate(number, [])
    return configured + time.process_time() - began


def main() -> None:
    """Prints milliseconds per client and round, and peak memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    n = arguments.clients
    weights = np.random.default_rng(0).normal(size=arguments.parameters).astype(np.float32)
    arrays = ArrayRecord({"w": Array(weights)})
    nodes = {"fraction_evaluate": 0.0, "min_train_nodes": n, "min_available_nodes": n}
    seconds: dict[str, list[float]] = {"FedAvg": [], "FedTune": [], "FedTune, state_dir": []}
    with task_identity(), tempfile.TemporaryDirectory() as folder:
        grid = FakeGrid(client(), n)
        strategies: dict[str, Strategy] = {
            "FedAvg": FedAvg(**nodes),
            "FedTune": FedTune(FedAvg(**nodes), policy=POLICY),
            "FedTune, state_dir": FedTune(FedAvg(**nodes), policy=POLICY, state_dir=folder),
        }
        first = {
            name: one_round(strategy, grid, arrays, 1) for name, strategy in strategies.items()
        }
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(2, arguments.rounds + 2):
            for name, strategy in strategies.items():
                seconds[name].append(one_round(strategy, grid, arrays, number))
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plain = np.asarray(seconds["FedAvg"])
    rows: dict[str, Any] = {}
    print(f"{n} clients, {arguments.parameters} parameters, {arguments.rounds} rounds")
    print(f"{'':20} {'ms/client/round':>16} {'overhead':>16} {'first round':>12}")
    for name, values in seconds.items():
        each = 1e3 * np.asarray(values) / n
        over = 1e3 * (np.asarray(values) - plain) / n
        rows[name] = {"ms": each.tolist(), "overhead_ms": over.tolist(), "first_s": first[name]}
        spread = f"{np.median(over):.3f} ({over.min():.3f}-{over.max():.3f})"
        print(f"{name:20} {np.median(each):16.3f} {spread:>16} {first[name]:10.1f} s")
    grown = (after - before) / 1024
    print(f"peak memory {after / 1024:.0f} MiB, of which {grown:.0f} MiB since round 1")
    if arguments.out is not None:
        machine = f"{platform.machine()}, Python {platform.python_version()}"
        text = json.dumps({"machine": machine, "clients": n, "rows": rows}, indent=1)
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
