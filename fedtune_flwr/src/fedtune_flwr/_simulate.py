"""Small federations trained in this process, to score candidate settings.

`simulate` is the reference: one client after another, through `train_fn` or the built-in local
training. `_batched.simulate_batched` does the built-in training of all clients and all candidates
at once and must agree with it.

A *run* is one candidate setting in one emulated federation.

Shapes: R runs, K clients, C classes.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ._metrics import NAMES
from ._policy import Policy
from ._space import Scalar
from ._task import ProxyTask, local_step_count

if TYPE_CHECKING:
    import torch

_SIZE = NAMES.index("log-size")


@dataclass(frozen=True)
class Emulation:
    """One emulated federation: virtual clients, a validation set, and every random choice.

    Attributes:
        x: inputs of each client, K tensors of shape (n_k, ...).
        y: int64 labels of each client, K tensors of shape (n_k,).
        metrics_KM: the metrics of the virtual clients, float64.
        x_val: validation inputs.
        y_val: validation labels.
        initial: parameters and buffers of the model before round 1.
        per_round: clients that train in a round.
        seed: fixes which clients train when and in which order they see their examples,
            the same for every candidate.
        x_own: examples of each client's own kind that it does not train on; empty where none
            were asked for.
        y_own: their labels.
    """

    x: "tuple[torch.Tensor, ...]"
    y: "tuple[torch.Tensor, ...]"
    metrics_KM: np.ndarray
    x_val: "torch.Tensor"
    y_val: "torch.Tensor"
    initial: "dict[str, torch.Tensor]"
    per_round: int
    seed: int
    x_own: "tuple[torch.Tensor, ...]" = ()
    y_own: "tuple[torch.Tensor, ...]" = ()

    @property
    def sizes(self) -> np.ndarray:
        """Examples of each client, int64."""
        return np.asarray([len(part) for part in self.y], dtype=np.int64)

    def chosen(self, server_round: int) -> np.ndarray:
        """The clients that train in a round, counted from 0."""
        rng = np.random.default_rng((self.seed, 1, server_round))
        return np.sort(rng.permutation(len(self.y))[: self.per_round])

    def order(self, server_round: int, client: int, epochs: int) -> np.ndarray:
        """The order of a client's examples in each epoch of a round, shape (epochs, n_k)."""
        rng = np.random.default_rng((self.seed, 2, server_round, client))
        # Keys are drawn epoch by epoch: more epochs leave the first ones as they were.
        return np.argsort(rng.random((epochs, len(self.y[client]))), axis=1)


@dataclass(frozen=True)
class Candidate:
    """One setting of an emulated federation.

    Attributes:
        values: hyperparameters of each client.
        log_weight_K: logarithm of each client's aggregation weight, up to a constant.
    """

    values: tuple[dict[str, Scalar], ...]
    log_weight_K: np.ndarray


def candidate(policy: Policy, emulation: Emulation) -> Candidate:
    """A policy applied to the virtual clients of an emulation."""
    columns = policy.coordinates_many(emulation.metrics_KM)
    clients = len(emulation.y)
    values = tuple(
        policy.space.values_at({name: float(column[k]) for name, column in columns.items()})
        for k in range(clients)
    )
    # The size that counts is the real client's, which a virtual client may be too small to hold.
    log_size = emulation.metrics_KM[:, _SIZE]
    log_weight = policy.weight_exponent * log_size + policy.log_weight_many(emulation.metrics_KM)
    return Candidate(values, log_weight)


def aggregation_weights(log_weight: np.ndarray) -> np.ndarray:
    """Weights that sum to 1."""
    weight = np.exp(log_weight - log_weight.max())
    return np.asarray(weight / weight.sum())


Run = tuple[Emulation, Candidate]


def simulate(
    task: ProxyTask, runs: Sequence[Run], rounds: int, scored: int | None = None
) -> np.ndarray:
    """Scores of each run after each of the last rounds, float64 of shape (R, scored).

    A model whose parameters stop being finite keeps its last finite ones for the round.

    Args:
        task: how to train and score.
        runs: what to train.
        rounds: how long.
        scored: rounds at the end after which models are scored; None scores after every one.
    """
    last = rounds if scored is None else scored
    scores = np.zeros((len(runs), last))
    model = task.model_fn()
    for r, run in enumerate(runs):
        for t, state in enumerate(_states(task, model, run, rounds)):
            if t >= rounds - last:
                model.load_state_dict(state)
                emulation = run[0]
                scores[r, t - rounds + last] = score(task, model, emulation.x_val, emulation.y_val)
    return scores


