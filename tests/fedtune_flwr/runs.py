"""Runs of a wrapped strategy on an in-process grid, and strategies to wrap."""

import numpy as np
from flwr.app import ConfigRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
)

from fedtune_flwr import Int, Log, Policy, SearchSpace, fedtune_client
from fedtune_flwr._metrics import Scaler
from fedtune_flwr._policy import WEIGHT
from fedtune_flwr.testing import FakeGrid
from tests.fedtune_flwr import apps

SPACE = SearchSpace(lr=Log(0.01, 1.0), **{"local-epochs": Int(1, 3)})
SCALER = Scaler((3.8, 1.0, 1.0, 0.1, 0.0), (1.0, 0.2, 1.0, 0.1, 1.0))
BY_LOSS = Policy(
    SPACE,
    SPACE.coordinates({"lr": 0.2, "local-epochs": 2}),
    SCALER,
    {("lr", "reference-loss"): -1.0, (WEIGHT, "reference-loss"): -1.0},
    1.0,
    "tuned",
)
NODES = {"min_train_nodes": 4, "min_available_nodes": 4}

STRATEGIES = {
    "FedAvg": lambda: FedAvg(**NODES),
    "FedAvg half": lambda: FedAvg(fraction_train=0.5),
    "FedProx": lambda: FedProx(proximal_mu=0.1, **NODES),
    "FedAdam": lambda: FedAdam(eta=0.01, **NODES),
    "FedAvgM": lambda: FedAvgM(server_momentum=0.9, **NODES),
    "FedYogi": lambda: FedYogi(eta=0.01, **NODES),
    "FedMedian": lambda: FedMedian(**NODES),
    "FedTrimmedAvg": lambda: FedTrimmedAvg(beta=0.3, **NODES),
    "Krum": lambda: Krum(num_malicious_nodes=1, **NODES),
    "DP fixed, server": lambda: DifferentialPrivacyServerSideFixedClipping(
        FedAvg(**NODES), 0.1, 1.0, 4
    ),
    "DP adaptive, server": lambda: DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(**NODES), noise_multiplier=0.3, num_sampled_clients=4
    ),
    "DP fixed, client": lambda: DifferentialPrivacyClientSideFixedClipping(
        FedAvg(**NODES), 0.1, 1.0, 4
    ),
}


def run(strategy, app=None, rounds=3, nodes=4, config=None, **grid_fields):
    grid = FakeGrid(app or apps.app(), nodes, **grid_fields)
    with apps.seeded_sampling():
        result = strategy.start(
            grid,
            apps.initial_arrays(),
            num_rounds=rounds,
            train_config=ConfigRecord(config or {"lr": 0.2, "local-epochs": 2}),
            evaluate_fn=apps.accuracy,
        )
    return result, grid


def app_for(name):
    if name != "DP fixed, client":
        return apps.app()
    app = ClientApp()
    app.train(mods=[fixedclipping_mod])(apps.train)
    app.evaluate()(apps.evaluate)
    return fedtune_client(app, apps.profile_fn)


def assert_same(first, second):
    assert set(first.arrays) == set(second.arrays)
    for name in first.arrays:
        a, b = first.arrays[name].numpy(), second.arrays[name].numpy()
        np.testing.assert_array_equal(a, b, strict=True)
    assert first.train_metrics_clientapp == second.train_metrics_clientapp
    assert first.evaluate_metrics_clientapp == second.evaluate_metrics_clientapp
    assert first.evaluate_metrics_serverapp == second.evaluate_metrics_serverapp


def assert_same_arrays(first, second):
    for name in first.arrays:
        np.testing.assert_array_equal(first.arrays[name].numpy(), second.arrays[name].numpy())
