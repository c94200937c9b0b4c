"""DDP's buckets on their way into an exchange; small ones travel together.

A message costs a latency however little it carries, so buckets below a size wait for the next one.
The order of buckets and their sizes are the same on all ranks, and so is what is put together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hipress_torch._codec import Codec
from hipress_torch._layout import Placed

# A quarter of a megabyte: with the default sizes of DDP only its last bucket can be smaller.
TOGETHER_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Filled:
    """A bucket as DDP hands it over.

    Attributes:
        index: its place among the buckets.
        buffer: its gradients, which become their mean.
        placed: the parameters and where they lie in the buffer.
        future: to be completed with the buffer.
    """

    index: int
    buffer: torch.Tensor
    placed: tuple[Placed, ...]
    future: "torch.futures.Future[torch.Tensor]"

    @property
    def small(self) -> bool:
        """Whether it should wait for others; float64 keeps its format in a plain sum."""
        few = self.buffer.numel() < TOGETHER_ELEMENTS
        return few and not self.buffer.is_sparse and self.buffer.dtype != torch.float64


@dataclass(frozen=True)
class Bundle:
    """One bucket or several, exchanged as one.

    Attributes:
        buckets: the buckets.
        grad: their gradients: a bucket's own buffer, or a copy.
        placed: the parameters and where they lie in ``grad``.
    """

    buckets: tuple[Filled, ...]
    grad: torch.Tensor
    placed: tuple[Placed, ...]

    @property
    def index(self) -> int:
        """The place of the first bucket."""
        return self.buckets[0].index

    @property
    def futures(self) -> "tuple[torch.futures.Future[torch.Tensor], ...]":
        """The futures of the buckets."""
        return tuple(b.future for b in self.buckets)

    def finish(self) -> None:
        """Puts the mean where each bucket expects it and completes the futures."""
        if self.buckets[0].buffer is not self.grad:
            # As one they are flat; a single sparse bucket is never copied.
            sizes = [b.buffer.numel() for b in self.buckets]
            for bucket, mean in zip(self.buckets, torch.split(self.grad, sizes), strict=True):
                bucket.buffer.copy_(mean)
        for bucket in self.buckets:
            bucket.future.set_result(bucket.buffer)


def bundle(buckets: Sequence[Filled], as_float: bool) -> Bundle:
    """Returns buckets as one.

    Args:
        buckets: in their order.
        as_float: whether a single bucket of another dtype is converted to float32 too.
    """
    first = buckets[0]
    if len(buckets) == 1:
        grad = first.buffer.float() if as_float else first.buffer
        return Bundle(tuple(buckets), grad, first.placed)
    placed, start = [], 0
    for bucket in buckets:
        placed += [Placed(p.known, start + p.grad) for p in bucket.placed]
        start += bucket.buffer.numel()
    grad = torch.cat([b.buffer.float() for b in buckets])
    return Bundle(tuple(buckets), grad, tuple(placed))


def accelerate(made: Bundle, codec: Codec, velocity: torch.Tensor, ranks: int) -> None:
    """Replaces each gradient by its velocity, ``momentum * velocity + clipped gradient``."""
    limit = codec.clip / ranks**0.5
    for p in made.placed:
        g = made.grad[p.grad : p.grad + p.known.count]
        if not bool(torch.isfinite(g).all()):
            continue  # reported by the encode; the velocity keeps its value
        if limit:
            g.mul_((limit / g.norm()).clamp(max=1.0))
        v = velocity[p.known.residual : p.known.residual + p.known.count]
        v.mul_(codec.momentum).add_(g)
        g.copy_(v)


def pay(made: Bundle, residual: torch.Tensor, ranks: int) -> None:
    """Adds to gradients that are summed plainly what their parameters still owe."""
    for p in made.placed:
        r = residual[p.known.residual : p.known.residual + p.known.count]
        # Residuals are shares of the mean, gradients are not divided yet.
        made.grad[p.grad : p.grad + p.known.count].add_(r, alpha=ranks)
        r.zero_()