def final_state(task: ProxyTask, run: Run, rounds: int) -> "dict[str, torch.Tensor]":
    """The global model that a run ends in."""
    state = run[0].initial
    for state in _states(task, task.model_fn(), run, rounds):  # noqa: B007 - the last is wanted
        pass
    return state


def _states(
    task: ProxyTask, model: "torch.nn.Module", run: Run, rounds: int
) -> "Iterator[dict[str, torch.Tensor]]":
    """The global model after each round; `model` is written over."""
    import torch

    emulation, candidate = run
    state = {k: v.clone() for k, v in emulation.initial.items()}
    for t in range(rounds):
        chosen = emulation.chosen(t)
        weights = aggregation_weights(candidate.log_weight_K[chosen])
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in state.items()}
        for weight, client in zip(weights, chosen.tolist(), strict=True):
            model.load_state_dict(state)
            train_client(task, emulation, model, client, candidate.values[client], t)
            for key, value in model.state_dict().items():
                total[key] += float(weight) * value.to(torch.float64)
        if all(bool(torch.isfinite(v).all()) for v in total.values()):
            state = {k: v.to(state[k].dtype) for k, v in total.items()}
        yield state


def train_client(
    task: ProxyTask,
    emulation: Emulation,
    model: "torch.nn.Module",
    client: int,
    values: dict[str, Scalar],
    server_round: int,
) -> None:
    """Trains `model` in place as one client does in one round."""
    x, y = emulation.x[client], emulation.y[client]
    filled = task.filled(values)
    if task.train_fn is not None:
        seed = int(np.random.default_rng((emulation.seed, 3, server_round, client)).integers(2**31))
        task.train_fn(model, x, y, filled, seed)
        return
    numbers = {k: float(v) for k, v in filled.items()}
    batch = max(1, round(numbers["batch-size"]))
    steps = local_step_count(len(y), numbers["local-epochs"], numbers["local-steps"], batch)
    batches = -(-len(y) // batch)
    order = emulation.order(server_round, client, max(1, -(-steps // batches)))
    local_sgd(model, x, y, numbers, order, steps, task.label_count)


def local_sgd(
    model: "torch.nn.Module",
    x: "torch.Tensor",
    y: "torch.Tensor",
    values: dict[str, float],
    order: np.ndarray,
    steps: int,
    classes: int,
) -> None:
    """The built-in local training of one client, in place.

    Step t takes batch `t mod batches` of epoch `t div batches`; the last batch of an epoch may be
    short. With velocity v: `v = momentum * v + g`, `p = p - lr * v`, where g is the gradient plus
    `weight-decay * p` plus `proximal-mu * (p - p at the start)`.
    """
    import torch

    batch = max(1, round(values["batch-size"]))
    batches = -(-len(y) // batch)
    adjustment = values["logit-adjustment"] * log_frequency(y, classes)
    parameters = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    velocity = [torch.zeros_like(p) for p in parameters]
    model.train()
    for t in range(steps):
        rows = order[t // batches][(t % batches) * batch : (t % batches + 1) * batch]
        index = torch.from_numpy(np.ascontiguousarray(rows))
        logits = model(x[index]) + adjustment
        loss = torch.nn.functional.cross_entropy(logits, y[index])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, p0, v, g in zip(parameters, start, velocity, gradients, strict=True):
                step = g + values["weight-decay"] * p + values["proximal-mu"] * (p - p0)
                v.mul_(values["momentum"]).add_(step)
                p.sub_(values["lr"] * v)


def log_frequency(y: "torch.Tensor", classes: int) -> "torch.Tensor":
    """Logarithm of a client's label frequencies, a tenth of an example added to each class."""
    import torch

    counts = torch.bincount(y, minlength=classes).to(torch.float32) + 0.1
    return torch.log(counts / counts.sum())


def score(task: ProxyTask, model: "torch.nn.Module", x: "torch.Tensor", y: "torch.Tensor") -> float:
    """The task's score of a model on some examples; accuracy by default."""
    import torch

    model.eval()
    if task.eval_fn is not None:
        return float(task.eval_fn(copy.deepcopy(model), x, y))
    with torch.no_grad():
        correct = model(x).argmax(dim=1) == y
    return float(correct.to(torch.float64).mean())
