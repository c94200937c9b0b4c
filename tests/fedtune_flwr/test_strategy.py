"""The wrapper around a strategy; past 500 lines, since all cases share its clients and grid."""

import logging
import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.exception import InconsistentMessageReplies
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

from fedtune_flwr import (
    ConfigError,
    FedTune,
    Int,
    Log,
    Policy,
    ProxyError,
    SearchSpace,
    SpaceError,
    UnknownTunerError,
    fedtune_client,
)
from fedtune_flwr._metrics import Scaler
from fedtune_flwr._options import TuneOptions
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


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_customization_results_are_bit_identical(name):
    plain, _ = run(STRATEGIES[name](), app_for(name))
    wrapped, _ = run(FedTune(STRATEGIES[name]()), app_for(name))
    assert_same(plain, wrapped)


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_setting_for_all_equals_the_inner_strategy_with_that_config(name):
    setting = {"lr": 0.3, "local-epochs": 1}
    policy = Policy.constant(SPACE, setting)
    values = dict(policy.assign(None).values)
    plain, _ = run(STRATEGIES[name](), app_for(name), config=values)
    wrapped, _ = run(FedTune(STRATEGIES[name](), policy=policy), app_for(name), config={})
    assert_same(plain, wrapped)


def test_every_node_gets_its_own_config_and_shares_the_arrays():
    seen = {}

    def watch(message, reply):
        if message.metadata.message_type == "train":
            seen[message.metadata.dst_node_id] = message

    strategy = FedTune(FedAvg(**NODES), policy=BY_LOSS)
    run(strategy, rounds=1, watch=watch)
    assert len(seen) == 4
    configs = {node: m.content["config"] for node, m in seen.items()}
    assert len({id(c) for c in configs.values()}) == 4
    assert len({id(m.content["arrays"]) for m in seen.values()}) == 1
    for node, config in configs.items():
        row = strategy.clients[node]
        assert config["lr"] == row.values["lr"]
        assert config["local-epochs"] == row.values["local-epochs"]
        assert config["server-round"] == 1
    assert len({config["lr"] for config in configs.values()}) > 1
    assert sum(row.mismatches for row in strategy.clients.values()) == 0


def test_weights_follow_the_policy_and_only_the_weights():
    replies = []

    class Spy(FedAvg):
        def aggregate_train(self, server_round, replies_):
            replies.extend(replies_)
            return super().aggregate_train(server_round, replies_)

    strategy = FedTune(Spy(**NODES), policy=BY_LOSS)
    run(strategy, rounds=1)
    for reply in replies:
        node = reply.metadata.src_node_id
        metrics = reply.content["metrics"]
        own = 40 + 2 * (node - 100)
        assert metrics["num-examples"] == pytest.approx(own * strategy.clients[node].weight_factor)
        assert metrics["partition"] == node - 100
        assert set(reply.content) == {"arrays", "metrics"}


def test_tuning_runs_before_the_first_round_and_once():
    asked = []

    def watch(message, reply):
        if message.metadata.message_type.startswith("query"):
            asked.append(message.metadata.dst_node_id)

    lines = []
    strategy = FedTune(
        FedAvg(fraction_train=0.5),
        SPACE,
        apps.proxy(rounds=3),
        tuner="random",
        budget=12,
        progress=lines.append,
    )
    result, _ = run(strategy, rounds=3, nodes=6, watch=watch)
    assert sorted(asked) == list(range(100, 106))
    assert strategy.report is not None
    assert strategy.policy is strategy.report.policy
    assert any("global search" in line for line in lines)
    assert sum("global search" in line for line in lines) == 1
    assert result.evaluate_metrics_serverapp[3]["accuracy"] > 0.5
    assert all(row.usable for row in strategy.clients.values())


def test_unmodified_clients_get_tuned_values():
    """No query, no echo: only what every quickstart client does."""

    def train(message, context):
        assert "fedtune" not in message.content["config"]
        reply = apps.train(message, context)
        del reply.content["fedtune.applied"]
        return reply

    strategy = FedTune(FedAvg(**NODES), SPACE, apps.proxy(rounds=2), tuner="random", budget=12)
    result, _ = run(strategy, apps.app(train, queries=False), rounds=2)
    assert strategy.report is not None
    assert not strategy.policy.customizes
    assert "0 of 4 clients answered the query" in strategy.report.summary()
    assert "as asked" not in strategy.report.summary()
    assert len(result.train_metrics_clientapp) == 2
    assert all(row.by_mod for row in strategy.clients.values())


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


