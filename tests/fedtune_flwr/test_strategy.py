"""The wrapper around a strategy: what it leaves alone, and what it gives to each client."""

import logging
import math
import threading
import time

import pytest
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
)

from fedtune_flwr import (
    ConfigError,
    FedTune,
    Log,
    Policy,
    ProxyError,
    SearchSpace,
    SpaceError,
    TuneOptions,
    UnknownTunerError,
)
from tests.fedtune_flwr import apps
from tests.fedtune_flwr.runs import BY_LOSS, NODES, SPACE, STRATEGIES, app_for, assert_same, run


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
        (lambda: FedTune(FedAvg(), SPACE, objective="own"), ConfigError, "objective='own'"),
        (lambda: FedTune(FedAvg(), SPACE, background=1), ConfigError, "background=1"),
        (lambda: FedTune(FedAvg(), policy=BY_LOSS, personal=5), ConfigError, "personal=5"),
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


def test_options_reach_the_search():
    strategy = FedTune(
        FedAvg(**NODES), SPACE, apps.proxy(rounds=2), tuner="sobol", budget=12,
        options=TuneOptions(min_gain=0.9),
    )  # fmt: skip
    run(strategy, rounds=1)
    assert not strategy.policy.customizes


def test_tuning_in_the_background_takes_over_when_it_is_done(monkeypatch):
    from fedtune_flwr import _finder

    go_on, original = threading.Event(), _finder.tune
    used = []

    def patient(*args, **kwargs):
        assert go_on.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(_finder, "tune", patient)

    class Inner(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            if server_round > 1:
                used.append((strategy.policy, strategy.report))
            if server_round == 3:
                go_on.set()
                assert strategy._finder.wait(60)
            return super().configure_train(server_round, arrays, config, grid)

    strategy = FedTune(
        Inner(**NODES), SPACE, apps.proxy(rounds=2), tuner="random", budget=12, background=True
    )
    result, _ = run(strategy, rounds=4)
    rules, none = used[0]
    assert none is None
    assert rules.origin in ("prior", "default")
    assert used[1] == (rules, None)  # still searching
    assert strategy.report is not None
    assert used[2] == (strategy.report.policy, strategy.report)
    assert len(result.train_metrics_clientapp) == 4
    assert all(row.values for row in strategy.clients.values())


def test_a_run_that_ends_before_tuning_leaves_no_thread(monkeypatch):
    from fedtune_flwr import _finder

    def endless(*args, progress, **kwargs):
        while True:
            progress("still searching")
            time.sleep(0.01)

    monkeypatch.setattr(_finder, "tune", endless)
    strategy = FedTune(
        FedAvg(**NODES), SPACE, apps.proxy(rounds=2), tuner="random", budget=12, background=True
    )
    result, _ = run(strategy, rounds=2)
    assert len(result.train_metrics_clientapp) == 2
    assert strategy.report is None
    assert not strategy._finder.searching
    assert not [t for t in threading.enumerate() if t.name == "fedtune-tuning"]
