"""Federated training of many settings at once, and the rivals that train in another way.

`train` is FedAvg by the plugin's own batched code, with the local steps or the averaging replaced
for FedNova and for a per-client adaptive step; `fedex` tunes while it trains.

Shapes: R runs, L lanes (one client in one run), A lanes still running, B examples, C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.func import functional_call

from fedtune_flwr._batched import (
    MAX_LANES,
    _accuracies,
    _aggregate,
    _Data,
    _forward,
    _Lanes,
    _numbers,
    _residual,
    _train_lanes,
)
from fedtune_flwr._simulate import Candidate, Emulation, Run, aggregation_weights
from fedtune_flwr._task import ProxyTask

Parameters = dict[str, torch.Tensor]


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        curve: test accuracy after each scored round.
        state: the final global model.
        steps: client steps of each round, all clients together.
    """

    curve: list[float]
    state: Parameters = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)


def train(
    task: ProxyTask, runs: Sequence[Run], rounds: int, *, scored: int, method: str = "fedavg"
) -> list[Outcome]:
    """Trains every run.

    Args:
        task: the model.
        runs: settings and federations.
        rounds: how many.
        scored: rounds at the end whose model is scored.
        method: "fedavg", "fednova" (normalised averaging) or "delta-sgd".
    """
    size = max(1, MAX_LANES // runs[0][0].per_round)
    parts = [runs[i : i + size] for i in range(0, len(runs), size)]
    return [o for part in parts for o in _train(task, part, rounds, scored, method)]


def _train(
    task: ProxyTask, runs: Sequence[Run], rounds: int, scored: int, method: str
) -> list[Outcome]:
    forward = _forward(task.model_fn())
    data = _Data(task, runs)
    state = {n: torch.stack([e.initial[n] for e, _ in runs]) for n in runs[0][0].initial}
    filled = [[_numbers(task, values) for values in c.values] for _, c in runs]
    outcomes = [Outcome([]) for _ in runs]
    local = _delta_sgd if method == "delta-sgd" else _train_lanes
    for t in range(rounds):
        chosen = {id(e): e.chosen(t).tolist() for e, _ in runs}
        lanes = _Lanes(runs, filled, chosen, data, t)
        trained = local(state, lanes, data, forward)
        average = _normalised if method == "fednova" else _aggregate
        state = average(state, trained, runs, chosen, lanes)
        for r, taken in enumerate(np.bincount(lanes.runs.numpy(), lanes.steps, len(runs))):
            outcomes[r].steps.append(int(taken))
        if t >= rounds - scored:
            for r, accuracy in _accuracies(forward, state, runs):
                outcomes[r].curve.append(100 * accuracy)
    for r, outcome in enumerate(outcomes):
        outcome.state = {name: value[r] for name, value in state.items()}
    return outcomes


def _normalised(
    state: Parameters,
    trained: Parameters,
    runs: Sequence[Run],
    chosen: dict[int, list[int]],
    lanes: _Lanes,
) -> Parameters:
    """FedNova's average for plain SGD: mean change a step, times the mean number of steps."""
    steps_L = lanes.steps[np.argsort(lanes.rank)]
    result = {name: value.clone() for name, value in state.items()}
    at = 0
    for r, (emulation, candidate) in enumerate(runs):
        mine = chosen[id(emulation)]
        weight = aggregation_weights(candidate.log_weight_K[mine])
        own = slice(at, at + len(mine))
        at += len(mine)
        share = torch.from_numpy(weight / steps_L[own] * (weight @ steps_L[own]))
        moved = {}
        for name, value in trained.items():
            change = (value[own] - state[name][r]).double()
            moved[name] = (change * share.reshape(-1, *[1] * (value.ndim - 1))).sum(dim=0)
        if all(bool(torch.isfinite(m).all()) for m in moved.values()):
            for name, change in moved.items():
                result[name][r] += change.float()
    return result


def _delta_sgd(
    state: Parameters, lanes: _Lanes, data: _Data, forward: Callable[..., torch.Tensor]
) -> Parameters:
    """SGD whose step follows the client's own smoothness, with the published constants.

    eta_k = min(gamma |x_k - x_{k-1}| / (2 |g_k - g_{k-1}|), sqrt(1 + delta theta) eta_{k-1}) with
    theta = eta_{k-1} / eta_{k-2}, gamma = 2, delta = 0.1, eta_0 = 0.2 (arXiv 2306.11201).
    """
    parameters = {name: value[lanes.runs].clone() for name, value in state.items()}
    offset = data.offset_K[lanes.clients][:, None]
    eta = torch.full((len(lanes.steps),), 0.2)
    theta = torch.ones(len(lanes.steps))
    before: tuple[Parameters, Parameters] | None = None
    for step in range(int(lanes.steps[0])):
        count = lanes.running(step)
        place, real = lanes.batch_at(step, count)
        index = offset[:count] + place
        weight = real.float() / real.sum(dim=1, keepdim=True)
        part = {n: v[:count].detach().requires_grad_() for n, v in parameters.items()}
        with torch.enable_grad():
            logits = forward(part, data.x[index])
        residual = _residual(logits.detach(), data.y[index], weight)
        gradients = torch.autograd.grad(logits, list(part.values()), residual)
        gradient = dict(zip(part, gradients, strict=True))
        now = {n: v[:count].clone() for n, v in parameters.items()}
        if before is not None:
            moved = _norm({n: now[n] - before[0][n][:count] for n in now})
            turned = _norm({n: gradient[n] - before[1][n][:count] for n in now})
            last = eta[:count].clone()
            smooth = torch.where(turned > 0, 2 * moved / (2 * turned + 1e-12), torch.inf)
            eta[:count] = torch.minimum(smooth, torch.sqrt(1 + 0.1 * theta[:count]) * last)
            theta[:count] = eta[:count] / last.clamp_min(1e-12)
        for name, value in gradient.items():
            own = eta[:count].reshape(-1, *[1] * (value.ndim - 1))
            parameters[name][:count].sub_(own * value)
        before = (now, gradient)
    back = torch.from_numpy(np.argsort(lanes.rank))
    return {name: value[back] for name, value in parameters.items()}


def _norm(parts: Parameters) -> torch.Tensor:
    return torch.sqrt(sum((v.flatten(1) ** 2).sum(dim=1) for v in parts.values()))  # type: ignore[call-overload,no-any-return]


def fedex(
    task: ProxyTask, emulation: Emulation, settings: Sequence[dict[str, float]], rounds: int
) -> Outcome:
    """FedEx-like: clients draw a setting from a shared distribution that learns as they train.

    A fifth of every client's examples is kept back to score what it trained; the distribution over
    `settings` takes exponentiated-gradient steps of adaptive length (arXiv 2106.04502). One forward
    pass over the kept part a client and round, and no client sees more than four fifths of its data
    in training.
    """
    rng = np.random.default_rng((emulation.seed, 5))
    cuts = [max(1, len(y) // 5) for y in emulation.y]
    kept = [(x[:c], y[:c]) for x, y, c in zip(emulation.x, emulation.y, cuts, strict=True)]
    own = Emulation(
        tuple(x[c:] for x, c in zip(emulation.x, cuts, strict=True)),
        tuple(y[c:] for y, c in zip(emulation.y, cuts, strict=True)),
        emulation.metrics_KM, emulation.x_val, emulation.y_val,
        emulation.initial, emulation.per_round, emulation.seed,
    )  # fmt: skip
    log_size = np.log(own.sizes)
    model = task.model_fn()
    forward = _forward(model)
    state = {name: value[None] for name, value in emulation.initial.items()}
    theta = np.full(len(settings), 1 / len(settings))
    squares, history = 0.0, []
    outcome = Outcome([])
    for t in range(rounds):
        draws = rng.choice(len(settings), len(own.y), p=theta)
        candidate = Candidate(tuple(settings[i] for i in draws), log_size)
        runs = [(own, candidate)]
        chosen = {id(own): own.chosen(t).tolist()}
        data = _Data(task, runs)
        filled = [[_numbers(task, values) for values in candidate.values]]
        lanes = _Lanes(runs, filled, chosen, data, t)
        trained = _train_lanes(state, lanes, data, forward)
        losses = []
        for lane, client in enumerate(chosen[id(own)]):
            x, y = kept[client]
            with torch.no_grad():
                logits = functional_call(model, {n: v[lane] for n, v in trained.items()}, (x,))
                loss = float(torch.nn.functional.cross_entropy(logits, y))
            losses.append(min(loss, 20.0) if np.isfinite(loss) else 20.0)
        weight = own.sizes[chosen[id(own)]] / own.sizes[chosen[id(own)]].sum()
        baseline = float(np.mean(history[-5:])) if history else float(weight @ losses)
        history.append(float(weight @ losses))
        slope = np.zeros(len(settings))
        for share, loss, client in zip(weight, losses, chosen[id(own)], strict=True):
            slope[draws[client]] += share * (loss - baseline) / theta[draws[client]]
        squares += float(np.abs(slope).max() ** 2)
        if squares > 0:
            theta *= np.exp(-np.sqrt(2 * np.log(len(settings)) / squares) * slope)
            theta = np.maximum(theta / theta.sum(), 1e-4)
            theta /= theta.sum()
        state = _aggregate(state, trained, runs, chosen, lanes)
        outcome.steps.append(int(lanes.steps.sum()))
        outcome.curve.append(100 * _accuracies(forward, state, runs)[0][1])
    outcome.state = {name: value[0] for name, value in state.items()}
    return outcome
