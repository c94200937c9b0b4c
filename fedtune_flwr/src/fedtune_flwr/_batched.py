"""The built-in local training of many clients under many candidate settings at once.

One *lane* is one client in one run. Parameters of all lanes are stacked along a leading dimension;
`torch.func.vmap` runs the forward pass of every lane together and one ordinary backward pass, from
the gradient of the losses with respect to the logits, gives every lane its own gradient. Lanes are
sorted by their number of steps, so that those still running are always the first so many.

Shapes: R runs, L lanes, A lanes still running, B examples of the largest batch, C classes.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ._simulate import Emulation, Run, aggregation_weights, log_frequency
from ._task import ProxyTask, local_step_count

if TYPE_CHECKING:
    import torch

    Parameters = dict[str, torch.Tensor]
    Forward = Callable[[Parameters, torch.Tensor], torch.Tensor]

# Lanes whose parameters and activations are held at once; bounds memory, not the result.
MAX_LANES = 1024


def can_batch(task: ProxyTask) -> bool:
    """Whether the task uses the built-in functions and a model that `vmap` can train.

    Running statistics (batch normalisation) are written in place during the forward pass, which
    `vmap` over parameters cannot do, so models with buffers take the plain path, as do frozen
    parameters.
    """
    if not task.built_in:
        return False
    model = task.model_fn()
    return not any(True for _ in model.buffers()) and all(
        p.requires_grad for p in model.parameters()
    )


def simulate_batched(
    task: ProxyTask, runs: Sequence[Run], rounds: int, scored: int | None = None
) -> np.ndarray:
    """The same scores as `simulate`, float64 of shape (R, scored), up to rounding."""
    last = rounds if scored is None else scored
    parts = []
    group: list[Run] = []
    for run in runs:
        if group and (len(group) + 1) * run[0].per_round > MAX_LANES:
            parts.append(_train_group(task, group, rounds, last)[0])
            group = []
        group.append(run)
    if group:
        parts.append(_train_group(task, group, rounds, last)[0])
    return np.concatenate(parts) if parts else np.zeros((0, last))


def final_states(task: ProxyTask, runs: Sequence[Run], rounds: int) -> "list[Parameters]":
    """The global model that each run ends in."""
    states: list[Parameters] = []
    size = max(1, MAX_LANES // runs[0][0].per_round)
    for first in range(0, len(runs), size):
        part = runs[first : first + size]
        _, state = _train_group(task, part, rounds, 0)
        states += [{name: value[r] for name, value in state.items()} for r in range(len(part))]
    return states


def lane_parameters(task: ProxyTask, runs: Sequence[Run]) -> "tuple[Forward, Parameters]":
    """The stacked forward function, and every client's parameters after one round of training.

    Lanes are in the order of runs, and within a run of its clients in that round.
    """
    import torch

    forward = _forward(task.model_fn())
    state = {name: torch.stack([e.initial[name] for e, _ in runs]) for name in runs[0][0].initial}
    chosen = {id(e): e.chosen(0).tolist() for e, _ in runs}
    data = _Data(task, runs)
    filled = [[_numbers(task, values) for values in c.values] for _, c in runs]
    return forward, _train_lanes(state, _Lanes(runs, filled, chosen, data, 0), data, forward)


def _train_group(
    task: ProxyTask, runs: Sequence[Run], rounds: int, last: int
) -> "tuple[np.ndarray, Parameters]":
    import torch

    model = task.model_fn()
    forward = _forward(model)
    names = [name for name, _ in model.named_parameters()]
    data = _Data(task, runs)
    state = {name: torch.stack([e.initial[name] for e, _ in runs]) for name in names}
    filled = [[_numbers(task, values) for values in c.values] for _, c in runs]
    scores = np.zeros((len(runs), last))
    for t in range(rounds):
        chosen = {id(e): e.chosen(t).tolist() for e, _ in runs}
        lanes = _Lanes(runs, filled, chosen, data, t)
        trained = _train_lanes(state, lanes, data, forward)
        state = _aggregate(state, trained, runs, chosen, lanes)
        if t >= rounds - last:
            for r, accuracy in _accuracies(forward, state, runs):
                scores[r, t - rounds + last] = accuracy
    return scores, state


def _numbers(task: ProxyTask, values: dict[str, bool | int | float | str]) -> dict[str, float]:
    return {name: float(value) for name, value in task.filled(values).items()}


def _forward(model: "torch.nn.Module") -> "Forward":
    """The model as a function of stacked parameters and stacked inputs."""
    from torch.func import functional_call, vmap

    model.train()
    layered = stacked_layers(model)
    if layered is not None:
        return layered

    def one(parameters: "Parameters", x: "torch.Tensor") -> "torch.Tensor":
        logits: torch.Tensor = functional_call(model, parameters, (x,))
        return logits

    stacked: Forward = vmap(one, randomness="different")
    return stacked


def stacked_layers(model: "torch.nn.Module") -> "Forward | None":
    """The same function for a plain chain of linear and element-wise layers; None for others.

    Written out in batched matrix products it spends about half of what `vmap` spends on a small
    network, where the calls cost more than the arithmetic.
    """
    import torch
    from torch import nn

    if type(model) is not nn.Sequential or model._forward_hooks or model._forward_pre_hooks:
        return None
    layers = list(model._modules.items())
    pointwise = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Identity)
    for _, layer in layers:
        if layer is None or layer._forward_hooks or layer._forward_pre_hooks:
            return None
        flat = type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
        if not (flat or type(layer) is nn.Linear or type(layer) in pointwise):
            return None
    if len({id(layer) for _, layer in layers}) < len(layers):
        return None  # a layer used twice has its parameters under its first name only

    def forward(parameters: "Parameters", x: "torch.Tensor") -> "torch.Tensor":
        for name, layer in layers:
            if type(layer) is nn.Linear:
                weight = parameters[f"{name}.weight"].transpose(1, 2)
                bias = parameters.get(f"{name}.bias")
                # Inputs of more dimensions are taken through as rows.
                rows = x.reshape(len(x), -1, x.shape[-1])
                if bias is None:
                    out = torch.bmm(rows, weight)
                else:
                    out = torch.baddbmm(bias[:, None], rows, weight)
                x = out.reshape(*x.shape[:-1], out.shape[-1])
            elif type(layer) is nn.Flatten:
                x = x.flatten(2)
            else:
                assert layer is not None
                x = layer(x)
        return x

    return forward


class _Data:
    """The examples of every client of every emulation, one after another."""

    def __init__(self, task: ProxyTask, runs: Sequence[Run]) -> None:
        import torch

        emulations = {id(e): e for e, _ in runs}.values()
        self.x = torch.cat([x for e in emulations for x in e.x])
        self.y = torch.cat([y for e in emulations for y in e.y])
        clients = [y for e in emulations for y in e.y]
        sizes = np.asarray([len(y) for y in clients])
        self.offset_K = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)[:-1]]))
        self.frequency_KC = torch.stack([log_frequency(y, task.label_count) for y in clients])
        self.first: dict[int, int] = {}
        for emulation in emulations:
            self.first[id(emulation)] = sum(
                len(other.y) for other in emulations if id(other) in self.first
            )


class _Lanes:
    """Settings and order of examples of every lane in one round, longest lanes first."""

    def __init__(
        self,
        runs: Sequence[Run],
        filled: list[list[dict[str, float]]],
        chosen: dict[int, list[int]],
        data: _Data,
        server_round: int,
    ) -> None:
        import torch

        lanes = [
            (r, emulation, client, filled[r][client])
            for r, (emulation, _) in enumerate(runs)
            for client in chosen[id(emulation)]
        ]
        sizes = np.asarray([len(e.y[k]) for _, e, k, _ in lanes])
        batch = np.asarray([max(1, round(s["batch-size"])) for _, _, _, s in lanes])
        steps = np.asarray(
            [
                local_step_count(int(n), s["local-epochs"], s["local-steps"], int(b))
                for n, b, (_, _, _, s) in zip(sizes, batch, lanes, strict=True)
            ]
        )
        batches = -(-sizes // batch)
        self.rank = np.argsort(-steps, kind="stable")
        self.steps = steps[self.rank]
        in_order = [lanes[i] for i in self.rank]
        self.runs = torch.tensor([r for r, _, _, _ in in_order])
        self.clients = torch.tensor([data.first[id(e)] + k for _, e, k, _ in in_order])
        self.sizes = torch.from_numpy(sizes[self.rank])[:, None]
        self.batch = torch.from_numpy(batch[self.rank])[:, None]
        self.batches = torch.from_numpy(batches[self.rank])[:, None]
        self.numbers = {
            name: torch.tensor([s[name] for _, _, _, s in in_order], dtype=torch.float32)
            for name in ("lr", "momentum", "weight-decay", "proximal-mu", "logit-adjustment")
        }
        # One order a client, as long as its longest lane needs.
        epochs = max(1, int((-(-steps // batches)).max()))
        rows: dict[tuple[int, int], int] = {}
        orders = []
        for _, emulation, client, _ in in_order:
            if (id(emulation), client) not in rows:
                rows[id(emulation), client] = len(rows)
                orders.append(emulation.order(server_round, client, epochs))
        self.order = torch.zeros(len(orders), epochs, int(sizes.max()), dtype=torch.int64)
        for i, order in enumerate(orders):
            self.order[i, :, : order.shape[1]] = torch.from_numpy(order)
        self.rows = torch.tensor([rows[id(e), k] for _, e, k, _ in in_order])[:, None]

    def running(self, step: int) -> int:
        """Lanes that take this step: the first so many."""
        return int(np.searchsorted(-self.steps, -step, side="left"))

    def batch_at(self, step: int, count: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Positions within each running client's examples, and which of them are real."""
        import torch

        slot = torch.arange(int(self.batch[:count].max()))
        batches, sizes = self.batches[:count], self.sizes[:count]
        place = (step % batches) * self.batch[:count] + slot
        real = (slot < self.batch[:count]) & (place < sizes)
        epoch = torch.div(step, batches, rounding_mode="floor")
        return self.order[self.rows[:count], epoch, torch.minimum(place, sizes - 1)], real


