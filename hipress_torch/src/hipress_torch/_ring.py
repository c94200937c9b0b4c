"""Reduce-scatter in a ring: a message goes round, and each rank adds its share to it.

The range that rank q owns starts at rank q + 1 and ends at q, which encodes the mean for all.
Every rank encodes every range once, as with a parameter server, so one residual is enough; a range
is encoded N - 1 times on its way, each time with feedback. Runs in the merge worker, on the second
hop's group, so that one thread issues everything there.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hipress_torch._compll._hashing import stream_of
from hipress_torch._groups import guarded
from hipress_torch._layout import Part
from hipress_torch._wire import HEADER_BYTES, NOT_FINITE, read_header, write_header


@dataclass(frozen=True)
class RingContext:
    """What a pass round the ring needs to know of the exchange it is for."""

    group: dist.ProcessGroup
    grad: torch.Tensor
    residual: torch.Tensor | None
    velocity: torch.Tensor | None
    iteration: int
    label: int
    checksum: int
    seed: int
    what: str


def pass_round(part: Part, context: RingContext) -> tuple[int, list[int]]:
    """Passes a part's messages round; the last one, of this rank's range, is in ``received``.

    Returns:
        The flags of that message, and the ranges this rank encoded, which an undo has to consider.

    Raises:
        PeerError: a neighbour failed or did not answer.
        WireError: a message is not the one expected.
    """
    ranks, rank = len(part.sizes), part.rank
    previous = (rank - 1) % ranks
    arriving = part.ring
    flags, encoded = 0, []
    for step in range(ranks - 1):
        leaving = (rank - 1 - step) % ranks
        message = part.message(part.send, leaving)
        if not flags:
            incoming = None if step == 0 else arriving.view(1, -1)
            if _encode(part, context, leaving, incoming, step):
                flags |= NOT_FINITE
            encoded.append(leaving)
        head = message[:HEADER_BYTES]
        write_header(head, flags, context.iteration, context.label, context.checksum)
        owner = (rank - 2 - step) % ranks
        last = step == ranks - 2
        target = part.received[0] if last else part.message(arriving, owner)
        guarded(
            lambda m=message, t=target: send_round(context.group, m, t), f"{context.what}, ring"
        )
        flags = read_header(
            target[:HEADER_BYTES], previous, context.iteration, context.label, context.checksum
        )
    return flags, encoded


def _encode(
    part: Part, context: RingContext, owner: int, incoming: torch.Tensor | None, step: int
) -> bool:
    stream = stream_of(context.seed, context.iteration, 2 + step)
    found = False
    for coded in part.coded:
        batch = coded.send_to(owner)
        bad = coded.codec.encode(
            batch,
            context.grad,
            1.0 / len(part.sizes),
            context.residual,
            incoming,
            part.send,
            stream,
        )
        if context.velocity is not None:
            coded.codec.clear_sent(batch, part.send, context.velocity)
        found |= bool(bad.any())
    return found


def send_round(group: dist.ProcessGroup, message: torch.Tensor, target: torch.Tensor) -> None:
    """Sends a message to the following rank while one from the previous rank arrives."""
    ranks, rank = group.size(), group.rank()
    # Both are under way before either is waited for: a ring of blocking sends would lock up.
    works = [
        dist.isend(message, group=group, group_dst=(rank + 1) % ranks),
        dist.irecv(target, group=group, group_src=(rank - 1) % ranks),
    ]
    for work in works:
        assert work is not None
        work.wait()
