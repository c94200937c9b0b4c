"""FedAvg on ten clients, half with wrong labels: one best setting for all against FedTune.

Both arms run in one Flower simulation, one after the other, from the same initial model, and both
get the same number of proxy evaluations to choose their settings.
"""

import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ci.demo.job import Measure, Progress, Result, main

if TYPE_CHECKING:
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord
    from flwr.serverapp import Grid
    from matplotlib.figure import Figure

CLIENTS = 10
ROUNDS = 10
BUDGET = 36
NOISE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.4, 0.5, 0.6, 0.7)
SEED = 1


@functools.cache
def digits() -> "dict[str, tuple[torch.Tensor, torch.Tensor]]":
    """The 1,797 digits: 500 test, 300 proxy, the rest cut into one part a client."""
    import torch
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels / 16, dtype=torch.float32)
    y = torch.tensor(labels, dtype=torch.int64)
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(y))
    parts = {"test": order[:500], "proxy": order[500:800]}
    data = {name: (x[rows], y[rows]) for name, rows in parts.items()}
    for k, rows in enumerate(np.array_split(order[800:], CLIENTS)):
        wrong = torch.from_numpy(rng.random(len(rows)) < NOISE[k])
        # A wrong label is the next digit: a kind of noise that the emulator does not know.
        data[str(k)] = (x[rows], torch.where(wrong, (y[rows] + 1) % 10, y[rows]))
    return data


def new_model() -> "torch.nn.Module":
    """A perceptron with one hidden layer."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def received_model(message: "Message") -> "torch.nn.Module":
    """A model with the arrays of a message."""
    model = new_model()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return model


def profile_fn(message: "Message", context: "Context") -> dict[str, float]:
    """What a client tells about its data."""
    from fedtune_flwr import profile

    data = digits()[str(context.node_config["partition-id"])]
    return profile([data], received_model(message))


def train(message: "Message", context: "Context") -> "Message":
    """An ordinary client: SGD with the hyperparameters in its config."""
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    from fedtune_flwr import hparams

    torch.set_num_threads(1)
    hp = hparams(message, {"lr": 0.1, "local-epochs": 1})
    x, y = digits()[str(context.node_config["partition-id"])]
    model = received_model(message)
    optimizer = torch.optim.SGD(model.parameters(), lr=hp.lr)
    # Node ids are drawn anew every run; the partition and the round are not.
    config = message.content.config_records["config"]
    partition = int(context.node_config["partition-id"])
    order = torch.Generator().manual_seed(1000 * int(str(config["server-round"])) + partition)
    for _ in range(hp.local_epochs):
        for rows in torch.randperm(len(y), generator=order).split(16):
            loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y)}),
            "fedtune.applied": hp.echo(),
        }
    )
    return Message(content, reply_to=message)


def ready(message: "Message", context: "Context") -> "Message":
    """Loads what training will need and says so."""
    from flwr.app import Message, RecordDict

    digits()
    return Message(RecordDict(), reply_to=message)


def evaluate(_: int, arrays: "ArrayRecord") -> "MetricRecord":
    """Accuracy of the global model on the test set."""
    import torch
    from flwr.app import MetricRecord

    model = new_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = digits()["test"]
    with torch.no_grad():
        right = model(x).argmax(dim=1) == y
    return MetricRecord({"accuracy": float(right.double().mean())})


def run(progress: Progress) -> Result:
    """Runs the simulation and returns both arms' figures."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import logging
    import time
    import warnings

    import torch
    from flwr.app import ArrayRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    # Imported by name, so that the actors import it too instead of getting a copy a message.
    from ci.demo.jobs import fedtune_flwr as job
    from fedtune_flwr import FedTune, Int, Log, ProxyTask, SearchSpace, fedtune_client

    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    client = ClientApp()
    client.train()(job.train)
    client.query("ready")(job.ready)
    fedtune_client(client, job.profile_fn)
    space = SearchSpace(lr=Log(0.02, 2.0), **{"local-epochs": Int(1, 4)})
    proxy = ProxyTask(job.new_model, data=digits()["proxy"], defaults={"batch-size": 16})
    arms: dict[str, dict[str, Any]] = {}
    server = ServerApp()

    @server.main()
    def both_arms(grid: "Grid", context: "Context") -> None:
        # Ray takes seconds to start; the tuner's library loads meanwhile.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import botorch  # noqa: F401

        while len(nodes := list(grid.get_node_ids())) < CLIENTS:
            time.sleep(0.1)
        # The first message waits for Ray to start; that is neither arm's doing.
        hello = [Message(RecordDict(), node, "query.ready") for node in nodes]
        list(grid.send_and_receive(hello))
        progress("simulation is up")
        for name, customize in (("without", False), ("with", True)):
            inner = FedAvg(
                fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS
            )
            strategy = FedTune(
                inner, space, proxy, budget=BUDGET, customize=customize, progress=progress
            )
            torch.manual_seed(SEED)
            start = ArrayRecord(new_model().state_dict())
            began = time.perf_counter()
            result = strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=evaluate)
            curve = [
                float(m["accuracy"])  # type: ignore[arg-type]
                for _, m in sorted(result.evaluate_metrics_serverapp.items())
            ]
            progress(f"{name} plugin: accuracy {np.mean(curve[-3:]):.3f}")
            arms[name] = {
                "curve": curve,
                "seconds": time.perf_counter() - began,
                "rows": list(strategy.clients.values()),
                "report": strategy.report,
            }

    run_simulation(
        server,
        client,
        CLIENTS,
        backend_config={
            "init_args": {"num_cpus": 1, "log_to_driver": False, "logging_level": "error"},
            "client_resources": {"num_cpus": 1.0},
        },
    )
    return _result(arms)


