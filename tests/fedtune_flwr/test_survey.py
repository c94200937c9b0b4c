"""Asking clients for their metrics, and asking again."""

import logging
import math

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedtune_flwr import FedTune, fedtune_client
from fedtune_flwr._clients import ClientTable
from fedtune_flwr._drift import grown_or_shrunk, moved
from tests.fedtune_flwr import apps
from tests.fedtune_flwr.runs import BY_LOSS, NODES, SPACE, run


def test_silent_clients_are_asked_again_later(caplog):
    asked = []

    def watch(message, reply):
        if message.metadata.message_type.startswith("query"):
            asked.append(message.metadata.dst_node_id)

    app = apps.app()
    strategy = FedTune(FedAvg(min_train_nodes=2, fraction_train=0.5), policy=BY_LOSS)
    with caplog.at_level(logging.WARNING, logger="fedtune_flwr"):
        run(strategy, app, rounds=1, nodes=4, silent=[101], watch=watch)
    assert "node 101 gave no metrics" in caplog.text
    row = strategy.clients[101]
    assert row.failures == 1
    assert row.retry_round == 6
    assert not row.usable


def test_a_profile_that_raises_does_not_stop_the_run(caplog):
    app = ClientApp()
    app.train()(apps.train)
    app.evaluate()(apps.evaluate)

    def broken(message, context):
        raise OSError("no such dataset")

    strategy = FedTune(FedAvg(**NODES), policy=BY_LOSS)
    with caplog.at_level(logging.WARNING, logger="fedtune_flwr"):
        result, _ = run(strategy, fedtune_client(app, broken), rounds=2)
    assert "no such dataset" in caplog.text
    assert len(result.train_metrics_clientapp) == 2
    expected = BY_LOSS.assign(None).values
    assert all(row.values == expected for row in strategy.clients.values())


def test_lying_and_broken_reports_stay_inside_the_space():
    lies = [
        {"reference-loss": 0.0, "log-size": 16.0},
        {"reference-loss": math.nan},
        {"reference-loss": 12.0, "label-entropy": math.inf},
        {},
    ]

    def liar(message, context):
        return lies[apps.partition(context)]

    app = ClientApp()
    app.train()(apps.train)
    app.evaluate()(apps.evaluate)
    strategy = FedTune(FedAvg(**NODES), policy=BY_LOSS)
    run(strategy, fedtune_client(app, liar), rounds=1)
    for row in strategy.clients.values():
        assert 0.01 <= row.values["lr"] <= 1.0
        assert math.isfinite(row.weight_factor)
    assert strategy.clients[101].values == BY_LOSS.assign(None).values


def test_a_query_that_nobody_answers_is_not_passed_off_as_a_wish(caplog):
    app = ClientApp()
    app.train()(apps.train)
    app.evaluate()(apps.evaluate)

    def broken(message, context):
        raise OSError("no such dataset")

    fedtune_client(app, broken)
    made = {}
    for customize in (True, False):
        caplog.clear()
        strategy = FedTune(
            FedAvg(**NODES), SPACE, apps.proxy(rounds=2), tuner="random", budget=12,
            customize=customize,
        )  # fmt: skip
        with caplog.at_level(logging.WARNING, logger="fedtune_flwr"):
            run(strategy, app, rounds=1)
        made[customize] = strategy.report.summary()
        assert "First failure: node 10" in caplog.text
        assert "no such dataset" in caplog.text
    assert "0 of 4 clients answered the query; tuned for clients taken to be alike" in made[True]
    assert "as asked" not in made[True]
    assert "as asked" in made[False]
    assert "0 of 4" in made[False]


