import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import FedAvg

from fedtune_flwr import (
    METRICS,
    ConfigError,
    FedTune,
    FedTuneMod,
    Log,
    Noise,
    Policy,
    SearchSpace,
    fedtune_client,
    hparams,
)
from fedtune_flwr._wire import METRICS_RECORD, QUERY, pack_arrays, unpack_arrays
from fedtune_flwr.testing import FakeGrid
from tests.fedtune_flwr import apps
from tests.fedtune_flwr.runs import BY_LOSS, NODES, SPACE, run


def message(config, kind="train"):
    return Message(RecordDict({"config": ConfigRecord(config)}), dst_node_id=1, message_type=kind)


def test_hparams_have_the_types_of_the_defaults():
    defaults = {"lr": 0.1, "local-epochs": 1, "nesterov": False, "name": "sgd", "unused": 3}
    hp = hparams(
        message({"lr": 1, "local-epochs": 2.0, "nesterov": True, "name": "adam", "other": 5}),
        defaults,
    )
    assert dict(hp) == {
        "lr": 1.0, "local-epochs": 2, "nesterov": True, "name": "adam", "unused": 3,
    }  # fmt: skip
    assert isinstance(hp.lr, float)
    assert isinstance(hp.local_epochs, int)
    assert dict(hp.echo().items()) == dict(hp)
    with pytest.raises(AttributeError, match="momentum"):
        _ = hp.momentum


def test_hparams_fall_back_on_the_defaults():
    empty = Message(RecordDict(), dst_node_id=1, message_type="train")
    assert hparams(empty, {"lr": 0.1}).lr == 0.1
    other = Message(
        RecordDict({"settings": ConfigRecord({"lr": 0.5})}), dst_node_id=1, message_type="train"
    )
    assert hparams(other, {"lr": 0.1}).lr == 0.5


@pytest.mark.parametrize(
    ("sent", "default"),
    [(math.nan, 0.1), (math.inf, 0.1), ("fast", 0.1), (1.5, 1), (True, 1), (1, False), (1, "a")],
)
def test_hparams_refuse_other_types(sent, default):
    with pytest.raises(ConfigError, match="x="):
        hparams(message({"x": sent}), {"x": default})


def test_only_allow_listed_numbers_ever_leave_a_client():
    """Every reply to a query, byte for byte: one record of floats on the declared grid."""
    seen = []

    def watch(sent, reply):
        if sent.metadata.message_type == QUERY:
            seen.append(reply)

    run(FedTune(FedAvg(**NODES), policy=BY_LOSS), rounds=3, watch=watch)
    assert len(seen) == 4  # once each, in three rounds
    for reply in seen:
        assert list(reply.content) == [METRICS_RECORD]
        record = reply.content[METRICS_RECORD]
        assert isinstance(record, ConfigRecord)
        assert set(record) <= set(METRICS)
        assert len(record) <= 6
        for name, value in record.items():
            metric = METRICS[name]
            assert type(value) is float
            assert metric.low <= value <= metric.high
            steps = value / metric.step
            assert abs(steps - round(steps)) < 1e-4 or value in (metric.low, metric.high)


def test_train_replies_gain_nothing_but_the_echo():
    seen = []

    def watch(sent, reply):
        if sent.metadata.message_type == "train":
            seen.append(set(reply.content))

    run(FedTune(FedAvg(**NODES), policy=BY_LOSS), rounds=1, watch=watch)
    # Names recorded before the server takes its records out.
    assert seen == [{"arrays", "metrics", "fedtune.applied"}] * 4


@pytest.mark.parametrize("by_mod", [False, True], ids=["by query", "by mod"])
def test_a_whole_run_sends_nothing_else_than_the_same_app_without_the_plugin(by_mod):
    def app_of(kind):
        mods = [FedTuneMod(apps.profile_fn)] if by_mod and kind == "with" else []
        made = ClientApp(mods=mods)
        made.train()(apps.train)
        made.evaluate()(apps.evaluate)
        if kind == "with" and not by_mod:
            fedtune_client(made, apps.profile_fn)
        return made

    sent = {"with": [], "without": []}
    values = dict(BY_LOSS.assign(None).values)
    constant = Policy.constant(SPACE, values)
    for kind in sent:

        def watch(message_, reply, log=sent[kind]):
            if not reply.has_error():
                records = {name: dict(record) for name, record in reply.content.items()}
                log.append((message_.metadata.message_type, message_.metadata.dst_node_id, records))

        strategy = FedTune(FedAvg(min_evaluate_nodes=4, **NODES), policy=constant)
        if kind == "without":
            strategy = FedAvg(min_evaluate_nodes=4, **NODES)
        run(strategy, app_of(kind), rounds=2, config=values, watch=watch)
    own = []
    for _, _, records in sent["with"]:
        if METRICS_RECORD in records:
            own.append(records.pop(METRICS_RECORD))
    assert len(own) == 4
    for record in own:
        assert set(record) <= set(METRICS)
        assert len(record) <= 6
        assert all(type(value) is float for value in record.values())
    rest = [entry for entry in sent["with"] if entry[2]]
    assert [entry[:2] for entry in rest] == [entry[:2] for entry in sent["without"]]
    for (_, _, mine), (_, _, plain) in zip(rest, sent["without"], strict=True):
        assert set(mine) == set(plain)
        for name in mine:
            assert repr(mine[name]) == repr(plain[name])


