import numpy as np
import pytest
import torch
from torch import nn

from fedtune_flwr import ProxyTask
from fedtune_flwr._batched import can_batch, final_states, simulate_batched, stacked_layers
from fedtune_flwr._simulate import (
    Candidate,
    Emulation,
    aggregation_weights,
    final_state,
    simulate,
)
from fedtune_flwr._task import local_step_count
from tests.fedtune_flwr.apps import CLASSES, FEATURES, blobs, new_model, proxy


def emulation(sizes, per_round, seed=7, model_fn=new_model) -> Emulation:
    parts = [blobs(20 + i, n) for i, n in enumerate(sizes)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        initial = {k: v.detach().clone() for k, v in model_fn().state_dict().items()}
    x_val, y_val = blobs(77, 120)
    return Emulation(
        tuple(x for x, _ in parts),
        tuple(y for _, y in parts),
        np.zeros((len(sizes), 5)),
        x_val,
        y_val,
        initial,
        per_round,
        seed,
    )


def setting(clients, seed, **fixed) -> Candidate:
    rng = np.random.default_rng(seed)
    values = tuple(
        {
            "lr": float(rng.uniform(0.01, 0.3)),
            "local-epochs": int(rng.integers(1, 4)),
            "batch-size": int(rng.choice([3, 8, 64])),
            **fixed,
        }
        for _ in range(clients)
    )
    return Candidate(values, rng.normal(size=clients))


CASES = {
    "odd sizes": {"sizes": (1, 7, 20, 33), "per_round": 4},
    "sampled clients": {"sizes": (5, 12, 9, 30, 2), "per_round": 2},
    "one client": {"sizes": (11,), "per_round": 1},
}
EXTRAS = {
    "plain": {},
    "momentum and decay": {"momentum": 0.9, "weight-decay": 0.01},
    "proximal": {"proximal-mu": 0.5},
    "logit adjustment": {"logit-adjustment": 1.0},
    "steps": {"local-steps": 5},
}


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_batched_training_agrees_with_one_client_after_another(case, extra):
    task = proxy()
    first = emulation(**case, seed=7)
    second = emulation(**case, seed=8)
    clients = len(case["sizes"])
    runs = [(e, setting(clients, i, **extra)) for i, e in enumerate((first, second, first, second))]
    expected = simulate(task, runs, 3)
    got = simulate_batched(task, runs, 3)
    assert got.shape == (4, 3)
    # One example of the 120 may fall on the other side of a boundary through rounding.
    np.testing.assert_allclose(got, expected, atol=1.01 / 120)


def test_trained_parameters_agree_not_only_scores():
    task = proxy()
    e = emulation((5, 12, 9), 3)
    run = (e, setting(3, 1, momentum=0.5))
    expected = final_state(task, run, 2)
    (got,) = final_states(task, [run], 2)
    assert set(got) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)


LAYERED = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (6,)),
    "flat first": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), (2, 3)),
    "no bias, rows": (lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.GELU()), (2, 3)),
}


@pytest.mark.parametrize("case", LAYERED.values(), ids=LAYERED)
def test_chains_of_layers_written_out_agree_with_the_model(case):
    make, shape = case
    models = [make() for _ in range(3)]
    stacked = {
        name: torch.stack([dict(m.named_parameters())[name] for m in models])
        for name, _ in models[0].named_parameters()
    }
    x = torch.randn(3, 7, *shape)
    forward = stacked_layers(models[0])
    assert forward is not None
    expected = torch.stack([model(part) for model, part in zip(models, x, strict=True)])
    torch.testing.assert_close(forward(stacked, x), expected)


def test_other_models_are_not_taken_for_chains_of_layers():
    class Own(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked[0].register_forward_hook(lambda *_: None)
    twice = nn.Linear(2, 2)
    for model in (
        Own(nn.Linear(2, 2)), hooked, nn.Sequential(twice, twice), nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Sequential(nn.Flatten(0), nn.Linear(2, 2)),
    ):  # fmt: skip
        assert stacked_layers(model) is None


def test_a_run_that_diverges_neither_stops_nor_touches_the_others():
    task = proxy()
    e = emulation((9, 14), 2)
    wild = Candidate(({"lr": 1e30}, {"lr": 1e30}), np.zeros(2))
    calm = setting(2, 3)
    alone = simulate_batched(task, [(e, calm)], 3)
    both = simulate_batched(task, [(e, wild), (e, calm)], 3)
    np.testing.assert_allclose(both[1], alone[0], atol=1.01 / 120)
    assert np.isfinite(both).all()
    assert np.isfinite(simulate(task, [(e, wild)], 3)).all()


def test_groups_of_lanes_do_not_change_the_result(monkeypatch):
    from fedtune_flwr import _batched

    task = proxy()
    e = emulation((9, 14, 6), 3)
    runs = [(e, setting(3, i)) for i in range(5)]
    whole = simulate_batched(task, runs, 2)
    monkeypatch.setattr(_batched, "MAX_LANES", 4)
    np.testing.assert_allclose(simulate_batched(task, runs, 2), whole, atol=1.01 / 120)
    assert simulate_batched(task, [], 2).shape == (0, 2)


def test_convolutions_can_be_batched_and_running_statistics_cannot():
    def convolutional():
        return torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 2, 3)),
            torch.nn.Conv2d(1, 4, 2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(48, CLASSES),
        )

    task = ProxyTask(convolutional, data=blobs(99, 60))
    e = emulation((5, 12), 2, model_fn=convolutional)
    runs = [(e, setting(2, i)) for i in range(2)]
    np.testing.assert_allclose(
        simulate_batched(task, runs, 2), simulate(task, runs, 2), atol=1.01 / 120
    )
    assert can_batch(task)
    normed = torch.nn.Sequential(torch.nn.BatchNorm1d(FEATURES), torch.nn.Linear(FEATURES, 3))
    assert not can_batch(ProxyTask(lambda: normed, data=blobs(99, 60)))
    assert not can_batch(proxy(train_fn=lambda *a: None))


def test_own_train_and_score_functions_are_called():
    calls = []

    def train_fn(model, x, y, hp, seed):
        calls.append((len(y), hp["lr"], seed))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(hp["lr"])

    task = proxy(
        train_fn=train_fn,
        eval_fn=lambda model, x, y: float(next(model.parameters()).detach()[0, 0]),
    )
    e = emulation((4, 6), 2)
    candidate = Candidate(({"lr": 1.0}, {"lr": 3.0}), np.zeros(2))
    scores = simulate(task, [(e, candidate)], 2)
    start = float(e.initial["0.weight"][0, 0])
    np.testing.assert_allclose(scores, [[start + 2, start + 4]], rtol=1e-5)
    assert [c[:2] for c in calls] == [(4, 1.0), (6, 3.0)] * 2
    assert len({c[2] for c in calls}) == 4


def test_weights_and_steps():
    np.testing.assert_allclose(aggregation_weights(np.log([1.0, 3.0])), [0.25, 0.75])
    np.testing.assert_allclose(aggregation_weights(np.array([800.0, 800.0])), [0.5, 0.5])
    assert local_step_count(10, 2, 0, 4) == 6
    assert local_step_count(10, 2, 5, 4) == 5
    assert local_step_count(1, 1, 0, 32) == 1