def test_a_new_client_costs_one_query_and_one_assignment(monkeypatch):
    """However many clients are known: nothing is computed again for those."""
    assigned, asked = [], []
    original = ClientTable.assign

    def assign(self, policy, node_ids):
        node_ids = list(node_ids)
        assigned.append(node_ids)
        return original(self, policy, node_ids)

    monkeypatch.setattr(ClientTable, "assign", assign)

    def watch(message, reply):
        if message.metadata.message_type.startswith("query"):
            asked.append(message.metadata.dst_node_id)

    strategy = FedTune(FedAvg(min_train_nodes=20, fraction_evaluate=0.0), policy=BY_LOSS)
    _, grid = run(strategy, rounds=1, nodes=20, watch=watch)
    assert sorted(asked) == sorted(grid.contexts)
    assigned.clear()
    asked.clear()
    first = next(iter(grid.contexts.values()))
    grid.contexts[900] = type(first)(
        run_id=1, node_id=900, node_config={"partition-id": 3, "num-partitions": 21},
        state=type(first.state)(), run_config={},
    )  # fmt: skip
    strategy.strategy.min_train_nodes = 21
    from flwr.app import ConfigRecord

    strategy.configure_train(2, apps.initial_arrays(), ConfigRecord(), grid)
    assert asked == [900]
    assert [ids for ids in assigned if ids] == [[900]]
    assert strategy.clients[900].values


def test_a_client_whose_data_has_doubled_is_asked_anew():
    sizes = dict.fromkeys(range(4), 40)
    asked = []

    def watch(message, reply):
        if message.metadata.message_type.startswith("query"):
            asked.append(message.metadata.dst_node_id)

    def data(context):
        k = apps.partition(context)
        return apps.blobs(k, sizes[k], 0.0)

    def train(message, context):
        reply = apps.train(message, context)
        size = sizes[apps.partition(context)]
        reply.content["metrics"] = MetricRecord({"num-examples": size})
        if message.content["config"]["server-round"] == 2:
            sizes[1] = 200  # from the next round on
        return reply

    app = ClientApp()
    app.train()(train)
    app.evaluate()(apps.evaluate)
    fedtune_client(app, lambda m, c: apps.profile([data(c)], apps.loaded(m)))
    strategy = FedTune(FedAvg(**NODES), policy=BY_LOSS)
    run(strategy, app, rounds=5, watch=watch)
    # Asked once each, and node 101 again in the round after its reply told of more examples.
    assert sorted(asked[:4]) == [100, 101, 102, 103]
    assert asked[4:] == [101]
    assert strategy.clients[101].metrics["log-size"] == pytest.approx(np.log(200), abs=0.2)
    assert not any(row.stale for row in strategy.clients.values())


def test_reprofile_asks_again_and_retunes_where_the_clients_have_changed():
    noise = {"share": 0.0}
    lines = []

    def profile_fn(message, context):
        data = apps.blobs(apps.partition(context), 60, noise["share"])
        return apps.profile([data], apps.loaded(message))

    app = ClientApp()
    app.train()(apps.train)
    app.evaluate()(apps.evaluate)
    fedtune_client(app, profile_fn)

    class Inner(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            if server_round == 3:
                noise["share"] = 0.9
                strategy.reprofile()
            return super().configure_train(server_round, arrays, config, grid)

    strategy = FedTune(
        Inner(min_train_nodes=12, min_available_nodes=12, fraction_evaluate=0.0),
        SPACE, apps.proxy(rounds=2), tuner="random", budget=12, progress=lines.append,
    )  # fmt: skip
    run(strategy, app, rounds=2, nodes=12)
    before = [row.metrics["reference-loss"] for row in strategy.clients.values()]
    assert sum("global search" in line for line in lines) == 1
    run(strategy, app, rounds=4, nodes=12)
    after = [row.metrics["reference-loss"] for row in strategy.clients.values()]
    assert min(after) > max(before)
    assert sum("global search" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [(40, 79, False), (40, 80, True), (40, 20, True), (40, 21, False), (0, 0, False), (0, 5, True)],
)
def test_a_factor_of_two_counts_as_change(before, now, changed):
    assert grown_or_shrunk(before, now) is changed


def test_moved_metrics_are_named_and_sampling_noise_is_not():
    rng = np.random.default_rng(0)

    def rows(shift):
        return [
            {"reference-loss": float(v) + shift, "label-entropy": float(u)}
            for v, u in zip(rng.normal(1, 0.2, 60), rng.random(60), strict=True)
        ]

    before = rows(0.0)
    assert moved(before, rows(0.0)) == []
    assert moved(before, rows(0.5)) == ["reference-loss"]
    assert moved(before, [{}]) == []