def test_a_profile_that_returns_more_is_refused_on_the_client():
    app = ClientApp()
    app.train()(apps.train)

    def leaky(message_, context):
        return {"label-entropy": 0.5, "label-histogram-0": 17.0}

    fedtune_client(app, leaky)
    answers = []
    grid = FakeGrid(app, 1, watch=lambda sent, reply: answers.append(reply))
    grid.send_and_receive([Message(RecordDict(), dst_node_id=100, message_type=QUERY)])
    assert answers[0].has_error()
    assert "may not leave the client" in answers[0].error.reason


def test_the_mod_carries_metrics_where_queries_are_refused():
    app = ClientApp(mods=[FedTuneMod(apps.profile_fn), LocalDpMod(10.0, 1.0, 5.0, 1e-5)])
    app.train()(apps.train)
    sent = []

    def watch(message_, reply):
        if message_.metadata.message_type == "train":
            sent.append((message_.metadata.dst_node_id, dict(message_.content["config"])))

    strategy = FedTune(FedAvg(fraction_evaluate=0.0, **NODES), policy=BY_LOSS)
    run(strategy, app, rounds=2, watch=watch)
    assert all(row.usable and not row.by_mod for row in strategy.clients.values())
    # Round 1: nobody is known. Round 2: everybody has values of its own.
    first, second = sent[:4], sent[4:]
    assert len({config["lr"] for _, config in first}) == 1
    assert len({config["lr"] for _, config in second}) > 1
    assert all("fedtune-reference" not in config for _, config in second)
    assert all(row.mismatches == 0 for row in strategy.clients.values())


def test_the_mod_reports_what_hparams_handed_out():
    def train(message_, context):
        reply = apps.train(message_, context)
        del reply.content["fedtune.applied"]
        return reply

    app = ClientApp(mods=[FedTuneMod(apps.profile_fn)])
    app.train()(train)
    app.evaluate()(apps.evaluate)
    kept = []
    strategy = FedTune(FedAvg(**NODES), policy=BY_LOSS)
    run(strategy, app, rounds=1,
        watch=lambda m, r: kept.append(set(r.content)) if m.metadata.message_type == "train" else 0)  # fmt: skip  # noqa: E501
    assert all("fedtune.applied" in names for names in kept)


def test_the_mod_lets_training_go_on_when_the_profile_fails():
    def broken(message_, context):
        raise OSError("no data")

    app = ClientApp(mods=[FedTuneMod(broken)])
    app.train()(apps.train)
    app.evaluate()(apps.evaluate)
    result, _ = run(FedTune(FedAvg(**NODES), policy=BY_LOSS), app, rounds=2)
    assert len(result.train_metrics_clientapp) == 2


def test_tuning_waits_for_metrics_that_come_by_mod():
    app = ClientApp(mods=[FedTuneMod(apps.profile_fn)])
    app.train()(apps.train)
    app.evaluate()(apps.evaluate)
    strategy = FedTune(FedAvg(**NODES), SPACE, apps.proxy(rounds=2), tuner="random", budget=12)
    run(strategy, app, rounds=1)
    assert len(strategy.report.metrics) == 4
    assert strategy.report.metrics[0] == {}
    run(strategy, app, rounds=1)
    assert all(strategy.report.metrics)


def test_arrays_survive_packing_without_pickle():
    arrays = apps.initial_arrays()
    again = unpack_arrays(pack_arrays(arrays))
    assert list(again) == list(arrays)
    for name in arrays:
        np.testing.assert_array_equal(again[name].numpy(), arrays[name].numpy())
    assert list(unpack_arrays(pack_arrays(ArrayRecord()))) == []


def test_apps_made_from_client_fn_are_told_to_use_the_mod():
    from flwr.client import NumPyClient

    app = ClientApp(client_fn=lambda context: NumPyClient().to_client())
    with pytest.raises(ConfigError, match="FedTuneMod"):
        fedtune_client(app, apps.profile_fn)
    with pytest.raises(ConfigError, match="profile_fn"):
        fedtune_client(ClientApp(), None)
    with pytest.raises(ConfigError, match="profile_fn"):
        FedTuneMod(3)


