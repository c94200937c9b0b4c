"""`objective="personal"`: values for fine-tuning the finished model on each client."""

from dataclasses import replace

import numpy as np
import pytest

from fedtune_flwr import Emulator, Int, Log, SearchSpace, TuneOptions, TuneReport, tune
from fedtune_flwr._finetune import fine_tune, fine_tune_batched, global_model
from fedtune_flwr._personal import HELD_OUT
from fedtune_flwr._simulate import Candidate
from tests.fedtune_flwr import apps

SPACE = SearchSpace(lr=Log(0.01, 1.0), **{"local-epochs": Int(1, 3)})
# Half the clients hold one class, half an even mix.
METRICS = [
    {"log-size": 3.5, "label-entropy": 0.0, "reference-loss": 0.4, "gradient-norm": 0.6},
    {"log-size": 4.0, "label-entropy": 1.0, "reference-loss": 0.4, "gradient-norm": 0.05},
] * 4


@pytest.fixture(scope="module")
def emulator():
    return Emulator(apps.proxy(240, rounds=3), bank=60)


@pytest.fixture(scope="module")
def report(emulator):
    options = TuneOptions(budget=12, rounds=3, objective="personal")
    return tune(SPACE, emulator, METRICS, tuner="sobol", options=options)


def test_fine_tuning_all_at_once_agrees_with_one_client_after_another(emulator):
    made = emulator.emulate(METRICS, 5, 0.5, held_out=40)
    assert all(len(y) == 40 for y in made.y_own)
    rng = np.random.default_rng(0)
    settings = [
        [{"lr": float(rng.uniform(0.01, 0.5)), "local-epochs": e} for _ in METRICS] for e in (1, 3)
    ]
    expected = fine_tune(emulator.task, made, settings)
    got = fine_tune_batched(emulator.task, made, settings)
    assert got.shape == (2, len(METRICS))
    np.testing.assert_allclose(got, expected, atol=1.01 / 40)


def test_holding_examples_back_leaves_the_federation_as_it_was(emulator):
    plain = emulator.emulate(METRICS, 6, 0.5)
    held = emulator.emulate(METRICS, 6, 0.5, held_out=HELD_OUT)
    assert plain.seed == held.seed
    assert plain.y_own == ()
    for a, b in zip(plain.x, held.x, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_the_model_to_start_from_is_the_one_that_training_ends_in(emulator):
    made = emulator.emulate(METRICS, 7)
    setting = Candidate(({"lr": 0.2, "local-epochs": 1},) * len(METRICS), np.zeros(len(METRICS)))
    both = [global_model(emulator.task, made, setting, 2, batched=b) for b in (True, False)]
    for name, value in both[1].items():
        np.testing.assert_allclose(both[0][name].numpy(), value.numpy(), rtol=1e-3, atol=1e-4)


def test_the_report_has_a_policy_for_fine_tuning(report, tmp_path):
    assert report.personal is not None
    assert report.personal_gain is not None
    assert report.personal_gain.emulations == 2 * len(METRICS)
    assert report.personal.customizes == report.personal_gain.kept
    for row in METRICS:
        values = report.personal.assign(row).values
        assert 0.01 <= values["lr"] <= 1.0
        assert 1 <= values["local-epochs"] <= 3
    assert "fine-tuning values of their own" in report.summary()
    report.save(tmp_path / "r.json")
    assert TuneReport.load(tmp_path / "r.json") == report


def test_clients_of_one_class_fine_tune_harder_where_that_pays():
    """A gain that is there for the taking: one class alone is learnt by any large step."""
    emulator = Emulator(apps.proxy(300, rounds=3), bank=80)
    options = TuneOptions(budget=12, rounds=3, objective="personal", min_gain=-1.0)
    space = SearchSpace(lr=Log(0.003, 3.0))
    report = tune(space, emulator, METRICS, tuner="sobol", options=options)
    assert report.personal.customizes
    one, even = (report.personal.assign(row).values["lr"] for row in METRICS[:2])
    assert one > even


def test_personal_values_go_out_with_the_evaluation_and_only_there(report):
    from flwr.app import ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from fedtune_flwr import FedTune
    from fedtune_flwr.testing import FakeGrid

    personal = replace(report.policy, slopes={("lr", "label-entropy"): -0.5}, origin="personal")
    training = replace(report.policy, slopes={})
    sent = {"train": [], "evaluate": []}

    def watch(message, reply):
        if message.metadata.message_type in sent:
            sent[message.metadata.message_type].append(message)

    strategy = FedTune(
        FedAvg(min_train_nodes=4, min_available_nodes=4, min_evaluate_nodes=4),
        policy=training, personal=personal,
    )  # fmt: skip
    grid = FakeGrid(apps.app(), 4, watch=watch)
    strategy.start(grid, apps.initial_arrays(), 1, train_config=ConfigRecord())
    rates = {m.content["config"]["lr"] for m in sent["train"]}
    assert rates == {training.assign(None).values["lr"]}
    assert len(sent["evaluate"]) == 4
    for message in sent["evaluate"]:
        row = strategy.clients[message.metadata.dst_node_id]
        assert message.content["config"]["lr"] == personal.assign(row.metrics).values["lr"]
