"""Who owns which range of which parameter, and where it lies in the messages of a bucket.

Ownership is a function of the parameter alone (its size and its place in the model), never of the
bucket it happens to be in: what is sent is the same after DDP refills its buckets and after a
restart.

N ranks; a part is a bucket, or a slice of a large one, that is exchanged by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hipress_torch._codec import Batch, Codec, Segment
from hipress_torch._registry import Known
from hipress_torch._wire import HEADER_BYTES

STRIPE_BLOCKS = 64


@dataclass(frozen=True)
class Placed:
    """A parameter and where its gradient lies in the bucket."""

    known: Known
    grad: int


@dataclass(frozen=True)
class Range:
    """A range of a parameter with its owner, before it has a place in a message."""

    placed: Placed
    start: int
    count: int
    owner: int


@dataclass(frozen=True)
class Coded:
    """Segments that share a codec, in the three places they appear.

    Attributes:
        codec: the codec.
        send: what other ranks own, by place in the send buffer.
        own: what this rank owns, by place in its own message.
        gathered: everything, by place in the gathered buffer.
        send_owners: the owner of each segment of ``send``.
        gathered_owners: the owner of each segment of ``gathered``.
    """

    codec: Codec
    send: Batch
    own: Batch
    gathered: Batch
    send_owners: tuple[int, ...]
    gathered_owners: tuple[int, ...]
    _send_to: dict[int, Batch] = field(default_factory=dict, repr=False, compare=False)

    def send_to(self, owner: int) -> Batch:
        """Returns the segments of ``send`` that one rank owns."""
        if owner not in self._send_to:
            self._send_to[owner] = self.send.only([o == owner for o in self.send_owners])
        return self._send_to[owner]


@dataclass
class Part:
    """One exchange: its segments, and the buffers it uses in every iteration."""

    number: int
    count: int
    coded: tuple[Coded, ...]
    sizes: tuple[int, ...]
    rank: int
    send: torch.Tensor = field(repr=False)
    received: torch.Tensor = field(repr=False)
    own: torch.Tensor = field(repr=False)
    gathered: torch.Tensor = field(repr=False)

    @cached_property
    def ring(self) -> torch.Tensor:
        """A buffer like ``send`` for what arrives in a ring."""
        return torch.zeros_like(self.send)

    def message(self, buffer: torch.Tensor, owner: int) -> torch.Tensor:
        """Returns the message for an owner within ``send`` or a buffer like it."""
        start = sum(self.send_sizes[:owner])
        return buffer[start : start + self.send_sizes[owner]]

    @property
    def send_sizes(self) -> list[int]:
        """Bytes this rank sends to each rank; none to itself."""
        return [0 if r == self.rank else n for r, n in enumerate(self.sizes)]

    @property
    def receive_sizes(self) -> list[int]:
        """Bytes each rank sends to this one."""
        return [0 if r == self.rank else self.sizes[self.rank] for r in range(len(self.sizes))]

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank puts on the wire in one iteration, both hops."""
        return sum(self.send_sizes) + (len(self.sizes) - 1) * self.own.numel()

    @property
    def bytes_held(self) -> int:
        """Bytes of the buffers."""
        held = sum(b.numel() for b in (self.send, self.received, self.own, self.gathered))
        return held + (self.ring.numel() if "ring" in self.__dict__ else 0)


def ranges_of(placed: Placed, granularity: int, ranks: int) -> list[Range]:
    """Returns a parameter's ranges: stripes of whole blocks dealt out in turn.

    The first owner moves with the parameter's place in the model, so that small parameters do not
    all land on rank 0. A stripe has at most 64 blocks, so that slices of a large parameter are
    balanced.
    """
    count = placed.known.count
    blocks = -(-count // granularity)
    stripe = min(STRIPE_BLOCKS, max(1, -(-blocks // ranks))) * granularity
    ranges = []
    for i, start in enumerate(range(0, count, stripe)):
        owner = (i + placed.known.ordinal) % ranks
        ranges.append(Range(placed, start, min(stripe, count - start), owner))
    return ranges


def build_parts(
    placed: Sequence[Placed],
    codec: Codec,
    plain: Codec,
    min_elements: int,
    part_elements: int,
    ranks: int,
    rank: int,
    device: torch.device,
) -> list[Part]:
    """Returns the exchanges of a bucket.

    Args:
        placed: the bucket's parameters.
        codec: codes parameters of at least ``min_elements`` elements.
        plain: codes the others.
        min_elements: see above.
        part_elements: a bucket with more elements is cut into parts of about this many.
        ranks: how many ranks there are.
        rank: this one.
        device: where the buffers are.
    """
    ranges: list[list[tuple[Codec, Range]]] = [[]]
    filled = 0
    for p in placed:
        chosen = codec if p.known.count >= min_elements else plain
        for i, r in enumerate(ranges_of(p, chosen.granularity, ranks)):
            # Cut only after whole rounds of owners, so that every part is balanced.
            if filled >= part_elements and i % ranks == 0:
                ranges.append([])
                filled = 0
            ranges[-1].append((chosen, r))
            filled += r.count
    return [_part(i, r, (codec, plain), ranks, rank, device) for i, r in enumerate(ranges)]


def _part(
    number: int,
    ranges: Sequence[tuple[Codec, Range]],
    codecs: tuple[Codec, Codec],
    ranks: int,
    rank: int,
    device: torch.device,
) -> Part:
    sizes = [HEADER_BYTES] * ranks
    at: list[int] = []
    for codec, r in ranges:
        at.append(sizes[r.owner])
        sizes[r.owner] += codec.wire_bytes(r.count)
    starts = [0] * ranks
    for owner in range(1, ranks):
        starts[owner] = starts[owner - 1] + (0 if owner - 1 == rank else sizes[owner - 1])
    widest = max(sizes)
    coded = []
    for codec in dict.fromkeys(codecs):
        send, own, gathered = [], [], []
        for offset, (c, r) in zip(at, ranges, strict=True):
            if c is not codec:
                continue
            if r.owner == rank:
                own.append(_segment(r, offset))
            else:
                send.append((_segment(r, starts[r.owner] + offset), r.owner))
            gathered.append((_segment(r, r.owner * widest + offset), r.owner))
        if gathered:
            coded.append(
                Coded(
                    codec,
                    Batch(tuple(s for s, _ in send)),
                    Batch(tuple(own)),
                    Batch(tuple(s for s, _ in gathered)),
                    tuple(o for _, o in send),
                    tuple(o for _, o in gathered),
                )
            )
    return Part(
        number,
        sum(r.count for _, r in ranges),
        tuple(coded),
        tuple(sizes),
        rank,
        send=torch.zeros(sum(sizes) - sizes[rank], dtype=torch.uint8, device=device),
        received=torch.zeros(ranks - 1, sizes[rank], dtype=torch.uint8, device=device),
        own=torch.zeros(widest, dtype=torch.uint8, device=device),
        gathered=torch.zeros(ranks, widest, dtype=torch.uint8, device=device),
    )


def _segment(r: Range, wire: int) -> Segment:
    known = r.placed.known
    return Segment(
        grad=r.placed.grad + r.start,
        residual=known.residual + r.start,
        count=r.count,
        wire=wire,
        parameter=known.key,
        position=r.start,
    )