def test_noise_is_drawn_once_and_repeated():
    app = ClientApp()
    app.train()(apps.train)
    fedtune_client(app, apps.profile_fn, noise=Noise(epsilon=1.0))
    answers = []
    grid = FakeGrid(app, 1, watch=lambda sent, reply: answers.append(reply))
    arrays = apps.initial_arrays()
    for _ in range(3):
        query = Message(RecordDict({"arrays": arrays}), dst_node_id=100, message_type=QUERY)
        grid.send_and_receive([query])
    first, *others = (dict(a.content[METRICS_RECORD]) for a in answers)
    assert others == [first, first]


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_noise_has_the_scale_that_its_epsilon_asks_for(mechanism):
    name = "label-entropy"
    noise = Noise(epsilon=0.5, mechanism=mechanism, delta=1e-5)
    width = METRICS[name].high - METRICS[name].low
    if mechanism == "laplace":
        assert noise.scale(name, 2) == pytest.approx(width / 0.25)
    else:
        assert noise.scale(name, 1) == pytest.approx(
            width * math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.5
        )
    rng = np.random.default_rng(0)
    loud = [noise.apply({"log-size": 8.0}, rng)["log-size"] for _ in range(200)]
    metric = METRICS["log-size"]
    assert all(metric.low <= v <= metric.high for v in loud)
    assert len(set(loud)) > 5
    quiet = Noise(epsilon=1e6).apply({"label-entropy": 0.5, "log-size": metric.step * 10}, rng)
    assert quiet["label-entropy"] == 0.5


def test_bad_noise_is_refused():
    for wrong in ({"epsilon": 0.0}, {"epsilon": math.nan}, {"epsilon": 1.0, "delta": 0.0}):
        with pytest.raises(ConfigError):
            Noise(**wrong)
    with pytest.raises(ConfigError, match="mechanism"):
        Noise(1.0, mechanism="uniform")
    with pytest.raises(ConfigError, match="less than 1 each"):
        Noise(8.0, mechanism="gaussian").apply({"log-size": 3.0})


def test_policy_values_survive_the_round_trip_through_a_message():
    policy = Policy.constant(SPACE, {"lr": 0.123456789, "local-epochs": 3})
    values = policy.assign(None).values
    assert dict(hparams(message(dict(values)), {"lr": 0.1, "local-epochs": 1})) == values


def test_a_client_of_the_old_api_gets_values_and_reports_through_the_mod():
    """A `NumPyClient`, as the older quickstarts have it, with one mod added."""
    from flwr.client import NumPyClient

    seen = {}

    class Old(NumPyClient):
        def __init__(self, context):
            self.context = context

        def fit(self, parameters, config):
            seen.setdefault(apps.partition(self.context), []).append(config["lr"])
            return [p + 1 for p in parameters], 30, {}

    def client_fn(context: Context):
        return Old(context).to_client()

    app = ClientApp(client_fn, mods=[FedTuneMod(apps.profile_fn)])
    inner = FedAvg(
        arrayrecord_key="fitins.parameters", configrecord_key="fitins.config",
        weighted_by_key="num_examples", fraction_evaluate=0.0, **NODES,
    )  # fmt: skip
    strategy = FedTune(inner, SPACE, apps.proxy(rounds=2), tuner="random", budget=12)
    grid = FakeGrid(app, 4)
    start = ArrayRecord({"0": Array(np.zeros(3, dtype=np.float32))})
    result = strategy.start(grid, start, 3, train_config=ConfigRecord())
    (array,) = result.arrays.values()
    np.testing.assert_allclose(array.numpy(), 3.0)
    assert strategy.quarantined == 0
    assert all(row.usable for row in strategy.clients.values())
    for k, rates in seen.items():
        row = strategy.clients[100 + k]
        assert rates[-1] == row.values["lr"]
        assert all(0.01 <= rate <= 1.0 for rate in rates)


def test_the_client_of_flowers_quickstart_works_as_it_is():
    """Reads `config["lr"]`, knows nothing of this plugin, and replies as the quickstart does."""
    app = ClientApp()
    seen = []

    @app.train()
    def train(msg: Message, context: Context):
        model = apps.new_model()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        x, y = apps.client_data(context)
        seen.append(msg.content["config"]["lr"])
        optimizer = torch.optim.SGD(model.parameters(), lr=msg.content["config"]["lr"])
        for _ in range(context.run_config["local-epochs"]):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        model_record = ArrayRecord(model.state_dict())
        metrics = {"train_loss": loss.item(), "num-examples": len(y)}
        content = RecordDict({"arrays": model_record, "metrics": MetricRecord(metrics)})
        return Message(content=content, reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context):
        return apps.evaluate(msg, context)

    strategy = FedTune(
        FedAvg(fraction_train=0.5), SearchSpace(lr=Log(0.01, 1.0)), apps.proxy(rounds=2),
        tuner="random", budget=12,
    )  # fmt: skip
    grid = FakeGrid(app, 4, run_config={"local-epochs": 2})
    result = strategy.start(grid, apps.initial_arrays(), 3)
    assert len(result.train_metrics_clientapp) == 3
    assert strategy.quarantined == 0
    assert sum(row.mismatches for row in strategy.clients.values()) == 0
    # Nobody answered the query: one tuned value for all.
    assert set(seen) == {strategy.policy.assign(None).values["lr"]}
    assert strategy.report is not None
