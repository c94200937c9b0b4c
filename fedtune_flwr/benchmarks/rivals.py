"""Federated training of many settings at once, and the rivals that train in another way.

`train` is FedAvg by the plugin's own batched code, with the local steps or the averaging replaced
for FedNova, FedDisco and Delta-SGD; `fedex` tunes while it trains. Each is written anew from the
published rule and tested against a plain loop; differences from the papers are said where they are.

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
DISCO = {"feddisco": 0.5, "feddisco-mild": 0.1}


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
        method: "fedavg", "fednova" (normalised averaging), "delta-sgd", or "feddisco" with the
            published a = 0.5, or "feddisco-mild" with a = 0.1.
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
        if method == "fednova":
            state = _normalised(state, trained, runs, chosen, lanes)
        else:
            weighed = runs
            if method in DISCO:
                weighed = [_disco(run, chosen[id(run[0])], DISCO[method]) for run in runs]
            state = _aggregate(state, trained, weighed, chosen, lanes)
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


def _disco(run: Run, chosen: Sequence[int], a: float) -> Run:
    """The run with this round's FedDisco weights, relu(p - a d + b) (arXiv 2305.19229).

    p is a client's share of the round's examples, d the Euclidean distance of its label mix to an
    even one and b = 0.1; where all weights are 0, the shares are used.
    """
    emulation, candidate = run
    classes = 1 + max(int(y.max()) for y in (*emulation.y, emulation.y_val))
    mixes = np.stack([np.bincount(emulation.y[k].numpy(), minlength=classes) for k in chosen])
    mixes = mixes / mixes.sum(axis=1, keepdims=True)
    share = emulation.sizes[list(chosen)] / emulation.sizes[list(chosen)].sum()
    weight = share - a * np.linalg.norm(mixes - 1 / classes, axis=1) + 0.1
    if weight.max() <= 0:
        weight = share
    log_weight = np.full(len(emulation.y), -np.inf)
    with np.errstate(divide="ignore"):
        log_weight[list(chosen)] = np.log(np.maximum(weight, 0))
    return emulation, Candidate(candidate.values, log_weight)


def _delta_sgd(
    state: Parameters, lanes: _Lanes, data: _Data, forward: Callable[..., torch.Tensor]
) -> Parameters:
    """SGD whose step follows the client's own smoothness, with the published constants.

    eta_k = min(gamma |x_k - x_{k-1}| / (2 |g_k - g_{k-1}|), sqrt(1 + delta theta) eta_{k-1}) with
    theta = eta_{k-1} / eta_{k-2}, gamma = 2, delta = 0.1, eta_0 = 0.2 (arXiv 2306.11201). Both
    gradients are taken on the batch of step k: a second backward pass a step.
    """
    parameters = {name: value[lanes.runs].clone() for name, value in state.items()}
    offset = data.offset_K[lanes.clients][:, None]
    eta = torch.full((len(lanes.steps),), 0.2)
    theta = torch.ones(len(lanes.steps))
    before: Parameters = {}
    for step in range(int(lanes.steps[0])):
        count = lanes.running(step)
        place, real = lanes.batch_at(step, count)
        index = offset[:count] + place
        weight = real.float() / real.sum(dim=1, keepdim=True)

        def gradient_at(
            point: Parameters,
            x: torch.Tensor = data.x[index],
            y: torch.Tensor = data.y[index],
            weight: torch.Tensor = weight,
        ) -> Parameters:
            part = {n: v.detach().requires_grad_() for n, v in point.items()}
            with torch.enable_grad():
                logits = forward(part, x)
            residual = _residual(logits.detach(), y, weight)
            return dict(
                zip(part, torch.autograd.grad(logits, list(part.values()), residual), strict=True)
            )

        now = {n: v[:count].clone() for n, v in parameters.items()}
        gradient = gradient_at(now)
        if before:
            before = {n: v[:count] for n, v in before.items()}
            earlier = gradient_at(before)
            moved = _norm({n: now[n] - before[n] for n in now})
            turned = _norm({n: gradient[n] - earlier[n] for n in now})
            last = eta[:count].clone()
            smooth = torch.where((turned > 0) & (moved > 0), moved / turned, torch.inf)
            eta[:count] = torch.minimum(smooth, torch.sqrt(1 + 0.1 * theta[:count]) * last)
            theta[:count] = eta[:count] / last
        for name, value in gradient.items():
            own = eta[:count].reshape(-1, *[1] * (value.ndim - 1))
            parameters[name][:count].sub_(own * value)
        before = now
    back = torch.from_numpy(np.argsort(lanes.rank))
    return {name: value[back] for name, value in parameters.items()}


def _norm(parts: Parameters) -> torch.Tensor:
    return torch.sqrt(sum((v.flatten(1) ** 2).sum(dim=1) for v in parts.values()))  # type: ignore[call-overload,no-any-return]


def fedex(
    task: ProxyTask, emulation: Emulation, settings: Sequence[dict[str, float]], rounds: int
) -> Outcome:
    """FedEx-like: clients draw a setting from a shared distribution that learns as they train.

    A fifth of every client's examples is kept back to score what it trained; the distribution over
    `settings` takes exponentiated-gradient steps (`exponentiated`) against the mean of the five
    last rounds (arXiv 2106.04502). One forward pass over the kept part a client and round, and no
    client trains on more than four fifths of its data. The paper wraps this in successive
    elimination over many starting points; here the caller gives the place to start from.
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
        advantage = weight * (np.asarray(losses) - baseline)
        theta, squares = exponentiated(theta, draws[chosen[id(own)]], advantage, squares)
        state = _aggregate(state, trained, runs, chosen, lanes)
        outcome.steps.append(int(lanes.steps.sum()))
        outcome.curve.append(100 * _accuracies(forward, state, runs)[0][1])
    outcome.state = {name: value[0] for name, value in state.items()}
    return outcome


def perturbed(
    setting: dict[str, float], count: int, seed: int, largest: int
) -> list[dict[str, float]]:
    """The setting and others near it: up to twice or half the rate, an epoch more or less."""
    rng = np.random.default_rng((seed, 6))
    near = [dict(setting)]
    for _ in range(count - 1):
        epochs = int(np.clip(setting["local-epochs"] + rng.integers(-1, 2), 1, largest))
        rate = setting["lr"] * float(np.exp(rng.uniform(-np.log(2), np.log(2))))
        near.append({"lr": rate, "local-epochs": epochs})
    return near


def exponentiated(
    theta: np.ndarray, drawn: np.ndarray, advantage: np.ndarray, squares: float
) -> tuple[np.ndarray, float]:
    """FedEx's step: theta times exp(-eta g), with eta = sqrt(2 log k / sum of |g|^2 so far).

    Args:
        theta: probabilities of k settings.
        drawn: which setting each client of the round had.
        advantage: each client's weighted loss over the baseline.
        squares: sum of the squared largest entries of g in earlier rounds.

    Returns:
        The new probabilities, none below 1e-4 before they are normalised, and the new sum.
    """
    slope = np.zeros(len(theta))
    np.add.at(slope, drawn, advantage / theta[drawn])
    squares += float(np.abs(slope).max() ** 2)
    if squares == 0:
        return theta, squares
    moved = theta * np.exp(-np.sqrt(2 * np.log(len(theta)) / squares) * slope)
    moved = np.maximum(moved / moved.sum(), 1e-4)
    return moved / moved.sum(), squares
