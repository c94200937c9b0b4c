"""What a codec is: sizes, compress and expand for a tensor; encode and decode for a batch.

A third party may subclass :class:`Codec` and write two functions of plain torch; what
:func:`hipress_torch.codec` makes is a subclass that brings kernels.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

FIELDS = 6


@dataclass(frozen=True)
class Segment:
    """A range of one parameter that is encoded as a unit.

    Attributes:
        grad: where its elements start in the gradient buffer.
        residual: where they start in the residual buffer.
        count: how many there are.
        wire: where its bytes start in the message buffer; a multiple of 16.
        parameter: the parameter's key, from its name; selects its random numbers.
        position: where the range starts within the parameter.
    """

    grad: int
    residual: int
    count: int
    wire: int
    parameter: int
    position: int


@dataclass(frozen=True)
class Batch:
    """Segments that are encoded or decoded in one call."""

    segments: tuple[Segment, ...]

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """The segments as an (S, 6) array, which the kernels read."""
        rows = [
            (s.grad, s.residual, s.count, s.wire, s.parameter, s.position) for s in self.segments
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, FIELDS)

    @cached_property
    def count(self) -> int:
        """The number of elements."""
        return sum(s.count for s in self.segments)

    def only(self, keep: Sequence[bool]) -> "Batch":
        """Returns the batch of the segments that are to be kept."""
        return Batch(tuple(s for s, k in zip(self.segments, keep, strict=True) if k))


@dataclass(frozen=True)
class Draw:
    """Where one segment's random numbers come from: a stream, a parameter, a first position."""

    stream: int
    parameter: int
    position: int


