"""Replies that cannot be averaged, and what is done to those that can."""

import logging
import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg

from fedtune_flwr import FedTune, Policy
from fedtune_flwr.testing import FakeGrid
from tests.fedtune_flwr import apps
from tests.fedtune_flwr.runs import BY_LOSS, NODES, SPACE, STRATEGIES, assert_same_arrays, run


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


def test_all_replies_failed_is_left_to_the_inner_strategy(caplog):
    def train(message, context):
        raise RuntimeError("gone")

    with caplog.at_level(logging.ERROR, logger="fedtune_flwr"):
        result, _ = run(FedTune(FedAvg(**NODES), policy=BY_LOSS), apps.app(train), rounds=2)
    assert result.train_metrics_clientapp == {}
    assert caplog.text.count("no client returned a usable reply (4 failed, 0 set aside)") == 2


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


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: m.update({"accuracy": math.nan}), "accuracy=nan"),
        (lambda m: m.update({"num-examples": math.inf}), "num-examples=inf"),
        (lambda m: m.update({"num-examples": -1.0}), "num-examples=-1.0"),
        (lambda m: m.update({"loss": 1.0}), "not those of the others"),
        (lambda m: m.pop("num-examples"), "not those of the others"),
    ],
    ids=["NaN", "infinite weight", "negative weight", "one more", "no weight"],
)
def test_evaluations_that_cannot_be_averaged_are_set_aside(spoil, words, caplog):
    app = apps.ClientApp()
    app.train()(apps.train)

    @app.evaluate()
    def evaluate(message, context):
        reply = apps.evaluate(message, context)
        if apps.partition(context) == 2:
            spoil(reply.content["metrics"])
        return reply

    setting = Policy.constant(SPACE, {"lr": 0.3, "local-epochs": 1})
    strategy = FedTune(FedAvg(min_evaluate_nodes=4, **NODES), policy=setting)
    with caplog.at_level(logging.WARNING, logger="fedtune_flwr"):
        result, _ = run(strategy, app, rounds=1)
    assert words in caplog.text
    assert strategy.clients[102].quarantined == strategy.quarantined == 1
    assert math.isfinite(result.evaluate_metrics_clientapp[1]["accuracy"])
    assert set(result.evaluate_metrics_clientapp[1]) == {"accuracy"}