def _train_lanes(
    state: "Parameters", lanes: _Lanes, data: _Data, forward: "Forward"
) -> "Parameters":
    import torch

    start = {name: value[lanes.runs] for name, value in state.items()}
    parameters = {name: value.clone() for name, value in start.items()}
    numbers = lanes.numbers
    used = {name for name, value in numbers.items() if bool(value.any())}
    velocity = {n: torch.zeros_like(v) for n, v in start.items()} if "momentum" in used else {}
    adjustment = numbers["logit-adjustment"][:, None] * data.frequency_KC[lanes.clients]
    offset = data.offset_K[lanes.clients][:, None]
    scalars = {
        name: {k: v.reshape(-1, *[1] * (value.ndim - 1)) for k, v in numbers.items()}
        for name, value in start.items()
    }
    for step in range(int(lanes.steps[0])):
        count = lanes.running(step)
        place, real = lanes.batch_at(step, count)
        index = offset[:count] + place
        weight = real.to(torch.float32)
        weight /= weight.sum(dim=1, keepdim=True)
        part = {n: v[:count].detach().requires_grad_() for n, v in parameters.items()}
        with torch.enable_grad():
            logits = forward(part, data.x[index])
        residual = _residual(logits.detach() + adjustment[:count, None], data.y[index], weight)
        gradients = torch.autograd.grad(logits, list(part.values()), residual)
        for name, gradient in zip(part, gradients, strict=True):
            value = parameters[name][:count]
            own = scalars[name]
            update = gradient
            if "weight-decay" in used:
                update = update + own["weight-decay"][:count] * value
            if "proximal-mu" in used:
                update = update + own["proximal-mu"][:count] * (value - start[name][:count])
            if velocity:
                moving = velocity[name][:count]
                moving.mul_(own["momentum"][:count]).add_(update)
                update = moving
            value.sub_(own["lr"][:count] * update)
    back = torch.from_numpy(np.argsort(lanes.rank))
    return {name: value[back] for name, value in parameters.items()}


