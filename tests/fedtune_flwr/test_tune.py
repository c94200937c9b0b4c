import dataclasses
import json

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAvg

from fedtune_flwr import (
    ConfigError,
    Emulator,
    FedTune,
    Int,
    Log,
    ProxyError,
    ProxyTask,
    SearchSpace,
    TuneReport,
    TunerError,
    UnknownTunerError,
    tune,
    tuners,
)
from fedtune_flwr._metrics import NAMES, as_matrix
from fedtune_flwr._options import TuneOptions
from fedtune_flwr._statistics import student_above
from tests.fedtune_flwr.apps import CLASSES, FEATURES, blobs, new_model, proxy

SPACE = SearchSpace(lr=Log(0.01, 1.0), **{"local-epochs": Int(1, 3)})
SMALL = TuneOptions(budget=14, rounds=5)


def population(emulator, noise):
    return [emulator.measure(*blobs(i, 60, n)) for i, n in enumerate(noise)]


@pytest.fixture(scope="module")
def emulator():
    return Emulator(proxy(240), bank=120, seed=0)


def test_tuning_repeats_exactly_and_does_not_depend_on_who_answers_first(emulator):
    metrics = population(emulator, [0, 0, 0, 0.9, 0.9, 0.9])
    first = tune(SPACE, emulator, metrics, options=SMALL, seed=1)
    again = tune(
        SPACE, Emulator(proxy(240), bank=120, seed=0), metrics[::-1], options=SMALL, seed=1
    )
    assert first.policy == again.policy
    assert [t.scores for t in first.trials] == [t.scores for t in again.trials]


def test_a_report_survives_its_file(emulator, tmp_path):
    report = tune(SPACE, emulator, population(emulator, [0, 0, 0.9]), tuner="sobol", options=SMALL)
    report.save(tmp_path / "report.json")
    again = TuneReport.load(tmp_path / "report.json")
    assert again.policy == report.policy
    assert again.gain == report.gain
    assert again.trials == report.trials
    assert "emulated gain" in report.summary()
    json.loads((tmp_path / "report.json").read_text())


def test_clients_that_are_alike_get_one_setting(emulator):
    report = tune(
        SPACE, emulator, [population(emulator, [0])[0]] * 5, tuner="random", options=SMALL
    )
    assert not report.policy.customizes
    assert report.gain is None
    assert "do not differ" in report.summary()
    assert report.cost <= SMALL.budget + 1


def test_the_gate_keeps_customization_off_when_it_cannot_pay(emulator):
    metrics = population(emulator, [0, 0, 0.9, 0.9])
    sure = dataclasses.replace(SMALL, min_gain=0.5)
    report = tune(SPACE, emulator, metrics, tuner="random", options=sure)
    assert report.gain is not None
    assert not report.gain.kept
    assert not report.policy.customizes