def _range(low: float, high: float) -> str:
    """Both ends, or the one value where they are the same."""
    ends = [f"{low:.2g}", f"{high:.2g}"]
    return ends[0] if ends[0] == ends[1] else "-".join(ends)


def _result(arms: dict[str, dict[str, Any]]) -> Result:
    accuracy = {name: float(np.mean(arm["curve"][-3:])) for name, arm in arms.items()}
    seconds = {name: float(arm["seconds"]) for name, arm in arms.items()}
    gain = arms["with"]["report"].gain
    rows = arms["with"]["rows"]
    lr = [row.values["lr"] for row in rows]
    epochs = [row.values["local-epochs"] for row in rows]
    factor = [row.weight_factor for row in rows]
    weight = [f / float(np.mean(factor)) for f in (min(factor), max(factor))]
    setting = arms["without"]["rows"][0].values
    return Result(
        data=f"digits, {CLIENTS} clients, half with 30-70 % wrong labels, {ROUNDS} rounds",
        without=(
            f"accuracy {accuracy['without']:.3f}, lr {setting['lr']:.2g} x "
            f"{setting['local-epochs']} epochs for all, {seconds['without']:.0f} s"
        ),
        with_plugin=(
            f"accuracy {accuracy['with']:.3f}, lr {_range(min(lr), max(lr))} x "
            f"{_range(min(epochs), max(epochs))}, weights {_range(*weight)}, "
            f"{seconds['with']:.0f} s"
        ),
        measures=[
            Measure(
                "test accuracy, mean of the last 3 rounds", accuracy["without"], accuracy["with"]
            ),
            Measure(
                "test accuracy after 3 rounds",
                arms["without"]["curve"][3],
                arms["with"]["curve"][3],
            ),
            Measure("tuning and training", seconds["without"], seconds["with"], "s"),
            Measure(
                "proxy evaluations", arms["without"]["report"].cost, arms["with"]["report"].cost
            ),
            Measure("emulated gain of customization", 0.0, gain.mean if gain else 0.0),
        ],
        caption=(
            "Left: test accuracy of the global model by round. Both arms had the same number of "
            "proxy evaluations; the arm without chose its best setting for all clients. Right: "
            "what FedTune gave each client, against the one number that told the clients apart, "
            "the loss of the server's reference model on their data."
        ),
        figure=_figure(arms),
    )


def _figure(arms: dict[str, dict[str, Any]]) -> "Figure":
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
    for name, label, colour in (
        ("without", "FedAvg, best setting for all", "#888888"),
        ("with", "FedTune(FedAvg)", "#1f77b4"),
    ):
        curve = arms[name]["curve"]
        left.plot(range(len(curve)), curve, label=label, color=colour, marker=".")
    left.set(xlabel="round", ylabel="test accuracy", ylim=(0.3, 1.0))
    left.legend(loc="lower right", frameon=False)
    rows = arms["with"]["rows"]
    loss = [row.metrics["reference-loss"] for row in rows]
    total = sum(row.weight_factor for row in rows)
    right.scatter(
        loss,
        [row.weight_factor / total for row in rows],
        color="#1f77b4",
        label="share of the average",
        zorder=3,
    )
    right.scatter(
        loss,
        [row.values["lr"] for row in rows],
        color="#d62728",
        marker="x",
        label="learning rate",
        zorder=3,
    )
    right.axhline(1 / len(rows), color="#888888", linewidth=0.8)
    right.set(xlabel="reported reference loss (nats)", ylabel="share, learning rate")
    epochs = right.twinx()
    epochs.scatter(
        loss,
        [row.values["local-epochs"] for row in rows],
        color="#2ca02c",
        marker="_",
        label="local epochs",
    )
    epochs.set_ylabel("local epochs")
    epochs.yaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = right.get_legend_handles_labels()
    more, names = epochs.get_legend_handles_labels()
    right.legend(handles + more, labels + names, frameon=False, fontsize=7)
    return figure


if __name__ == "__main__":
    main(run)