def _residual(
    logits_ABC: "torch.Tensor", y_AB: "torch.Tensor", weight_AB: "torch.Tensor"
) -> "torch.Tensor":
    """Gradient of the weighted cross-entropy with respect to the logits: softmax less one-hot.

    Written out with the classes first, where torch's softmax is five times as fast as over a short
    last dimension (measured for ten classes).
    """
    import torch

    classes = logits_ABC.shape[-1]
    residual_CN = torch.softmax(logits_ABC.reshape(-1, classes).t().contiguous(), dim=0)
    residual_CN[y_AB.flatten(), torch.arange(residual_CN.shape[1])] -= 1
    return (residual_CN * weight_AB.flatten()).t().reshape(logits_ABC.shape)


def _aggregate(
    state: "Parameters",
    trained: "Parameters",
    runs: Sequence[Run],
    chosen: dict[int, list[int]],
    lanes: _Lanes,
) -> "Parameters":
    """The weighted mean of each run's lanes; a run that is no longer finite stays as it was."""
    import torch

    weight_L = torch.from_numpy(
        np.concatenate([aggregation_weights(c.log_weight_K[chosen[id(e)]]) for e, c in runs])
    )
    run_L = torch.repeat_interleave(
        torch.arange(len(runs)), torch.tensor([len(chosen[id(e)]) for e, _ in runs])
    )
    mixed: Parameters = {}
    finite_R = torch.ones(len(runs), dtype=torch.bool)
    for name, value in trained.items():
        flat = value.reshape(len(run_L), -1).to(torch.float64) * weight_L[:, None]
        mean = torch.zeros(len(runs), flat.shape[1], dtype=torch.float64)
        mean.index_add_(0, run_L, flat)
        finite_R &= torch.isfinite(mean).all(dim=1)
        mixed[name] = mean.to(value.dtype).reshape(state[name].shape)
    return {
        name: torch.where(finite_R.reshape(-1, *[1] * (value.ndim - 1)), value, state[name])
        for name, value in mixed.items()
    }


def _accuracies(
    forward: "Forward", state: "Parameters", runs: Sequence[Run]
) -> list[tuple[int, float]]:
    """The accuracy of every run on its emulation's validation examples."""
    import torch

    by_emulation: dict[int, list[int]] = {}
    emulations: dict[int, Emulation] = {}
    for r, (emulation, _) in enumerate(runs):
        by_emulation.setdefault(id(emulation), []).append(r)
        emulations[id(emulation)] = emulation
    results: list[tuple[int, float]] = []
    with torch.no_grad():
        for key, rows in by_emulation.items():
            emulation = emulations[key]
            own = {name: value[rows] for name, value in state.items()}
            x = emulation.x_val.expand(len(rows), *emulation.x_val.shape)
            right = forward(own, x).argmax(dim=2) == emulation.y_val
            accuracy = right.to(torch.float64).mean(dim=1).tolist()
            results += list(zip(rows, accuracy, strict=True))
    return results