@pytest.mark.parametrize(
    ("poison", "words"),
    [
        ({"2__bias": np.array([np.nan, 0, 0], dtype=np.float32)}, "NaN or infinite"),
        ({"2__bias": np.array([0, np.inf, 0], dtype=np.float32)}, "NaN or infinite"),
        ({"weight": math.nan}, "num-examples=nan"),
        ({"weight": -1.0}, "num-examples=-1.0"),
    ],
)
def test_poisonous_replies_are_set_aside_and_the_rest_averaged(poison, words, caplog):
    def train(message, context):
        if apps.partition(context) != 1:
            return apps.train(message, context)
        arrays = {k: v for k, v in poison.items() if k != "weight"}
        reply = apps.replaced(message, context, **arrays)
        if "weight" in poison:
            reply.content["metrics"]["num-examples"] = poison["weight"]
        return reply

    def absent(message, context):
        if apps.partition(context) == 1:
            raise RuntimeError("gone")
        return apps.train(message, context)

    setting = Policy.constant(SPACE, {"lr": 0.3, "local-epochs": 1})
    strategy = FedTune(FedAvg(**NODES), policy=setting)
    with caplog.at_level(logging.WARNING, logger="fedtune_flwr"):
        poisoned, _ = run(strategy, apps.app(train), rounds=2)
    assert words in caplog.text
    assert strategy.quarantined == 2
    assert strategy.clients[101].quarantined == 2
    without, _ = run(FedTune(FedAvg(**NODES), policy=setting), apps.app(absent), rounds=2)
    assert_same_arrays(poisoned, without)


def without_weight(content):
    del content["metrics"]["num-examples"]


def without_arrays(content):
    del content["arrays"]


def with_fewer_arrays(content):
    del content["arrays"]["2.bias"]


def with_a_list_for_a_weight(content):
    content["metrics"] = MetricRecord({"num-examples": [3.0, 4.0], "partition": 1})


def with_another_shape(content):
    content["arrays"]["2.bias"] = Array(np.zeros(7, dtype=np.float32))


def with_a_false_shape(content):
    sound = content["arrays"]["2.bias"]
    content["arrays"]["2.bias"] = Array(sound.dtype, (7,), sound.stype, sound.data)


def with_broken_bytes(content):
    sound = content["arrays"]["2.bias"]
    content["arrays"]["2.bias"] = Array(sound.dtype, sound.shape, sound.stype, b"nothing")


def with_another_metric(content):
    content["metrics"]["loss"] = 1.0


def emptied(content):
    for name in list(content):
        del content[name]


SPOILS = [
    without_weight, without_arrays, with_fewer_arrays, with_a_list_for_a_weight,
    with_another_shape, with_a_false_shape, with_broken_bytes, with_another_metric, emptied,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["FedAvg", "FedMedian"])
def test_one_reply_unlike_the_others_does_not_end_the_run(name, spoil, caplog):
    def train(message, context):
        reply = apps.train(message, context)
        if apps.partition(context) == 0:
            spoil(reply.content)
        return reply

    def absent(message, context):
        if apps.partition(context) == 0:
            raise RuntimeError("gone")
        return apps.train(message, context)

    setting = Policy.constant(SPACE, {"lr": 0.3, "local-epochs": 1})
    strategy = FedTune(STRATEGIES[name](), policy=setting)
    with caplog.at_level(logging.WARNING, logger="fedtune_flwr"):
        spoiled, _ = run(strategy, apps.app(train), rounds=2)
    assert strategy.clients[100].quarantined == 2
    assert strategy.quarantined == 2
    assert "reply of node 100 set aside" in caplog.text
    without, _ = run(FedTune(STRATEGIES[name](), policy=setting), apps.app(absent), rounds=2)
    assert_same_arrays(spoiled, without)


