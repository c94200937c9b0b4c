"""Networks whose parameters are rows of a flat matrix, for `adam.train`.

Shape legend: M models, P parameters, B rows, D inputs, K outputs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "mse_loss": functional.mse_loss,
    "l1_loss": functional.l1_loss,
    "huber_loss": functional.huber_loss,
}


def loss_sums(loss: str, out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Returns (M,) weighted sums of the losses of outputs (M, B, K)."""
    if loss == "cross_entropy":
        rows = functional.cross_entropy(out.transpose(1, 2), y, reduction="none")
    else:
        rows = LOSSES[loss](out.reshape(y.shape), y, reduction="none")
    return (rows * weight).sum(dim=1)


class Perceptron:
    """Linear layers with ReLU between them; derivatives written out, matrices batched over models.

    Args:
        widths: D, the hidden widths, K.
        loss: "cross_entropy" or "mse_loss".
    """

    def __init__(self, widths: Sequence[int], loss: str) -> None:
        self.widths = tuple(widths)
        self.loss = loss
        self.shapes = list(zip(self.widths, self.widths[1:], strict=False))
        self.size = sum(i * o + o for i, o in self.shapes)

    def initial(self, seed: int) -> Tensor:
        """Returns (P,) parameters drawn as `torch.nn.Linear` draws them."""
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for inputs, outputs in self.shapes:
            bound = 1 / math.sqrt(inputs)
            for count in (inputs * outputs, outputs):
                parts.append(torch.empty(count).uniform_(-bound, bound, generator=generator))
        return torch.cat(parts)

    def layers(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns views: weights (M, inputs, outputs) and biases (M, 1, outputs) of each layer."""
        found = []
        at = 0
        for inputs, outputs in self.shapes:
            weight = flat[:, at : at + inputs * outputs].view(-1, inputs, outputs)
            at += inputs * outputs
            found.append((weight, flat[:, None, at : at + outputs]))
            at += outputs
        return found

    def forward(self, flat: Tensor, x: Tensor) -> Tensor:
        """Returns (M, B, K) outputs."""
        return self._run(flat, x)[-1]

    def _run(self, flat: Tensor, x: Tensor) -> list[Tensor]:
        kept = [x]
        layers = self.layers(flat)
        for at, (weight, bias) in enumerate(layers):
            z = torch.baddbmm(bias, kept[-1], weight)
            kept.append(z if at == len(layers) - 1 else z.relu_())
        return kept

    def gradient(self, flat: Tensor, x: Tensor, y: Tensor, weight: Tensor, seed: int) -> Tensor:
        """Returns (M, P) gradients of the weighted sum of losses."""
        kept = self._run(flat, x)
        out = kept[-1]
        if self.loss == "cross_entropy":
            delta = torch.softmax(out, dim=2)
            delta.scatter_add_(
                2, y[:, :, None], torch.full_like(y[:, :, None], -1.0, dtype=out.dtype)
            )
        else:
            delta = 2.0 * (out - y[:, :, None])
        delta *= weight[:, :, None]
        gradient = torch.empty_like(flat)
        views = self.layers(gradient)
        layers = self.layers(flat)
        for at in range(len(layers) - 1, -1, -1):
            views[at][0].copy_(torch.bmm(kept[at].transpose(1, 2), delta))
            views[at][1].copy_(delta.sum(dim=1, keepdim=True))
            if at:
                delta = torch.bmm(delta, layers[at][0].transpose(1, 2))
                delta *= kept[at] > 0
        return gradient

    def module(self, flat: Tensor) -> torch.nn.Sequential:
        """Returns one model (P,) as an ordinary module."""
        steps: list[torch.nn.Module] = []
        with torch.no_grad():
            for weight, bias in self.layers(flat[None]):
                if steps:
                    steps.append(torch.nn.ReLU())
                layer = torch.nn.Linear(weight.shape[1], weight.shape[2])
                layer.weight.copy_(weight[0].T)
                layer.bias.copy_(bias[0, 0])
                steps.append(layer)
        return torch.nn.Sequential(*steps)


class UserModule:
    """Any module without buffers, batched over models by `torch.func`.

    Args:
        make: returns a fresh module that maps (B, D) to (B, K).
        loss: a name in LOSSES.
    """

    def __init__(self, make: Callable[[], torch.nn.Module], loss: str) -> None:
        self.make = make
        self.loss = loss
        self.loss_of = LOSSES[loss]
        self.classes = loss == "cross_entropy"
        with torch.random.fork_rng(devices=[]):
            self.skeleton = make()
        self.names = [name for name, _ in self.skeleton.named_parameters()]
        self.shapes = [value.shape for value in self.skeleton.parameters()]
        self.size = sum(shape.numel() for shape in self.shapes)

    def initial(self, seed: int) -> Tensor:
        """Returns (P,) parameters of a module made under `torch.manual_seed(seed)`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = self.make()
        return torch.cat([value.detach().reshape(-1) for value in made.parameters()])

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns one model's (P,) parameters by name."""
        parts = torch.split(flat, [shape.numel() for shape in self.shapes])
        return {
            name: part.view(shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def _call(self, flat: Tensor, x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(self.skeleton, self._named(flat), (x,))
        return out

    def forward(self, flat: Tensor, x: Tensor) -> Tensor:
        """Returns (M, B, K) outputs, in evaluation mode."""
        self.skeleton.eval()
        out: Tensor = torch.vmap(self._call)(flat, x)
        return out if out.ndim == 3 else out[:, :, None]

    def gradient(self, flat: Tensor, x: Tensor, y: Tensor, weight: Tensor, seed: int) -> Tensor:
        """Returns (M, P) gradients of the weighted sum of losses, in training mode."""
        self.skeleton.train()

        def total(one: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            out = self._call(one, x)
            if not self.classes:
                out = out.reshape(y.shape)
            return (self.loss_of(out, y, reduction="none") * weight).sum()

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found: Any = torch.vmap(torch.func.grad(total), randomness="different")(
                flat, x, y, weight
            )
        return torch.as_tensor(found)

    def module(self, flat: Tensor) -> torch.nn.Module:
        """Returns one model (P,) as the user's module."""
        with torch.random.fork_rng(devices=[]):
            made = self.make()
        made.load_state_dict({name: value.clone() for name, value in self._named(flat).items()})
        return made.eval()
