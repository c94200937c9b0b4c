"""The proxy task: what the server needs to train a small federation of its own."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ._checks import check_whole
from ._errors import ProxyError
from ._space import Scalar, SearchSpace

if TYPE_CHECKING:
    import torch

ModelFn = Callable[[], "torch.nn.Module"]
TrainFn = Callable[
    ["torch.nn.Module", "torch.Tensor", "torch.Tensor", Mapping[str, Scalar], int], None
]
EvalFn = Callable[["torch.nn.Module", "torch.Tensor", "torch.Tensor"], float]

# What the built-in local training understands, with the value used where a space leaves it out.
BUILT_IN: dict[str, float] = {
    "lr": 0.1,
    "local-epochs": 1,
    "local-steps": 0,
    "batch-size": 32,
    "momentum": 0.0,
    "weight-decay": 0.0,
    "proximal-mu": 0.0,
    "logit-adjustment": 0.0,
}


@dataclass(frozen=True)
class ProxyTask:
    """Proxy data and the functions that train and score a model on it.

    Without `train_fn` the built-in one runs: SGD on cross-entropy that reads `lr`,
    `local-epochs` or `local-steps`, `batch-size`, `momentum`, `weight-decay`, `proximal-mu` and
    `logit-adjustment` (strength of the client's own log label frequencies added to its logits
    while it trains). It trains all emulated clients and all candidate settings at once.

    Attributes:
        model_fn: returns a fresh `torch.nn.Module` that maps a batch of inputs to logits.
        train_fn: `train_fn(model, x, y, hyperparameters, seed)` trains the model in place as one
            client would; None for the built-in one.
        eval_fn: `eval_fn(model, x, y)` returns a score, higher is better; None for accuracy.
        data: `(x, y)`: inputs, first dimension the examples, and int64 labels from 0.
        rounds: rounds of each emulated federation; None follows the run, 20 at most.
        defaults: hyperparameters that the clients use but the space does not tune.
        classes: number of labels; None takes the largest label of `data` plus one.

    Raises:
        ProxyError: data or a count is unusable, or a class has no example at all.
    """

    model_fn: ModelFn
    train_fn: TrainFn | None = None
    eval_fn: EvalFn | None = None
    data: Any = None
    rounds: int | None = None
    defaults: Mapping[str, Scalar] | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.model_fn):
            raise ProxyError(f"model_fn={self.model_fn!r} must be a function that returns a model")
        for name in ("train_fn", "eval_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ProxyError(f"{name}={getattr(self, name)!r} must be a function or None")
        for name in ("rounds", "classes"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1, ProxyError, ", or None")
        x, y = self._tensors()
        object.__setattr__(self, "data", (x, y))
        classes = int(y.max()) + 1 if self.classes is None else self.classes
        object.__setattr__(self, "classes", classes)
        if classes > len(y):
            # Counting would ask for as much memory as the largest label says.
            raise ProxyError(
                f"{len(y)} examples cannot have an example of each of {classes} classes; number "
                "the classes from 0 without gaps, or add examples"
            )
        counts = np.bincount(y.numpy(), minlength=classes)
        absent = np.flatnonzero(counts == 0).tolist()
        if absent:
            raise ProxyError(
                f"proxy data has no example of class {', '.join(map(str, absent))} "
                f"(of {classes}); a policy tuned on it would neglect them. Add examples, or "
                "number the classes that exist from 0 and set classes="
            )
        rare = np.flatnonzero(counts < 3).tolist()
        if rare:
            raise ProxyError(
                f"proxy data has fewer than 3 examples of class {', '.join(map(str, rare))}; "
                "reference, virtual clients and validation need one each"
            )

    def _tensors(self) -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

        if not isinstance(self.data, tuple | list) or len(self.data) != 2:
            raise ProxyError(
                f"data={type(self.data).__name__} must be a pair (x, y) of tensors or arrays"
            )
        try:
            x, y = (torch.as_tensor(part).detach().cpu().contiguous() for part in self.data)
        except (TypeError, ValueError, RuntimeError) as error:
            kinds = " and ".join(type(part).__name__ for part in self.data)
            raise ProxyError(
                f"data holds {kinds}; expected tensors or arrays of numbers ({error})"
            ) from error
        if x.ndim < 2 or y.ndim != 1 or len(x) != len(y):
            raise ProxyError(
                f"data has x of shape {tuple(x.shape)} and y of shape {tuple(y.shape)}; "
                "expected (examples, ...) and (examples,)"
            )
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise ProxyError(f"labels are {y.dtype}; expected whole numbers from 0")
        if len(y) == 0 or int(y.min()) < 0:
            raise ProxyError("labels must be whole numbers from 0, and there must be some")
        if self.classes is not None and int(y.max()) >= self.classes:
            raise ProxyError(f"label {int(y.max())} is not below classes={self.classes}")
        if x.is_floating_point():
            # Looked at as they will be used: a large double is infinite in single precision.
            x = x.to(torch.float32)
            if not bool(torch.isfinite(x).all()):
                raise ProxyError(
                    "data holds inputs that are NaN, infinite, or too large for float32; remove "
                    "or scale those examples"
                )
        return x, y.to(torch.int64)

    @property
    def built_in(self) -> bool:
        """Whether the built-in training and accuracy are used, which run batched."""
        return self.train_fn is None and self.eval_fn is None

    @property
    def label_count(self) -> int:
        """Number of classes."""
        assert self.classes is not None
        return self.classes

    def check_space(self, space: SearchSpace) -> None:
        """Refuses hyperparameters that the built-in training would silently ignore.

        Raises:
            ProxyError: a name is not one the built-in training reads.
        """
        names = [*space, *(self.defaults or {})]
        unknown = [name for name in names if name not in BUILT_IN]
        if self.train_fn is None and unknown:
            raise ProxyError(
                f"{', '.join(unknown)}: the built-in training does not read this; pass "
                f"train_fn= (it reads {', '.join(BUILT_IN)})"
            )

    def filled(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Values completed with `defaults` and, for the built-in training, with its own."""
        base: dict[str, Scalar] = dict(BUILT_IN) if self.train_fn is None else {}
        return {**base, **(self.defaults or {}), **values}


def local_step_count(size: int, epochs: float, steps: float, batch: float) -> int:
    """Steps of one client in one round: `steps` where above 0, else those of `epochs` passes."""
    if steps > 0:
        return round(steps)
    return math.ceil(epochs * math.ceil(size / max(1, round(batch))))