def test_what_all_replies_share_is_the_inner_strategys_affair():
    def head_only(message, context):
        reply = apps.train(message, context)
        arrays = reply.content["arrays"]
        reply.content["arrays"] = ArrayRecord({k: arrays[k] for k in ("2.weight", "2.bias")})
        return reply

    strategy = FedTune(FedAvg(fraction_evaluate=0.0, **NODES))
    grid = FakeGrid(apps.app(head_only), 4)
    result = strategy.start(grid, apps.initial_arrays(), 1, train_config=ConfigRecord())
    assert strategy.quarantined == 0
    assert set(result.arrays) == {"2.weight", "2.bias"}

    def weightless(message, context):
        reply = apps.train(message, context)
        without_weight(reply.content)
        return reply

    with pytest.raises(InconsistentMessageReplies, match="num-examples"):
        run(FedTune(FedAvg(**NODES)), apps.app(weightless), rounds=1)


def test_a_strategy_of_another_author_gets_replies_of_its_own_kind():
    class Own(FedAvg):
        def aggregate_train(self, server_round, replies):
            self.seen = [set(reply.content["arrays"]) for reply in replies]
            return None, None

    def each_its_own(message, context):
        reply = apps.train(message, context)
        with_fewer_arrays(reply.content)
        if apps.partition(context) == 0:
            without_weight(reply.content)
        return reply

    own = Own(**NODES)
    strategy = FedTune(own)
    run(strategy, apps.app(each_its_own), rounds=1)
    assert len(own.seen) == 4
    assert strategy.quarantined == 0


def assert_same_arrays(first, second):
    for name in first.arrays:
        np.testing.assert_array_equal(first.arrays[name].numpy(), second.arrays[name].numpy())


def test_all_replies_failed_is_left_to_the_inner_strategy(caplog):
    def train(message, context):
        raise RuntimeError("gone")

    with caplog.at_level(logging.ERROR, logger="fedtune_flwr"):
        result, _ = run(FedTune(FedAvg(**NODES), policy=BY_LOSS), apps.app(train), rounds=2)
    assert result.train_metrics_clientapp == {}
    assert caplog.text.count("no client returned a usable reply (4 failed, 0 set aside)") == 2


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


def test_a_client_that_ignores_its_values_is_warned_about(caplog):
    def train(message, context):
        reply = apps.train(message, context)
        reply.content["fedtune.applied"] = ConfigRecord({"lr": 9.0, "local-epochs": 2})
        return reply

    strategy = FedTune(FedAvg(**NODES), policy=BY_LOSS)
    with caplog.at_level(logging.WARNING, logger="fedtune_flwr"):
        run(strategy, apps.app(train), rounds=1)
    assert "applied 9.0" in caplog.text
    assert all(row.mismatches == 1 for row in strategy.clients.values())


def test_a_tuner_that_fails_leaves_a_policy_and_the_run_goes_on(caplog, monkeypatch):
    from fedtune_flwr import TunerError, _finder

    def broken(*args, **kwargs):
        raise TunerError("out of luck")

    monkeypatch.setattr(_finder, "tune", broken)
    strategy = FedTune(FedAvg(**NODES), SPACE, apps.proxy(), tuner="random", budget=12)
    with caplog.at_level(logging.ERROR, logger="fedtune_flwr"):
        result, _ = run(strategy, rounds=2, config={"lr": 0.07})
    assert "out of luck" in caplog.text
    assert len(result.train_metrics_clientapp) == 2
    assert all(row.values["lr"] == pytest.approx(0.07) for row in strategy.clients.values())


def test_without_proxy_rules_apply_with_a_warning(caplog):
    strategy = FedTune(FedAvg(**NODES), SPACE)
    with caplog.at_level(logging.WARNING, logger="fedtune_flwr"):
        run(strategy, rounds=1, config={"lr": 0.05})
    assert "no proxy data" in caplog.text
    assert strategy.policy.origin == "prior"
    assert strategy.report is None