def test_the_gate_lets_a_large_gain_pass():
    # One clean client in five; equal treatment drowns it.
    task = ProxyTask(new_model, data=blobs(99, 300), defaults={"batch-size": 8})
    emulator = Emulator(task, bank=200, seed=0)
    metrics = population(emulator, [0, 0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    options = TuneOptions(budget=30, rounds=8, confirmations=8)
    space = SearchSpace(lr=Log(0.3, 1.0), **{"local-epochs": Int(4, 6)})
    report = tune(space, emulator, metrics, tuner="sobol", options=options)
    assert report.gain is not None
    assert report.gain.kept
    assert report.policy.customizes
    columns = report.policy.log_weight_many(as_matrix(metrics))
    assert columns[:2].min() > columns[2:].max()


def test_customize_false_searches_one_setting(emulator):
    options = dataclasses.replace(SMALL, customize=False)
    report = tune(SPACE, emulator, population(emulator, [0, 0.9]), tuner="random", options=options)
    assert not any(t.customizes for t in report.trials)
    assert "as asked" in report.summary()


class Broken:
    def __init__(self, dimensions, seed):
        self.dimensions = dimensions

    def ask(self, count, fixed=None):
        return np.full((count, self.dimensions), 2.0)

    def tell(self, points, scores, fidelity):
        raise RuntimeError("no")


def test_a_tuner_that_breaks_its_contract_is_named(emulator, monkeypatch):
    metrics = population(emulator, [0, 0.9])
    monkeypatch.setattr(tuners, "get", lambda name: Broken)
    with pytest.raises(TunerError, match=r"in \[0, 1\]"):
        tune(SPACE, emulator, metrics, options=SMALL)
    monkeypatch.setattr(Broken, "ask", lambda s, n, f=None: np.full((n, s.dimensions), 0.5))
    with pytest.raises(TunerError, match="refused scores"):
        tune(SPACE, emulator, metrics, options=SMALL)
    monkeypatch.setattr(tuners, "get", lambda name: lambda d, s: 1 / 0)
    with pytest.raises(TunerError, match="could not be made"):
        tune(SPACE, emulator, metrics, options=SMALL)


def test_bad_requests(emulator):
    metrics = population(emulator, [0])
    with pytest.raises(UnknownTunerError):
        tune(SPACE, emulator, metrics, tuner="nobody")
    with pytest.raises(ProxyError, match="dropout"):
        tune(SearchSpace(dropout=Log(0.1, 0.5)), emulator, metrics)
    with pytest.raises(ProxyError, match="empty"):
        tune(SPACE, emulator, [], options=SMALL)
    for wrong in ({"budget": 3}, {"fraction": 0.0}, {"confidence": 1.0}, {"confirmations": 1},
                  {"rounds": 1.5}, {"threads": "a"}, {"min_gain": float("nan")},
                  {"confidence": None}, {"weight": "a"}):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            TuneOptions(**wrong)
    with pytest.raises(ConfigError, match="seed=-1"):
        tune(SPACE, emulator, metrics, seed=-1)
    for wrong in (
        {"seed": "a"},
        {"bank": 0},
        {"max_size": "a"},
        {"generators": [5]},
        {"generators": 5},
    ):
        with pytest.raises(ProxyError, match=next(iter(wrong))):
            Emulator(proxy(60), **wrong)


def test_a_score_that_is_not_a_number_is_the_worst(emulator):
    def eval_fn(model, x, y):
        return float("nan")

    task = proxy(eval_fn=eval_fn, train_fn=lambda *a: None)
    report = tune(
        SPACE, Emulator(task, bank=10), [{}] * 3, tuner="random",
        options=TuneOptions(budget=12, rounds=1),
    )  # fmt: skip
    assert all(s == 0 for t in report.trials for s in t.scores)


def test_student_probability_matches_known_quantiles():
    # 90 % quantiles of Student's t.
    for freedom, t in ((3, 1.638), (9, 1.383), (30, 1.310)):
        assert student_above(t, 1.0, freedom) == pytest.approx(0.9, abs=2e-4)
        assert student_above(-t, 1.0, freedom) == pytest.approx(0.1, abs=2e-4)
    assert student_above(0.1, 0.0, 3) == 1
    assert student_above(0.0, 0.0, 3) == 0


def test_emulated_clients_look_like_the_reported_ones(emulator):
    noise = [0, 0, 0.5, 0.9]
    metrics = population(emulator, noise)
    emulation = emulator.emulate(metrics, 0)
    loss = NAMES.index("reference-loss")
    got, wanted = emulation.metrics_KM[:, loss], as_matrix(metrics)[:, loss]
    assert np.corrcoef(got, wanted)[0, 1] > 0.9
    assert [len(y) for y in emulation.y] == [int(np.rint(np.exp(m["log-size"]))) for m in metrics]
    again = emulator.emulate(metrics, 0)
    assert all((a == b).all() for a, b in zip(emulation.y, again.y, strict=True))
    other = emulator.emulate(metrics, 1)
    assert any((a != b).any() for a, b in zip(emulation.y, other.y, strict=True))


def test_emulation_of_strange_reports(emulator):
    emulation = emulator.emulate([{}, {"log-size": 0.0}, {"log-size": 16.0}], 0, fraction=0.5)
    assert [len(y) for y in emulation.y][1:] == [2, 512]
    assert emulation.per_round == 2
    many = emulator.emulate([{"log-size": 3.0}] * 80, 0)
    assert len(many.y) == 50


@pytest.mark.parametrize(
    ("data", "fields", "words"),
    [
        (None, {}, "pair"),
        ((np.zeros(4), np.zeros(4)), {}, "expected"),
        ((np.zeros((4, 2)), np.zeros(4)), {}, "whole numbers"),
        ((np.zeros((4, 2)), np.array([-1, 0, 0, 0])), {}, "from 0"),
        ((np.zeros((0, 2)), np.zeros(0, dtype=int)), {}, "from 0"),
        ((np.full((9, 2), np.nan), np.repeat(np.arange(3), 3)), {}, "NaN"),
        ((np.zeros((6, 2)), np.repeat([0, 2], 3)), {}, "no example of class 1"),
        ((np.zeros((6, 2)), np.repeat([0, 1], 3)), {"classes": 4}, "class 2, 3"),
        ((np.zeros((6, 2)), np.repeat([0, 1], 3)), {"classes": 1}, "not below"),
        ((np.zeros((5, 2)), np.array([0, 0, 0, 1, 1])), {}, "fewer than 3"),
        ((np.zeros((6, 2)), np.repeat([0, 1], 3)), {"rounds": 0}, "at least 1"),
        ((np.zeros((6, 2)), np.repeat([0, 1], 3)), {"rounds": 1.5}, "rounds=1.5"),
        ((np.zeros((6, 2)), np.repeat([0, 1], 3)), {"classes": "2"}, "classes='2'"),
        ((np.zeros((6, 2)), np.repeat([0, 1], 3)), {"train_fn": 5}, "train_fn=5"),
        ((np.full((6, 2), 1e300), np.repeat([0, 1], 3)), {}, "too large for float32"),
        ((np.zeros((6, 2)), np.array([0, 0, 0, 1, 1, 2**40])), {}, "6 examples cannot"),
        ((["a", "b"], [0, 1]), {}, "list and list"),
        ((None, None), {}, "NoneType and NoneType"),
    ],
)
def test_bad_proxies_say_what_is_wrong(data, fields, words):
    with pytest.raises(ProxyError, match=words):
        ProxyTask(new_model, data=data, **fields)


def test_the_smallest_proxy_works():
    task = ProxyTask(new_model, data=blobs(1, 3 * CLASSES))
    emulation = Emulator(task, bank=5).emulate([{"log-size": 2.0}], 0)
    assert emulation.x[0].shape[1] == FEATURES


@pytest.mark.parametrize(
    ("model_fn", "words"),
    [
        (lambda: torch.nn.Linear(FEATURES + 1, CLASSES), "cannot run on proxy inputs"),
        (lambda: torch.nn.Linear(FEATURES, CLASSES - 1), r"expected \(2, 3\)"),
        (lambda: torch.nn.Linear(FEATURES, CLASSES + 1), r"expected \(2, 3\)"),
        (lambda: torch.nn.Flatten(0), r"shape \(12,\)"),
        (lambda: None, "returned a NoneType"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_model_that_does_not_fit_the_proxy_is_refused_at_once(model_fn, words):
    task = ProxyTask(model_fn, data=blobs(1, 30))
    with pytest.raises(ProxyError, match=words):
        Emulator(task, bank=5)
    with pytest.raises(ProxyError, match=words):
        FedTune(FedAvg(), SPACE, task)


def test_a_model_that_cannot_be_trained_is_a_proxy_error():
    class Frozen(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    emulator = Emulator(ProxyTask(lambda: Frozen(FEATURES, CLASSES), data=blobs(1, 30)), bank=5)
    with pytest.raises(ProxyError, match="cannot be trained"):
        emulator.reference_model()


def test_making_an_emulator_draws_nothing_from_the_global_generator():
    before = torch.random.get_rng_state()
    Emulator(proxy(60), bank=5)
    assert torch.equal(before, torch.random.get_rng_state())