class Codec(abc.ABC):
    """A compression algorithm with its options fixed.

    Attributes:
        name: what :func:`hipress_torch.codecs.get` finds it under.
        feedback: whether what an encode loses is kept and added to the next gradient by default.
        granularity: ranges are cut at multiples of this many elements of a parameter, so that what
            is sent does not depend on how DDP fills its buckets.
        atomic: whether a segment is coded as a whole, so that one bad value keeps all of it back.
        momentum: if not 0, velocities are sent in place of gradients, and kept by the state.
        clip: if not 0, the norm a parameter's gradient is limited to before that, times the square
            root of the number of ranks.
        options: the options it was made with, plain values.
    """

    name: str
    feedback: bool = False
    granularity: int = 4096
    atomic: bool = False
    momentum: float = 0.0
    clip: float = 0.0
    options: Mapping[str, object] = {}

    @abc.abstractmethod
    def wire_bytes(self, count: int) -> int:
        """Returns the bytes that ``count`` elements take on the wire: a multiple of 16."""

    @abc.abstractmethod
    def compress(self, x_N: torch.Tensor, wire: torch.Tensor, draw: Draw) -> None:
        """Writes finite float32 elements into ``wire``, uint8 of ``wire_bytes(N)`` bytes."""

    @abc.abstractmethod
    def expand(self, wire: torch.Tensor, out_N: torch.Tensor) -> None:
        """Writes what ``wire`` stands for into ``out_N``, float32."""

    @property
    def backend(self) -> str:
        """What codes CPU tensors: ``torch``, or the instruction set of the C kernels."""
        return "torch"

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
        """Encodes ``grad * scale + residual + the sum of incoming messages`` for each segment.

        One function is the first hop (no incoming messages), the merge of a parameter server and a
        step of a ring. The residual becomes what the message lost.

        Args:
            batch: the segments.
            grad: float32 buffer that segments index; blocks that cannot be sent become NaN in it,
                which :meth:`undo` goes by.
            scale: factor on the gradient.
            residual: float32 buffer, updated in place, or None for no error feedback.
            incoming: messages (W, bytes), uint8, each laid out as ``wire`` is, or None.
            wire: uint8 buffer the messages are written to.
            stream: where random numbers come from.

        Returns:
            For each segment, int32: 0, or 1 when a value was not finite, or so large that what is
            sent or kept of it would not be. In the blocks where one was, the residual keeps its
            value, and the segment's bytes decode to nothing of use.
        """
        bad = torch.zeros(len(batch.segments), dtype=torch.int32)
        for i, s in enumerate(batch.segments):
            y_N = grad[s.grad : s.grad + s.count] * scale
            if residual is not None:
                y_N += residual[s.residual : s.residual + s.count]
            size = self.wire_bytes(s.count)
            decoded_N = torch.empty_like(y_N)
            for message in () if incoming is None else incoming:
                self.expand(message[s.wire : s.wire + size], decoded_N)
                y_N += decoded_N
            out = wire[s.wire : s.wire + size]
            usable = _finite_blocks(y_N, self._unit(s))
            if not bool(usable.all()):
                y_N = torch.where(usable, y_N, 0.0)
            self.compress(y_N, out, Draw(stream, s.parameter, s.position))
            self.expand(out, decoded_N)
            lost_N = y_N - decoded_N
            # Finite values may still overflow in a sum over a block, which would stay for good.
            result_N = decoded_N if residual is None else lost_N
            usable = usable & _finite_blocks(result_N, self._unit(s))
            if not bool(usable.all()):
                bad[i] = 1
                g_N = grad[s.grad : s.grad + s.count]
                g_N.copy_(torch.where(usable, g_N, torch.nan))
            if residual is not None:
                r_N = residual[s.residual : s.residual + s.count]
                r_N.copy_(torch.where(usable, lost_N, r_N))
        return bad

    def decode(self, batch: Batch, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Writes what the messages stand for into the float32 buffer that the segments index."""
        for s in batch.segments:
            size = self.wire_bytes(s.count)
            self.expand(wire[s.wire : s.wire + size], out[s.grad : s.grad + s.count])

    def undo(
        self,
        batch: Batch,
        grad: torch.Tensor,
        scale: float,
        residual: torch.Tensor,
        incoming: torch.Tensor | None,
        wire: torch.Tensor,
    ) -> None:
        """Gives the residual back what :meth:`encode` took, up to rounding.

        Used when the gradients of a step turn out to be unusable on another rank. The blocks that
        the encode left alone, and made NaN in ``grad``, are left alone here.
        """
        for s in batch.segments:
            size = self.wire_bytes(s.count)
            g_N = grad[s.grad : s.grad + s.count] * scale
            r_N = residual[s.residual : s.residual + s.count]
            sent_N = torch.empty_like(g_N)
            self.expand(wire[s.wire : s.wire + size], sent_N)
            before_N = r_N + sent_N - g_N
            for message in () if incoming is None else incoming:
                self.expand(message[s.wire : s.wire + size], sent_N)
                before_N -= sent_N
            usable = _finite_blocks(before_N, self._unit(s))
            r_N.copy_(torch.where(usable, before_N, r_N))

    def at(self, iteration: int) -> "Codec":
        """Returns the codec for an iteration: itself, or another one during a warm-up."""
        del iteration
        return self

    def clear_sent(self, batch: Batch, wire: torch.Tensor, velocity: torch.Tensor) -> None:
        """Clears the velocity of what was sent, if there is a momentum; does nothing here."""
        del batch, wire, velocity

    def _unit(self, segment: Segment) -> int:
        return max(1, segment.count) if self.atomic else self.granularity

    def fingerprint(self) -> str:
        """Returns a text that is equal on all ranks exactly when they use the same codec."""
        options = sorted(self.options.items())
        return f"{self.name}{options!r}/{self.granularity}/{self.wire_bytes(1000)}"

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        return f"{self.name}({options})"


def _finite_blocks(x_N: torch.Tensor, block: int) -> torch.Tensor:
    """Returns a mask that holds for all elements of the blocks whose elements are all finite."""
    finite = torch.isfinite(x_N)
    if bool(finite.all()):
        return finite
    blocks = -(-x_N.numel() // block)
    padded = torch.nn.functional.pad(finite, (0, blocks * block - x_N.numel()), value=True)
    whole = padded.view(blocks, block).all(1, keepdim=True).expand(blocks, block)
    return whole.reshape(-1)[: x_N.numel()]