def test_weights_are_left_alone_under_privacy_and_where_they_do_nothing():
    for name in ("DP fixed, server", "Krum", "FedMedian"):
        assert not FedTune(STRATEGIES[name](), policy=BY_LOSS).weight
        with pytest.raises(ConfigError, match="weight=True"):
            FedTune(STRATEGIES[name](), policy=BY_LOSS, weight=True)
    assert FedTune(FedAdam(), policy=BY_LOSS).weight


def test_the_wrapper_shows_what_the_inner_strategy_has():
    strategy = FedTune(FedAvg(fraction_train=0.25))
    assert strategy.fraction_train == 0.25
    with pytest.raises(AttributeError):
        _ = strategy.no_such_thing
    strategy.summary()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: FedTune("FedAvg"), ConfigError, "expected a"),
        (lambda: FedTune(FedTune(FedAvg())), ConfigError, "already contains"),
        (
            lambda: FedTune(
                DifferentialPrivacyServerSideFixedClipping(FedTune(FedAvg()), 0.1, 1.0, 4)
            ),
            ConfigError,
            "outermost",
        ),
        (lambda: FedTune(FedAvg(), SPACE, tuner="nobody"), UnknownTunerError, "available"),
        (lambda: FedTune(FedAvg(), SPACE, budget=1), ConfigError, "budget"),
        (lambda: FedTune(FedAvg(), profile_timeout_s=0), ConfigError, "above 0"),
        (lambda: FedTune(FedAvg(), profile_timeout_s="a"), ConfigError, "profile_timeout_s='a'"),
        (lambda: FedTune(FedAvg(), profile_timeout_s=math.nan), ConfigError, "number"),
        (lambda: FedTune(FedAvg(), SPACE, seed=-1), ConfigError, "seed=-1"),
        (lambda: FedTune(FedAvg(), SPACE, seed=1.5), ConfigError, "seed=1.5"),
        (lambda: FedTune(FedAvg(), SPACE, seed="a"), ConfigError, "seed='a'"),
        (lambda: FedTune(FedAvg(), SPACE, budget="a"), ConfigError, "budget='a'"),
        (lambda: FedTune(FedAvg(), SPACE, budget=math.nan), ConfigError, "budget=nan"),
        (lambda: FedTune(FedAvg(), SPACE, weight="a"), ConfigError, "weight='a'"),
        (lambda: FedTune(FedAvg(), SPACE, customize="no"), ConfigError, "customize='no'"),
        (lambda: FedTune(FedAvg(), SPACE, mode=["policy"]), ConfigError, "mode="),
        (lambda: FedTune(FedAvg(), 5), ConfigError, "space=5 must be a SearchSpace"),
        (lambda: FedTune(FedAvg(), SPACE, 5), ConfigError, "proxy=5 must be a ProxyTask"),
        (lambda: FedTune(FedAvg(), policy=5), ConfigError, "policy=5 must be a Policy"),
        (lambda: FedTune(FedAvg(), SPACE, options=5), ConfigError, "options=5"),
        (
            lambda: FedTune(FedAvg(), SPACE, apps.proxy(), generators=[5]),
            ProxyError,
            "generators holds 5",
        ),
        (
            lambda: FedTune(FedAvg(), SearchSpace(lr=Log(0.1, 1)), policy=BY_LOSS),
            SpaceError,
            "tuned for",
        ),
    ],
)
def test_bad_arguments_are_refused_at_once(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_reply_with_no_weight_or_no_config_is_passed_on():
    strategy = FedTune(FedAvg(**NODES), policy=BY_LOSS)
    content = RecordDict({"metrics": MetricRecord({"loss": 1.0})})
    message = Message(RecordDict(), dst_node_id=5, message_type="train")
    reply = Message(content, reply_to=message)
    from fedtune_flwr._replies import fault, reweight

    assert fault(reply.content, "num-examples") is None
    reweight(reply, "num-examples", 1.0, 2.0)
    assert reply.content["metrics"]["loss"] == 1.0
    assert strategy.policy is BY_LOSS


def test_options_reach_the_search():
    strategy = FedTune(
        FedAvg(**NODES), SPACE, apps.proxy(rounds=2), tuner="sobol", budget=12,
        options=TuneOptions(min_gain=0.9),
    )  # fmt: skip
    run(strategy, rounds=1)
    assert not strategy.policy.customizes
