"""Minibatch Adam on many small networks at once, equal step by step to training each one alone.

Every model has its own shuffles, its own learning rate and its own number of steps. Models are
sorted by steps, so those still running are always a prefix of the arrays, and nothing is copied
when one finishes. The parameters of a model are one row of a flat matrix, the layers views of it:
one fused update serves all layers, and one exchange serves all models where rows are split.

Shape legend: M models, P parameters, N rows, B rows of a minibatch, D features, K outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kingpin_ray._kernels.networks import loss_sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8
# Adam touches parameters, gradient and two moments; this many bytes of them stay in the cache.
_MODEL_BYTES = 8 << 20


class Net(Protocol):
    """A network whose parameters are one flat vector."""

    size: int
    loss: str

    def initial(self, seed: int) -> Tensor:
        """Returns (P,) fresh parameters."""

    def forward(self, flat: Tensor, x: Tensor) -> Tensor:
        """Returns (M, B, K) outputs of (M, B, D) inputs under (M, P) parameters."""

    def gradient(self, flat: Tensor, x: Tensor, y: Tensor, weight: Tensor, seed: int) -> Tensor:
        """Returns (M, P) gradients of the weighted sum of the rows' losses."""


@dataclass(frozen=True)
class Watch:
    """Held-out rows of M models.

    Attributes:
        begin: (M,) where each model's held-out rows begin in X.
        held: (M,) how many of them are here.
        counts: (M,) how many there are, over all workers; 0 trains all epochs.
    """

    begin: NDArray[np.int64]
    held: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """How M models are trained.

    Attributes:
        counts: (M,) rows of each model, over all workers.
        begin: (M,) where each model's rows begin in X.
        first: (M,) how many of a model's rows are held by earlier workers.
        held: (M,) rows of each model that are here.
        seeds: (M,) seed of each model's start and shuffles.
        lr: (M,) learning rate.
        decay: (M,) weight decay (added to the gradient, as `torch.optim.Adam` does).
        batch_size: rows of a minibatch.
        epochs: passes over the rows, at most.
        watch: rows to watch for early stopping; None for none.
        patience: epochs without a lower watched loss after which a model stops.
    """

    counts: NDArray[np.int64]
    begin: NDArray[np.int64]
    first: NDArray[np.int64]
    held: NDArray[np.int64]
    seeds: NDArray[np.int64]
    lr: NDArray[np.float64]
    decay: NDArray[np.float64]
    batch_size: int
    epochs: int
    watch: Watch | None = None
    patience: int = 0


def shuffled(seed: int, epoch: int, count: int) -> Tensor:
    """Returns the order of a model's rows in an epoch, (count,) int64."""
    generator = torch.Generator().manual_seed((seed + 7919 * epoch) % (1 << 62))
    return torch.randperm(count, generator=generator)


