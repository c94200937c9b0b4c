"""The metrics of one client, computed where its data lies.

`Accumulator` is the one piece of metric code: clients feed it batches from their loader, the
emulator feeds it virtual clients, so both see the same numbers.
"""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ._checks import check_whole
from ._errors import MetricsError
from ._metrics import allowed, label_entropy

if TYPE_CHECKING:
    import torch

_LABEL_KEYS = ("label", "labels", "y", "target", "targets")
_INPUT_KEYS = ("img", "image", "images", "x", "input", "inputs", "data", "features")


_NO_EXAMPLE = "the loader gave no example; a client without data has no profile"


class Accumulator:
    """Sums over batches from which the metrics follow; one forward pass, no backward pass.

    `gradient-norm` is the norm of the mean gradient of the loss with respect to the logits,
    `softmax(logits) - onehot(label)` averaged over examples: what would move the output biases.
    """

    def __init__(self, classes: int) -> None:
        self.counts_C = np.zeros(classes, dtype=np.int64)
        self.residual_C = np.zeros(classes)
        self.loss_sum = 0.0
        self.square_sum = 0.0
        self.square_count = 0
        self.with_model = False

    def add(self, x: "torch.Tensor", y: "torch.Tensor", logits_BC: "torch.Tensor | None") -> None:
        """Adds a batch; labels must be below the number of classes."""
        import torch

        classes = len(self.counts_C)
        y = y.detach().cpu().to(torch.int64).reshape(-1)
        if len(y) == 0:
            return
        if int(y.min()) < 0 or int(y.max()) >= classes:
            raise MetricsError(
                f"labels from {int(y.min())} to {int(y.max())}; expected 0 to {classes - 1}, "
                "the outputs of the model"
            )
        counts = torch.bincount(y, minlength=classes)
        self.counts_C += counts.numpy()
        if x.is_floating_point():
            self.square_sum += float((x.detach().to(torch.float64) ** 2).sum())
            self.square_count += x.numel()
        if logits_BC is not None:
            self.with_model = True
            log_p = torch.log_softmax(logits_BC.detach().cpu().to(torch.float64), dim=1)
            self.loss_sum += float(-log_p.gather(1, y[:, None]).sum())
            residual = log_p.exp().sum(dim=0) - counts.to(torch.float64)
            self.residual_C += residual.numpy()

    def metrics(self) -> dict[str, float]:
        """The allow-listed metrics, clipped and rounded.

        Raises:
            MetricsError: no example was added.
        """
        n = int(self.counts_C.sum())
        if n == 0:
            raise MetricsError(_NO_EXAMPLE)
        values = {"log-size": math.log(n), "label-entropy": label_entropy(self.counts_C)}
        if self.with_model:
            values["reference-loss"] = self.loss_sum / n
            values["gradient-norm"] = float(np.linalg.norm(self.residual_C / n))
        if self.square_count:
            root = math.sqrt(self.square_sum / self.square_count)
            values["feature-norm"] = math.log(max(root, 1e-6))
        return allowed(values)


def profile(
    loader: Iterable[Any],
    model: "torch.nn.Module | None" = None,
    *,
    classes: int | None = None,
    device: "torch.device | str | None" = None,
) -> dict[str, float]:
    """The metrics of the data in a loader, from one forward pass.

    Args:
        loader: yields `(x, y)` pairs, or mappings with an input under "img", "image", "x", ... and
            a label under "label", "labels", "y" or "target". y holds whole numbers from 0.
        model: the server's reference model, with its arrays loaded; None leaves out the two
            metrics that need one. It is put in evaluation mode and back.
        classes: number of labels; None takes the width of the model's output.
        device: where to run the model; None takes the device of its first parameter.

    Returns:
        At most the names of `fedtune_flwr.METRICS`, clipped and rounded as they may be sent.

    Raises:
        MetricsError: no example, unknown batch layout, labels that are not classes, or neither a
            model nor `classes`.
    """
    import torch

    if model is not None and not isinstance(model, torch.nn.Module):
        raise MetricsError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if classes is not None:
        check_whole("classes", classes, 1, MetricsError)
    if not isinstance(loader, Iterable):
        raise MetricsError(f"loader={loader!r} must yield batches of inputs and labels")
    if model is None and classes is None:
        raise MetricsError("profile(loader, model=None) needs classes=, the number of labels")
    if model is not None and device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    was_training = model.training if model is not None else False
    if model is not None:
        model.eval()
    accumulator = Accumulator(classes) if classes is not None else None
    try:
        with torch.no_grad():
            for batch in loader:
                x, y = _split(batch)
                if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
                    raise MetricsError(f"labels are {y.dtype}; metrics need class labels")
                logits = None
                if model is not None:
                    logits = model(x.to(device))
                    if logits.ndim != 2:
                        raise MetricsError(
                            f"model returned shape {tuple(logits.shape)}; expected (batch, classes)"
                        )
                if accumulator is None:
                    assert logits is not None
                    accumulator = Accumulator(logits.shape[1])
                accumulator.add(x, y, logits)
    finally:
        if model is not None:
            model.train(was_training)
    if accumulator is None:
        raise MetricsError(_NO_EXAMPLE)
    return accumulator.metrics()


def _split(batch: Any) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    if isinstance(batch, Mapping):
        x = next((batch[k] for k in _INPUT_KEYS if k in batch), None)
        y = next((batch[k] for k in _LABEL_KEYS if k in batch), None)
        if x is None or y is None:
            raise MetricsError(
                f"batch has keys {sorted(map(str, batch))}; expected an input under one of "
                f"{', '.join(_INPUT_KEYS)} and a label under one of {', '.join(_LABEL_KEYS)}"
            )
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        x, y = batch
    else:
        raise MetricsError(f"batch is a {type(batch).__name__}; expected (x, y) or a mapping")
    try:
        x, y = torch.as_tensor(x), torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MetricsError(
            f"batch holds {type(x).__name__} and {type(y).__name__}; expected tensors or arrays "
            f"of numbers ({error})"
        ) from error
    if x.ndim == 0 or y.ndim not in (1, 2) or len(x) != y.numel():
        raise MetricsError(
            f"batch has inputs of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)}; "
            "expected one label an input"
        )
    return x, y
