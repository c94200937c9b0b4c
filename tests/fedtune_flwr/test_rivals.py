"""The benchmark's rival methods, each against a plain loop of its published rule."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtune_flwr._simulate import Candidate, local_sgd
from tests.fedtune_flwr.apps import CLASSES, new_model, proxy
from tests.fedtune_flwr.test_simulate import emulation

ROUNDS, BATCH = 2, 8


@pytest.fixture(scope="module")
def rivals():
    path = Path(__file__).parents[2] / "fedtune_flwr" / "benchmarks" / "rivals.py"
    spec = importlib.util.spec_from_file_location("fedtune_benchmark_rivals", path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def task():
    return proxy(rounds=ROUNDS)


@pytest.fixture(scope="module")
def federation():
    return emulation((7, 20, 34, 13), 3)


def candidate(values=None) -> Candidate:
    values = values or [{"lr": 0.1, "local-epochs": e} for e in (1, 3, 2, 1)]
    return Candidate(tuple(values), np.log([7.0, 20.0, 34.0, 13.0]))


def batches(federation, t, client, epochs):
    order = federation.order(t, client, epochs)
    for row in order:
        for at in range(0, len(row), BATCH):
            yield torch.from_numpy(row[at : at + BATCH].copy())


def flat(state):
    return torch.cat([value.flatten() for value in state.values()])


def gradient(model, state, x, y):
    model.load_state_dict(state)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    return dict(zip(state, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def delta_sgd(federation, state, t, client, epochs):
    """Algorithm 1 of arXiv 2306.11201 for one client, in scalars and whole vectors."""
    model = new_model()
    eta, theta, before = 0.2, 1.0, None
    for rows in batches(federation, t, client, epochs):
        x, y = federation.x[client][rows], federation.y[client][rows]
        own = gradient(model, state, x, y)
        if before is not None:
            earlier = gradient(model, before, x, y)
            moved = float((flat(state) - flat(before)).norm())
            turned = float((flat(own) - flat(earlier)).norm())
            new = min(2 * moved / (2 * turned), np.sqrt(1 + 0.1 * theta) * eta)
            eta, theta = new, new / eta
        before = state
        state = {name: value - eta * own[name] for name, value in state.items()}
    return state


def test_delta_sgd_follows_the_smoothness_of_each_client(rivals, task, federation):
    own = candidate()
    (outcome,) = rivals.train(task, [(federation, own)], ROUNDS, scored=1, method="delta-sgd")
    state = dict(federation.initial)
    for t in range(ROUNDS):
        chosen = federation.chosen(t)
        weight = federation.sizes[chosen] / federation.sizes[chosen].sum()
        trained = [
            delta_sgd(federation, state, t, k, own.values[k]["local-epochs"]) for k in chosen
        ]
        state = {
            n: sum(float(w) * part[n] for w, part in zip(weight, trained, strict=True))
            for n in state
        }
    torch.testing.assert_close(flat(outcome.state), flat(state), rtol=1e-3, atol=1e-4)


def sgd(federation, state, t, client, epochs):
    model = new_model()
    model.load_state_dict(state)
    steps = epochs * -(-len(federation.y[client]) // BATCH)
    values = {
        "lr": 0.1, "momentum": 0.0, "weight-decay": 0.0, "proximal-mu": 0.0,
        "logit-adjustment": 0.0, "batch-size": BATCH,
    }  # fmt: skip
    order = federation.order(t, client, epochs)
    x, y = federation.x[client], federation.y[client]
    local_sgd(model, x, y, values, order, steps, CLASSES)
    return {n: v.detach().clone() for n, v in model.state_dict().items()}, steps


def test_fednova_averages_the_change_a_step(rivals, task, federation):
    own = candidate()
    (outcome,) = rivals.train(task, [(federation, own)], ROUNDS, scored=1, method="fednova")
    state = dict(federation.initial)
    for t in range(ROUNDS):
        chosen = federation.chosen(t)
        weight = federation.sizes[chosen] / federation.sizes[chosen].sum()
        done = [sgd(federation, state, t, k, own.values[k]["local-epochs"]) for k in chosen]
        effective = sum(w * steps for w, (_, steps) in zip(weight, done, strict=True))
        state = {
            n: value
            + sum(
                float(w * effective / steps) * (new[n] - value)
                for w, (new, steps) in zip(weight, done, strict=True)
            )
            for n, value in state.items()
        }
    torch.testing.assert_close(flat(outcome.state), flat(state), rtol=1e-3, atol=1e-4)


def test_feddisco_weighs_by_share_and_distance(rivals, federation):
    chosen = federation.chosen(0)
    _, own = rivals._disco((federation, candidate()), chosen, 0.5)
    share = federation.sizes[chosen] / federation.sizes[chosen].sum()
    for client, p in zip(chosen, share, strict=True):
        counts = np.bincount(federation.y[client].numpy(), minlength=CLASSES)
        distance = np.sqrt(((counts / counts.sum() - 1 / CLASSES) ** 2).sum())
        weight = max(0.0, p - 0.5 * distance + 0.1)
        assert np.exp(own.log_weight_K[client]) == pytest.approx(weight)


def test_feddisco_falls_back_to_shares_where_no_weight_is_left(rivals, federation):
    chosen = federation.chosen(0)
    _, own = rivals._disco((federation, candidate()), chosen, 100.0)
    share = federation.sizes[chosen] / federation.sizes[chosen].sum()
    assert np.exp(own.log_weight_K[chosen]) == pytest.approx(share)


def test_fedex_moves_to_the_setting_with_less_loss(rivals):
    theta, squares = np.full(3, 1 / 3), 0.0
    for _ in range(12):
        drawn = np.asarray([0, 1, 2])
        loss = np.asarray([1.0, 0.4, 1.0])
        theta, squares = rivals.exponentiated(theta, drawn, (loss - loss.mean()) / 3, squares)
        assert theta.sum() == pytest.approx(1)
    assert theta.argmax() == 1
    assert theta[1] > 0.8
    # The first step by hand: g = w (l - mean) / theta, eta = sqrt(2 log 3) / |g|.
    first, _ = rivals.exponentiated(np.full(3, 1 / 3), drawn, (loss - loss.mean()) / 3, 0.0)
    slope = loss - loss.mean()
    expected = np.exp(-np.sqrt(2 * np.log(3)) / np.abs(slope).max() * slope)
    assert first == pytest.approx(expected / expected.sum())


def test_fedex_counts_its_rounds_and_steps(rivals, task, federation):
    settings = rivals.perturbed({"lr": 0.1, "local-epochs": 2}, 4, 0, 3)
    assert settings[0] == {"lr": 0.1, "local-epochs": 2}
    assert all(0.05 <= s["lr"] <= 0.2 and 1 <= s["local-epochs"] <= 3 for s in settings)
    outcome = rivals.fedex(task, federation, settings, ROUNDS)
    assert len(outcome.curve) == len(outcome.steps) == ROUNDS
    assert all(np.isfinite(outcome.curve))