def train(
    net: Net,
    X: Tensor,
    y: Tensor,
    plan: Plan,
    reduce: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Returns (M, P) trained parameters, on the device of X.

    Args:
        net: the network.
        X: (N, D) float32 rows, a model's own next to each other.
        y: (N,) int64 classes or float32 values.
        plan: what each model does.
        reduce: sums a tensor over all workers in place, where rows are split; None where whole.
    """
    models = len(plan.counts)
    result = torch.empty(models, net.size, device=X.device)
    steps = plan.epochs * -(-plan.counts // plan.batch_size)
    order = np.argsort(-steps, kind="stable")
    on_cpu = X.device.type == "cpu"
    piece = max(1, _MODEL_BYTES // (16 * net.size)) if reduce is None and on_cpu else models
    for start in range(0, models, piece):
        at = order[start : start + piece]
        found = _Piece(net, X, y, plan, at, reduce).run(steps[at])
        result[torch.from_numpy(at).to(X.device)] = found
    return result


class _Piece:
    """Models that are trained together, those with most steps first."""

    def __init__(
        self,
        net: Net,
        X: Tensor,
        y: Tensor,
        plan: Plan,
        at: NDArray[np.int64],
        reduce: Callable[[Tensor], None] | None,
    ) -> None:
        self.net, self.X, self.y, self.plan, self.reduce = net, X, y, plan, reduce
        self.flat = torch.stack([net.initial(int(plan.seeds[m])) for m in at]).to(X.device)
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.rate = torch.from_numpy(plan.lr[at].astype(np.float32))[:, None].to(X.device)
        self.decay = torch.from_numpy(plan.decay[at].astype(np.float32))[:, None].to(X.device)
        self.decays = bool((plan.decay[at] > 0).any())
        self.batches = _Minibatches(plan, at)
        self.model = at
        # Which row of the result and of the minibatches each model here has; some leave early.
        self.place = np.arange(len(at))
        self.per_epoch = -(-plan.counts[at] // plan.batch_size)
        self.result = self.flat.clone() if plan.watch is not None else self.flat
        self.lowest = np.full(len(at), np.inf)
        self.stale = np.zeros(len(at), np.int64)

    def run(self, steps: NDArray[np.int64]) -> Tensor:
        """Returns (M, P) parameters after `steps` (M,) steps, or of the lowest watched loss."""
        for t in range(int(steps.max(initial=0))):
            active = int(np.searchsorted(-steps[self.place], -t, side="left"))
            if not active:
                break
            self._step(t, active)
            if self.plan.watch is not None:
                self._watch(t, active)
        if self.plan.watch is not None:
            lost = torch.from_numpy(np.isinf(self.lowest)).to(self.X.device)
            self.result[lost] = torch.nan  # no epoch had a loss that is a number
        return self.result

    def _step(self, t: int, active: int) -> None:
        device = self.X.device
        rows, weight, sizes = (v.to(device) for v in self.batches.at(t, self.place[:active]))
        now = self.flat[:active]
        gradient = self.net.gradient(now, self.X[rows], self.y[rows], weight, t)
        if self.reduce is not None:
            self.reduce(gradient)
        gradient /= sizes[:, None]
        if self.decays:
            gradient += self.decay[:active] * now
        m, v = self.mean[:active], self.square[:active]
        m.lerp_(gradient, 1 - _BETA1)
        v.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        root = v.sqrt().div_((1 - _BETA2 ** (t + 1)) ** 0.5).add_(_EPS)
        now.sub_(torch.div(m, root).mul_(self.rate[:active] / (1 - _BETA1 ** (t + 1))))

    def _watch(self, t: int, active: int) -> None:
        """Looks at the held-out loss of models that end an epoch; those that stall leave."""
        watch = self.plan.watch
        assert watch is not None
        ends = np.flatnonzero((t + 1) % self.per_epoch[self.place[:active]] == 0)
        if not len(ends):
            return
        models = self.model[self.place[ends]]
        held = watch.held[models]
        column = np.arange(max(int(held.max()), 1))
        real = column < held[:, None]
        rows = torch.from_numpy(watch.begin[models][:, None] + np.where(real, column, 0))
        rows = rows.clamp_(max=len(self.X) - 1).to(self.X.device)
        weight = torch.from_numpy(real.astype(np.float32)).to(self.X.device)
        at = torch.from_numpy(ends).to(self.X.device)
        out = self.net.forward(self.flat[at], self.X[rows])
        sums = loss_sums(self.net.loss, out, self.y[rows], weight)
        if self.reduce is not None:
            self.reduce(sums)
        loss = sums.cpu().numpy().astype(np.float64)
        place = self.place[ends]
        # Without rows to watch, the last parameters count as the best.
        blind = watch.counts[models] == 0
        better = blind | (loss < self.lowest[place])
        self.lowest[place] = np.where(better, loss, self.lowest[place])
        self.stale[place] = np.where(better, 0, self.stale[place] + 1)
        chosen = torch.from_numpy(place[better]).to(self.X.device)
        self.result[chosen] = self.flat[at[torch.from_numpy(better).to(self.X.device)]]
        stalled = self.stale[self.place] >= self.plan.patience
        if stalled.any():
            kept = torch.from_numpy(np.flatnonzero(~stalled)).to(self.X.device)
            self.place = self.place[~stalled]
            for name in ("flat", "mean", "square", "rate", "decay"):
                setattr(self, name, getattr(self, name)[kept])


class _Minibatches:
    """The rows of every model's minibatch at a step, drawn for all steps at once."""

    def __init__(self, plan: Plan, at: NDArray[np.int64]) -> None:
        size = plan.batch_size
        per_epoch = -(-plan.counts[at] // size)
        length = int(per_epoch.max(initial=0)) * plan.epochs
        self.start = np.zeros((len(at), length), np.int64)
        self.count = np.zeros((len(at), length), np.int64)
        self.size = np.ones((len(at), length), np.float32)
        # Configurations of a group shuffle alike, so each group's rows are drawn once.
        drawn: dict[tuple[int, int], int] = {}
        rows: list[NDArray[np.int64]] = []
        total = 0
        for i, m in enumerate(at):
            steps = int(per_epoch[i]) * plan.epochs
            whole = np.full(int(per_epoch[i]), size)
            whole[-1] = plan.counts[m] - size * (len(whole) - 1)
            self.size[i, :steps] = np.tile(whole, plan.epochs)
            key = (int(plan.seeds[m]), int(plan.begin[m]))
            if key in drawn:
                other = drawn[key]
                self.start[i], self.count[i] = self.start[other], self.count[other]
                continue
            drawn[key] = i
            n = int(plan.counts[m])
            order = np.concatenate([shuffled(key[0], e, n).numpy() for e in range(plan.epochs)])
            step = np.repeat(np.arange(plan.epochs) * per_epoch[i], n)
            step += np.tile(np.arange(n) // size, plan.epochs)
            here = order - plan.first[m]
            if plan.held[m] < n:
                mine = (here >= 0) & (here < plan.held[m])
                here, step = here[mine], step[mine]
            counts = np.bincount(step, minlength=steps)
            self.count[i, :steps] = counts
            self.start[i, :steps] = total + np.cumsum(counts) - counts
            rows.append(here + plan.begin[m])
            total += len(here)
        self.rows = np.concatenate([*rows, np.zeros(1, np.int64)])

    def at(self, t: int, place: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns row numbers (M, B), their weight 1 or 0 (M, B), and minibatch sizes (M,)."""
        count = self.count[place, t]
        column = np.arange(max(int(count.max()), 1))
        real = column < count[:, None]
        rows = self.rows[self.start[place, t, None] + np.where(real, column, 0)]
        weight = torch.from_numpy(real.astype(np.float32))
        return torch.from_numpy(rows), weight, torch.from_numpy(self.size[place, t])
