"""Neural networks of every group: a perceptron, or the user's own module."""

from __future__ import annotations

import importlib
import numbers
from abc import abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kingpin_ray._errors import MissingDependencyError, ParameterError
from kingpin_ray._folds import hold_out
from kingpin_ray.models._base import Add, Fitted, GroupModel, Naming, Stack, check_flag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block

_DEVICES = ("cpu", "cuda", "auto")
_LOSSES = ("cross_entropy", "mse_loss", "l1_loss", "huber_loss")


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            "MLP and Torch need PyTorch: pip install 'kingpin-ray[torch]'"
        ) from error
    return torch


class _Network(GroupModel):
    """What MLP and Torch share: standardised columns, minibatch Adam over all groups at once."""

    loss: str
    lr: float
    weight_decay: float
    batch_size: int
    epochs: int
    early_stopping: bool
    validation_fraction: float
    n_iter_no_change: int
    device: str

    @property
    def classifier(self) -> bool:
        """Whether the loss is that of classes."""
        return self.loss == "cross_entropy"

    def cost(self, n_features: int) -> tuple[float, float]:
        """Returns a guess at one fit's seconds per row and per group."""
        weights = self._weights(n_features)
        return self.epochs * (1e-6 + 6e-10 * weights), 2e-4 + 1e-8 * weights * self.epochs

    def exchanges(
        self, counts: NDArray[np.int64], n_features: int, n_classes: int
    ) -> tuple[Any, Any]:
        """Returns a sum of gradients for each minibatch."""
        return self.epochs * -(-counts // self.batch_size), self._weights(n_features)

    def _weights(self, n_features: int) -> int:
        """Returns about how many parameters a network has."""
        return 10 * n_features

    def validate(self, params: Mapping[str, Any]) -> None:
        """Raises ParameterError when a value is not allowed."""
        name = type(self).__name__
        for key in ("batch_size", "epochs", "n_iter_no_change"):
            value = params[key]
            if not isinstance(value, numbers.Integral) or int(value) < 1:
                raise ParameterError(f"{name}({key}={value!r}): give a whole number of at least 1")
        for key, low in (("lr", 1e-30), ("weight_decay", 0.0)):
            value = params[key]
            if not isinstance(value, numbers.Real) or not float(value) >= low:
                raise ParameterError(f"{name}({key}={value!r}): give a number of at least {low}")
        check_flag(name, "early_stopping", params["early_stopping"])
        share = params["validation_fraction"]
        if not isinstance(share, numbers.Real) or not 0 < float(share) <= 0.5:
            raise ParameterError(f"{name}(validation_fraction={share!r}): give over 0, at most 0.5")
        if params["device"] not in _DEVICES:
            raise ParameterError(
                f"{name}(device={params['device']!r}): choose one of {', '.join(_DEVICES)}"
            )
        if params["device"] == "cuda" and not _torch().cuda.is_available():
            raise ParameterError(
                f"{name}(device='cuda'): PyTorch finds no GPU here; use 'cpu' or 'auto'"
            )
        if params["loss"] not in self._losses():
            raise ParameterError(
                f"{name}(loss={params['loss']!r}): choose one of {', '.join(self._losses())}"
            )
        if params["loss"] != self.loss:
            raise ParameterError(f"{name}: param_grid cannot change the loss {self.loss!r}")

    def _losses(self) -> tuple[str, ...]:
        return _LOSSES

    @abstractmethod
    def _net(self, params: Mapping[str, Any], n_features: int, n_outputs: int) -> Any:
        """Returns the network of a configuration."""

    def _shape_of(self, params: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns what two configurations must share to be trained in one batch."""
        stops = bool(params["early_stopping"])
        return (
            params["batch_size"],
            params["epochs"],
            tuple(params.get("hidden", ())),
            float(params["validation_fraction"]) if stops else 0.0,
            params["n_iter_no_change"] if stops else 0,
            params["device"],
        )

    def fit(self, block: Block, configs: Sequence[Mapping[str, Any]]) -> list[Fitted]:
        """Returns the networks of every group under each configuration."""
        return self.fit_split(block, configs, None)

    def fit_split(
        self, block: Block, configs: Sequence[Mapping[str, Any]], add: Add | None
    ) -> list[Fitted]:
        """As `fit`, where `block` holds only some rows of each group and `add` sums over all."""
        torch = _torch()
        from kingpin_ray._kernels import adam

        mine = self.get_params(deep=False)
        full = [{**mine, **config} for config in configs]
        mean, scale, counts = _standard(block, add)
        owner = block.group_of_row()
        x = ((block.X - mean[owner]) / scale[owner]).astype(np.float32)
        if self.classifier:
            target = torch.from_numpy(block.y.astype(np.int64))
        else:
            centre, spread = _target_scale(block, counts, add)
            target = ((block.y.astype(np.float64) - centre[owner]) / spread[owner]).astype("f4")
            target = torch.from_numpy(target)
        exchange = None if add is None else _on_tensors(torch, add)
        groups = block.n_groups
        results: list[Fitted | None] = [None] * len(full)
        families: dict[tuple[Any, ...], list[int]] = {}
        for c, params in enumerate(full):
            families.setdefault(self._shape_of(params), []).append(c)
        with torch.no_grad():
            for shape, members in families.items():
                share, patience, place = shape[-3:]
                first = full[members[0]]
                net = self._net(first, x.shape[1], max(block.n_classes, 1))
                times = len(members)
                held = hold_out(block, share, add)
                watch = adam.Watch(
                    np.repeat(held.middle, times),
                    np.repeat(block.offsets[1:] - held.middle, times),
                    np.repeat(held.watched, times),
                )
                plan = adam.Plan(
                    counts=np.repeat(held.trained, times),
                    begin=np.repeat(block.offsets[:-1], times),
                    first=np.repeat(held.first, times),
                    held=np.repeat(held.middle - block.offsets[:-1], times),
                    seeds=np.repeat((block.seeds >> np.uint64(2)).astype(np.int64), times),
                    lr=np.tile([float(full[c]["lr"]) for c in members], groups),
                    decay=np.tile([float(full[c]["weight_decay"]) for c in members], groups),
                    batch_size=int(first["batch_size"]),
                    epochs=int(first["epochs"]),
                    watch=watch if share else None,
                    patience=int(patience),
                )
                device = torch.device(_device(torch, place))
                rows = torch.from_numpy(x[held.order] if share else x).to(device)
                labels = (target[held.order] if share else target).to(device)
                flat = adam.train(net, rows, labels, plan, exchange).cpu().numpy()
                for k, c in enumerate(members):
                    stack: Stack = {
                        "flat": flat[k::times].copy(),
                        "mean": mean.astype(np.float32),
                        "scale": scale.astype(np.float32),
                    }
                    if self.classifier:
                        stack["seen"] = _seen(block, add)
                    else:
                        stack["target"] = np.stack([centre, spread], axis=1)
                    finite = np.isfinite(stack["flat"]).all(axis=1)
                    message = f"training diverged (lr={full[c]['lr']}); use a smaller lr"
                    failed = {int(g): message for g in np.flatnonzero(~finite)}
                    results[c] = Fitted(stack, failed)
        return [fitted for fitted in results if fitted is not None]

    def predict(
        self, stack: Stack, X: NDArray[np.floating], model: NDArray[np.int64], n_classes: int
    ) -> NDArray[np.float64]:
        """Returns (N,) values or (N, n_classes) probabilities."""
        torch = _torch()
        net = self._net(self.get_params(deep=False), X.shape[1], max(n_classes, 1))
        x = (X - stack["mean"][model]) / stack["scale"][model]
        out = np.empty((len(X), max(n_classes, 1)))
        order = np.argsort(model, kind="stable")
        ids, starts, counts = np.unique(model[order], return_index=True, return_counts=True)
        by_size = np.argsort(counts, kind="stable")
        piece = max(1, (8 << 20) // (4 * net.size))
        with torch.no_grad():
            for begin in range(0, len(ids), piece):
                at = by_size[begin : begin + piece]
                column = np.arange(counts[at].max())
                real = column < counts[at][:, None]
                rows = order[starts[at][:, None] + np.where(real, column, 0)]
                flat = torch.from_numpy(np.ascontiguousarray(stack["flat"][ids[at]]))
                found = net.forward(flat, torch.from_numpy(x[rows].astype(np.float32)))
                out[rows[real]] = found.numpy()[real]
        if not n_classes:
            centre, spread = stack["target"][model].T
            return np.asarray(out[:, 0] * spread + centre)
        out = np.where(stack["seen"][model], out, -np.inf)
        out -= out.max(axis=1, keepdims=True)
        np.exp(out, out=out)
        out /= out.sum(axis=1, keepdims=True)
        return out

    def export(self, stack: Stack, at: int, naming: Naming, config: Mapping[str, Any]) -> Any:
        """Returns a `torch.nn.Sequential` of standardisation, network and the target's scale.

        It maps float32 rows (N, D) to class scores (N, K), or to values (N, 1).
        """
        torch = _torch()
        params = {**self.get_params(deep=False), **config}
        classes = 1 if naming.classes is None else len(naming.classes)
        net = self._net(params, stack["mean"].shape[1], classes)
        flat = torch.from_numpy(stack["flat"][at].copy())
        steps = [_affine(torch, -stack["mean"][at] / stack["scale"][at], 1 / stack["scale"][at])]
        steps.append(net.module(flat))
        if naming.classes is None:
            centre, spread = stack["target"][at]
            steps.append(_affine(torch, np.array([centre]), np.array([spread])))
        return torch.nn.Sequential(*steps)


class MLP(_Network):
    """Perceptrons trained by Adam, all groups and settings at once, in steps equal to one alone.

    Columns (and a regression target) are standardised within each group first.

    Args:
        hidden: widths of the hidden layers, ReLU after each.
        lr: learning rate; settings may differ, each model keeps its own.
        batch_size: rows of a minibatch.
        epochs: passes over a group's rows.
        weight_decay: as of `torch.optim.Adam`.
        early_stopping: whether a part of each group's rows is held out, and training ends when
            their loss has not fallen for a while; the parameters of the lowest loss are kept.
        validation_fraction: that part.
        n_iter_no_change: that while, in epochs.
        device: "cpu", "cuda", or "auto" for a GPU where there is one.
        loss: "cross_entropy" for classes, "mse_loss" for values.
    """

    name: ClassVar[str] = "mlp"
    threads: ClassVar[bool] = True

    def __init__(
        self,
        hidden: Sequence[int] = (64, 64),
        lr: float = 1e-3,
        batch_size: int = 64,
        epochs: int = 10,
        *,
        weight_decay: float = 0.0,
        loss: str = "cross_entropy",
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        device: str = "cpu",
    ) -> None:
        self.hidden = hidden
        self.lr = lr
        self.batch_size = batch_size
        self.epochs = epochs
        self.weight_decay = weight_decay
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.device = device
        self.loss = loss

    def _losses(self) -> tuple[str, ...]:
        return ("cross_entropy", "mse_loss")

    def validate(self, params: Mapping[str, Any]) -> None:
        """Raises ParameterError when a value is not allowed."""
        super().validate(params)
        widths = params["hidden"]
        good = isinstance(widths, (list, tuple)) and all(
            isinstance(width, numbers.Integral) and int(width) >= 1 for width in widths
        )
        if not good or tuple(widths) != tuple(self.hidden):
            raise ParameterError(
                f"MLP(hidden={widths!r}): give widths such as (64, 64); a grid cannot change them, "
                "as one store holds networks of one shape"
            )

    def _weights(self, n_features: int) -> int:
        widths = (n_features, *self.hidden, 2)
        return sum(i * o + o for i, o in pairwise(widths))

    def _net(self, params: Mapping[str, Any], n_features: int, n_outputs: int) -> Any:
        from kingpin_ray._kernels.networks import Perceptron

        return Perceptron((n_features, *params["hidden"], n_outputs), self.loss)


class Torch(_Network):
    """The user's own module, batched over groups and settings by `torch.func`.

    Columns (and a regression target) are standardised within each group first.

    Args:
        module_fn: returns a fresh `torch.nn.Module` that maps (N, D) rows to (N, K) class scores or
            (N, 1) values, K the classes of the whole data; without buffers such as batch
            statistics. A store names it, so it must be importable there ("package.module:name"
            is taken as well).
        loss: "cross_entropy" for classes; "mse_loss", "l1_loss" or "huber_loss" for values.
        lr: learning rate.
        batch_size: rows of a minibatch.
        epochs: passes over a group's rows.
        weight_decay: as of `torch.optim.Adam`.
        early_stopping: whether a part of each group's rows is held out, and training ends when
            their loss has not fallen for a while; the parameters of the lowest loss are kept.
        validation_fraction: that part.
        n_iter_no_change: that while, in epochs.
        device: "cpu", "cuda", or "auto" for a GPU where there is one.
    """

    name: ClassVar[str] = "torch"

    def __init__(
        self,
        module_fn: Callable[[], Any] | str,
        loss: str = "cross_entropy",
        lr: float = 1e-3,
        batch_size: int = 64,
        epochs: int = 10,
        *,
        weight_decay: float = 0.0,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        device: str = "cpu",
    ) -> None:
        self.module_fn = module_fn
        self.loss = loss
        self.lr = lr
        self.batch_size = batch_size
        self.epochs = epochs
        self.weight_decay = weight_decay
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.device = device

    def validate(self, params: Mapping[str, Any]) -> None:
        """Raises ParameterError when a value is not allowed."""
        super().validate(params)
        if params["module_fn"] is not self.module_fn:
            raise ParameterError("Torch: param_grid cannot change module_fn")
        make = self._make()
        if not callable(make):
            raise ParameterError(
                f"Torch(module_fn={make!r}): give a function that returns a torch module"
            )
        try:
            module = make()
        except Exception as error:
            raise ParameterError(
                f"Torch(module_fn): it raised {type(error).__name__}: {error}; it must return a "
                "fresh module when called without arguments"
            ) from error
        if not isinstance(module, _torch().nn.Module):
            raise ParameterError(f"Torch(module_fn): it made {module!r}, which is no torch module")
        if any(True for _ in module.buffers()):
            raise ParameterError(
                "Torch(module_fn): the module has buffers (batch statistics?), which cannot be "
                "batched over groups; use LayerNorm or GroupNorm instead of BatchNorm"
            )

    def _make(self) -> Callable[[], Any]:
        made = self.module_fn
        if not isinstance(made, str):
            return made
        module, _, attribute = made.partition(":")
        try:
            found: Callable[[], Any] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ParameterError(
                f"Torch(module_fn={made!r}): cannot be imported ({error}); "
                'name a function as "package.module:name"'
            ) from error
        return found

    def _weights(self, n_features: int) -> int:
        return sum(value.numel() for value in self._make()().parameters())

    def _net(self, params: Mapping[str, Any], n_features: int, n_outputs: int) -> Any:
        from kingpin_ray._kernels.networks import UserModule

        return UserModule(self._make(), self.loss)


def _device(torch: Any, wish: str) -> str:
    if wish != "auto":
        return wish
    return "cuda" if torch.cuda.is_available() else "cpu"


def _on_tensors(torch: Any, add: Add) -> Callable[[Any], None]:
    """Returns a function that sums a tensor over all workers in place, on its own device."""
    direct: Callable[[Any], None] | None = getattr(add, "tensor", None)
    if direct is not None:
        return direct

    def exchange(tensor: Any) -> None:
        tensor.copy_(torch.from_numpy(add(tensor.cpu().numpy())))

    return exchange


def _standard(
    block: Block, add: Add | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Returns each group's means and scales (G, D) and rows (G,), over all workers."""
    add = add or (lambda values: values)
    counts = add(block.counts.astype(np.float64))
    n = np.maximum(counts, 1)[:, None]
    mean = add(_group_sums(block.X, block)) / n
    owner = block.group_of_row()
    centred = block.X - mean[owner]
    scale = np.sqrt(add(_group_sums(centred**2, block)) / n)
    scale[scale <= 1e-12 * np.maximum(np.abs(mean), 1e-300)] = 1.0
    return mean, scale, counts.astype(np.int64)


def _target_scale(
    block: Block, counts: NDArray[np.int64], add: Add | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    add = add or (lambda values: values)
    n = np.maximum(counts, 1)
    y = block.y.astype(np.float64)[:, None]
    centre = add(_group_sums(y, block))[:, 0] / n
    owner = block.group_of_row()
    spread = np.sqrt(add(_group_sums((y - centre[owner][:, None]) ** 2, block))[:, 0] / n)
    return centre, np.where(spread > 0, spread, 1.0)


def _group_sums(values: NDArray[np.floating], block: Block) -> NDArray[np.float64]:
    sums = np.zeros((block.n_groups, values.shape[1]))
    filled = np.flatnonzero(block.counts)
    if len(filled):
        starts = block.offsets[:-1][filled]
        sums[filled] = np.add.reduceat(values, starts, axis=0, dtype=np.float64)
    return sums


def _seen(block: Block, add: Add | None) -> NDArray[np.bool_]:
    held = block.class_counts().astype(np.float64)
    return np.asarray((held if add is None else add(held)) > 0)


def _affine(torch: Any, shift: NDArray[Any], scale: NDArray[Any]) -> Any:
    """Returns a linear layer that multiplies each column by `scale` and adds `shift`."""
    layer = torch.nn.Linear(len(scale), len(scale))
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.from_numpy(np.asarray(scale, np.float32))))
        layer.bias.copy_(torch.from_numpy(np.asarray(shift, np.float32)))
    return layer
