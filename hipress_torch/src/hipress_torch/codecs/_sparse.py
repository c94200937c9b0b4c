"""Sparse codecs: a small share of the largest elements, with their places.

A message of one segment: the number of pairs (int32), 12 bytes of nothing, then ``capacity`` int32
indices in rising order and ``capacity`` float32 values; what does not fit stays in the residual.
HiPress sends a byte length, indices and values, of whole tensors, and draws its sample at random.
"""

import ctypes
import functools
import math

import numpy as np
import numpy.typing as npt
import torch

from hipress_torch._codec import Batch, Codec, Draw
from hipress_torch._errors import CodecError
from hipress_torch._native import _loader
from hipress_torch.codecs import _sparse_triton

SAMPLE = 8192
OVERSAMPLE = 1.25


class GradDrop(Codec):
    """The largest elements of each range of a parameter; the rest waits in the residual."""

    name = "graddrop"
    feedback = True
    granularity = 4096
    atomic = True

    def __init__(self, *, ratio: float = 0.001) -> None:
        """Sets the share that is sent.

        Args:
            ratio: share of the elements, from 0 to 1; at least one of a range is sent.

        Raises:
            CodecError: ``ratio`` is not in (0, 1].
        """
        if isinstance(ratio, bool) or not isinstance(ratio, float | int) or not 0 < ratio <= 1:
            raise CodecError(f"codec {self.name!r}: ratio must be in (0, 1], got {ratio!r}")
        self.ratio = float(ratio)
        self.options = {"ratio": self.ratio}

    @property
    def backend(self) -> str:
        """What codes CPU tensors: an instruction set of the C kernels, or ``torch``."""
        found = _loader.shared("hp_sparse_encode")
        return "torch" if found is None else found[1]

    def capacity(self, count: int) -> int:
        """Returns how many of ``count`` elements a message can hold."""
        return max(1, math.ceil(self.ratio * count))

    def sample(self, count: int) -> tuple[int, int]:
        """Returns every how many elements one is looked at, and the threshold's rank in those."""
        stride = max(1, count // SAMPLE)
        looked_at = -(-count // stride)
        return stride, min(looked_at, max(1, int(looked_at * self.ratio * OVERSAMPLE)))

    def wire_bytes(self, count: int) -> int:
        """Returns the bytes of a message: 16, and 8 for each pair, padded to 16."""
        return -(-(16 + 8 * self.capacity(count)) // 16) * 16

    def compress(self, x_N: torch.Tensor, wire: torch.Tensor, draw: Draw) -> None:
        """Writes the pairs with plain torch operations."""
        del draw
        size_N = x_N.abs()
        stride, rank = self.sample(x_N.numel())
        sample = size_N[::stride]
        threshold = float(sample.topk(rank).values[-1])
        at = torch.nonzero((size_N >= threshold) & (size_N > 0)).view(-1)
        capacity = self.capacity(x_N.numel())
        if at.numel() > capacity:
            # Stable, so that of equal values the first ones are sent.
            order = size_N[at].argsort(descending=True, stable=True)
            at = at[order[:capacity]].sort().values
        pairs = at.numel()
        wire.zero_()
        head = torch.tensor([pairs], dtype=torch.int32, device=wire.device)
        wire[:4] = head.view(torch.uint8)
        wire[16 : 16 + 4 * pairs] = at.to(torch.int32).view(torch.uint8)
        first = 16 + 4 * capacity
        wire[first : first + 4 * pairs] = x_N[at].contiguous().view(torch.uint8)

    def expand(self, wire: torch.Tensor, out_N: torch.Tensor) -> None:
        """Writes the values at their places and zeros elsewhere."""
        out_N.zero_()
        at, values = self.pairs(wire, out_N.numel())
        out_N[at] = values

    def pairs(self, wire: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the indices, int64, and the values of the message of one segment."""
        capacity = self.capacity(count)
        number = int(wire[:4].clone().view(torch.int32))
        at = wire[16 : 16 + 4 * number].clone().view(torch.int32).long()
        first = 16 + 4 * capacity
        return at, wire[first : first + 4 * number].clone().view(torch.float32)

    def encode(
        self,
        batch: Batch,
        grad: torch.Tensor,
        scale: float,
        residual: torch.Tensor | None,
        incoming: torch.Tensor | None,
        wire: torch.Tensor,
        stream: int,
    ) -> torch.Tensor:
        """Encodes with the compiled kernel where there is one; see :meth:`Codec.encode`."""
        if grad.device.type == "cuda":
            return _sparse_triton.kernels().encode(
                batch, self.ranges(batch), grad, scale, residual, incoming, wire
            )
        found = _loader.shared("hp_sparse_encode") if grad.device.type == "cpu" else None
        if found is None:
            return super().encode(batch, grad, scale, residual, incoming, wire, stream)
        bad = torch.zeros(len(batch.segments), dtype=torch.int32)
        capacities = _capacities(batch, self.ratio)
        status = found[0](
            ctypes.c_void_p(grad.data_ptr()),
            None if residual is None else ctypes.c_void_p(residual.data_ptr()),
            ctypes.c_float(scale),
            None if incoming is None else ctypes.c_void_p(incoming.data_ptr()),
            ctypes.c_int64(0 if incoming is None else incoming.stride(0)),
            ctypes.c_int64(0 if incoming is None else incoming.shape[0]),
            ctypes.c_void_p(wire.data_ptr()),
            ctypes.c_void_p(batch.table.ctypes.data),
            ctypes.c_int64(len(batch.segments)),
            ctypes.c_void_p(capacities.ctypes.data),
            ctypes.c_double(self.ratio),
            ctypes.c_void_p(bad.data_ptr()),
        )
        if status:
            raise MemoryError("hipress_torch: no memory for the list of selected elements")
        return bad

    def decode(self, batch: Batch, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Decodes with the compiled kernel where there is one; see :meth:`Codec.decode`."""
        if out.device.type == "cuda":
            _sparse_triton.kernels().decode(batch, self.ranges(batch), wire, out)
            return
        found = _loader.shared("hp_sparse_decode") if out.device.type == "cpu" else None
        if found is None:
            super().decode(batch, wire, out)
            return
        found[0](
            ctypes.c_void_p(wire.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(batch.table.ctypes.data),
            ctypes.c_int64(len(batch.segments)),
            ctypes.c_void_p(_capacities(batch, self.ratio).ctypes.data),
        )

    def ranges(self, batch: Batch) -> tuple[_sparse_triton.Range, ...]:
        """Returns what the kernels need to know of each segment; the same object for a batch."""
        return _ranges(batch, self.ratio)


class DGC(GradDrop):
    """Deep gradient compression: the largest elements of a velocity, with momentum correction.

    Source: Lin et al., "Deep Gradient Compression", ICLR 2018: momentum correction (velocities are
    accumulated, not gradients), momentum factor masking (a velocity is cleared where it was sent),
    gradient clipping and a warm-up of the sparsity. Use it with an optimizer without momentum.
    Clipping is by parameter here, since a bucket does not know the other buckets' norms.
    """

    name = "dgc"

    def __init__(
        self, *, ratio: float = 0.001, momentum: float = 0.9, clip: float = 0.0, warmup: int = 0
    ) -> None:
        """Sets the options.

        Args:
            ratio: share of the elements that is sent.
            momentum: the optimizer's momentum, which moves in here; 0 turns the correction off.
            clip: norm of a parameter's gradient that is allowed, times the square root of the
                number of ranks; 0 turns clipping off.
            warmup: backward passes over which the share falls from 1/4 in steps of 1/4 to
                ``ratio``.

        Raises:
            CodecError: an option is out of its range.
        """
        super().__init__(ratio=ratio)
        for key, value, top in (("momentum", momentum, 1.0), ("clip", clip, math.inf)):
            if (
                isinstance(value, bool)
                or not isinstance(value, float | int)
                or not 0 <= value < top
            ):
                raise CodecError(f"codec 'dgc': {key} must be in [0, {top}), got {value!r}")
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
            raise CodecError(f"codec 'dgc': warmup must be a whole number from 0, got {warmup!r}")
        self.momentum = float(momentum)
        self.clip = float(clip)
        self.warmup = warmup
        self.options = {"ratio": ratio, "momentum": momentum, "clip": clip, "warmup": warmup}
        self._stages: dict[float, DGC] = {}

    def at(self, iteration: int) -> Codec:
        """Returns the codec with the share of this iteration."""
        if iteration >= self.warmup:
            return self
        shares = [0.25]
        while shares[-1] / 4 > self.ratio:
            shares.append(shares[-1] / 4)
        share = max(self.ratio, shares[iteration * len(shares) // self.warmup])
        if share not in self._stages:
            self._stages[share] = DGC(ratio=share, momentum=self.momentum, clip=self.clip)
        return self._stages[share]

    def clear_sent(self, batch: Batch, wire: torch.Tensor, velocity: torch.Tensor) -> None:
        """Clears the velocity of what was sent: what is late must not be accelerated too."""
        if velocity.device.type == "cuda":
            _sparse_triton.kernels().clear(batch, self.ranges(batch), wire, velocity)
            return
        for s in batch.segments:
            at, _ = self.pairs(wire[s.wire : s.wire + self.wire_bytes(s.count)], s.count)
            velocity[s.residual + at] = 0.0


@functools.lru_cache(maxsize=256)
def _capacities(batch: Batch, ratio: float) -> npt.NDArray[np.int64]:
    return np.array([max(1, math.ceil(ratio * s.count)) for s in batch.segments], dtype=np.int64)


@functools.lru_cache(maxsize=256)
def _ranges(batch: Batch, ratio: float) -> tuple[_sparse_triton.Range, ...]:
    codec = GradDrop(ratio=ratio)
    return tuple(
        _sparse_triton.Range(codec.capacity(s.count), *codec.sample(s.count))
        for s in batch.segments
    )
