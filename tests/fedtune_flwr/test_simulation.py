"""The whole plugin in Flower's simulation runtime, on Ray."""

import gc
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from fedtune_flwr import FedTune, Int, Log, SearchSpace
from tests.fedtune_flwr import apps

EXAMPLE = Path(__file__).parents[2] / "fedtune_flwr" / "examples" / "digits.py"

pytestmark = [
    pytest.mark.cluster,
    # Ray closes some of its sockets and pipes only when the process ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # ray 2.55 announces a new default for accelerators.
    pytest.mark.filterwarnings("ignore:Tip.*:FutureWarning"),
]


def test_ten_clients_are_profiled_tuned_and_trained_apart(monkeypatch):
    pytest.importorskip("ray")
    from flwr.simulation import run_simulation

    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nodes = 10
    strategy = FedTune(
        FedAvg(fraction_evaluate=0.2, min_train_nodes=nodes, min_available_nodes=nodes),
        SearchSpace(lr=Log(0.3, 1.0), **{"local-epochs": Int(3, 6)}),
        apps.proxy(300, rounds=6),
        tuner="sobol",
        budget=24,
    )
    server = ServerApp()
    results = []

    @server.main()
    def main(grid, context):
        arrays = ArrayRecord(apps.new_model().state_dict())
        results.append(
            strategy.start(grid, arrays, 3, train_config=ConfigRecord(), evaluate_fn=apps.accuracy)
        )

    level = logging.getLogger("flwr").level
    try:
        run_simulation(
            server,
            apps.app(),
            nodes,
            backend_config={
                "init_args": {"num_cpus": 1, "log_to_driver": False, "logging_level": "error"},
                "client_resources": {"num_cpus": 1.0},
            },
        )
    finally:
        logging.getLogger("flwr").setLevel(level)
        import ray

        assert not ray.is_initialized()
        # What Ray left open is closed here, under this test's filters, not in some later test.
        gc.collect()
    result = results[0]
    assert len(result.evaluate_metrics_serverapp) == 4
    assert result.evaluate_metrics_serverapp[3]["accuracy"] > 0.6
    rows = list(strategy.clients.values())
    assert len(rows) == nodes
    assert all(row.usable and row.rounds == 3 for row in rows)
    assert all(row.mismatches == 0 for row in rows)
    assert strategy.report is not None
    # Half the clients are noisy, and the reference model must have told them apart.
    losses = sorted(row.metrics["reference-loss"] for row in rows)
    assert losses[5] - losses[4] > max(losses[4] - losses[0], losses[9] - losses[5]) * 0.5


def test_the_example_trains_its_clients(tmp_path):
    """As a script: its functions must reach Ray's workers from `__main__`."""
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLE), "--off", "--clients", "4", "--rounds", "2"],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FLWR_DISABLE_UPDATE_CHECK": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    accuracies = [float(a) for a in re.findall(r"^round \d+: accuracy (\S+)", done.stdout, re.M)]
    assert len(accuracies) == 3
    # Half the clients have wrong labels; training nothing stays at one in ten.
    assert accuracies[-1] > max(0.3, accuracies[0] + 0.15), done.stdout
