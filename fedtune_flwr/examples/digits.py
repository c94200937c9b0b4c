"""Ten clients in Flower's simulation, half of them with wrong labels.

Run `python digits.py`, then `python digits.py --off`, and compare the accuracies. The clients are
functions of this file; Ray runs them in other processes. Needs fedtune-flwr[simulation] and
scikit-learn.
"""

import argparse
import os

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

from fedtune_flwr import (
    FedTune,
    Int,
    Log,
    ProxyTask,
    SearchSpace,
    fedtune_client,
    hparams,
    profile,
)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All digits, shuffled."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return torch.tensor(pixels[order] / 16, dtype=torch.float32), torch.tensor(labels[order])


def client_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's share; every second client has four in five labels drawn at random."""
    k, clients = (int(context.node_config[n]) for n in ("partition-id", "num-partitions"))
    x, y = (part[700:][k::clients] for part in digits())
    rng = np.random.default_rng(k)
    wrong = torch.from_numpy(rng.random(len(y)) < 0.8 * (k % 2))
    return x, torch.where(wrong, torch.from_numpy(rng.integers(0, 10, len(y))), y)


def new_model() -> torch.nn.Module:
    """A perceptron with one hidden layer."""
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def received_model(message: Message) -> torch.nn.Module:
    """A model with the arrays of a message."""
    model = new_model()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return model


def train(message: Message, context: Context) -> Message:
    """An ordinary client: SGD with the hyperparameters in its config."""
    hp = hparams(message, {"lr": 0.1, "local-epochs": 1})
    x, y = client_data(context)
    model = received_model(message)
    optimizer = torch.optim.SGD(model.parameters(), lr=hp.lr)
    for _ in range(hp.local_epochs):
        for rows in torch.randperm(len(y)).split(16):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
        "fedtune.applied": hp.echo(),
    }
    return Message(RecordDict(content), reply_to=message)


def profile_fn(message: Message, context: Context) -> dict[str, float]:
    """Five numbers about the client's data."""
    return profile([client_data(context)], received_model(message))


def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy on 400 digits that no client and no proxy holds."""
    model = new_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = (part[:400] for part in digits())
    with torch.no_grad():
        return MetricRecord({"accuracy": float((model(x).argmax(dim=1) == y).double().mean())})


def main() -> None:
    """Runs the simulation and prints accuracies and what each client got."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--budget", type=int, default=36, help="proxy evaluations")
    parser.add_argument("--off", action="store_true", help="plain FedAvg, lr 0.3, 2 epochs")
    arguments = parser.parse_args()
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    from flwr.simulation import run_simulation

    client = ClientApp()
    client.train()(train)
    fedtune_client(client, profile_fn)
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedTune(
            FedAvg(
                fraction_evaluate=0.0,
                min_train_nodes=arguments.clients,
                min_available_nodes=arguments.clients,
            ),
            None
            if arguments.off
            else SearchSpace(lr=Log(0.02, 2.0), **{"local-epochs": Int(1, 4)}),
            ProxyTask(
                new_model, data=tuple(p[400:700] for p in digits()), defaults={"batch-size": 16}
            ),
            budget=arguments.budget,
            progress=print,
        )
        torch.manual_seed(0)
        result = strategy.start(
            grid,
            ArrayRecord(new_model().state_dict()),
            arguments.rounds,
            train_config=ConfigRecord({"lr": 0.3, "local-epochs": 2}),
            evaluate_fn=evaluate,
        )
        for server_round, metrics in result.evaluate_metrics_serverapp.items():
            print(f"round {server_round}: accuracy {metrics['accuracy']:.3f}")
        if strategy.report is not None:
            print(strategy.report.summary())
        for row in strategy.clients.values():
            print(row.node_id, row.values, f"weight x {row.weight_factor:.2f}")

    run_simulation(
        server,
        client,
        arguments.clients,
        backend_config={
            "init_args": {"num_cpus": 1, "logging_level": "error", "log_to_driver": False},
            "client_resources": {"num_cpus": 1.0},
        },
    )


if __name__ == "__main__":
    main()
