"""Process groups of our own, and the few collectives that are used.

Each hop has a group to itself and is issued from one thread in bucket order: the order of
collectives on a group must be the same on all ranks, and on gloo a collective issued from a
future's callback follows local timing instead.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hipress_torch._errors import MismatchError, PeerError, PeerTimeoutError, UnsupportedError


def require_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group, or the default one.

    Raises:
        UnsupportedError: torch.distributed is not initialized.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedError(
            "torch.distributed is not initialized; call "
            "torch.distributed.init_process_group(...) first"
        )
    if group is not None:
        return group
    world = dist.group.WORLD
    assert world is not None
    return world


def new_like(
    group: dist.ProcessGroup, timeout_s: float | None, purpose: str, device: torch.device
) -> dist.ProcessGroup:
    """Returns a new group of the same ranks; every rank of ``group`` must call it.

    Raises:
        PeerError: another rank failed or did not come in time.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    whole = group is dist.group.WORLD
    with contextlib.nullcontext() if whole else _even_names(group, device):
        # Without local synchronization a subgroup's creation would wait for ranks outside of it.
        made = dist.new_group(
            ranks=None if whole else dist.get_process_group_ranks(group),
            timeout=timeout,
            backend=dist.get_backend(group),
            use_local_synchronization=not whole,
            group_desc=f"hipress_torch {purpose}",
        )
    assert isinstance(made, dist.ProcessGroup)
    return made


@contextlib.contextmanager
def _even_names(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """While it holds, ranks that were in fewer groups than others of this one have as many.

    torch (2.13 at least) names a locally synchronized group by its ranks and by how many groups the
    process has: without this, ranks that differ in that look for each other under different names.
    """
    names = dist.distributed_c10d._world.pg_names
    most = torch.tensor([len(names)], device=wire_device(group, device))
    guarded(lambda: dist.all_reduce(most, dist.ReduceOp.MAX, group=group), "start")
    fillers = []
    while len(names) < int(most):
        fillers.append(
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        )
    try:
        yield
    finally:
        for filler in fillers:
            dist.destroy_process_group(filler)


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Returns where the group's messages have to be: on the GPU for NCCL, else on the CPU."""
    return device if "nccl" in dist.get_backend(group) else torch.device("cpu")


def check_agreement(group: dist.ProcessGroup, settings: str, device: torch.device) -> None:
    """Returns when all ranks of the group have the same settings.

    Raises:
        MismatchError: they have not; names the ranks and both settings.
    """
    mine = torch.frombuffer(bytearray(settings.encode()), dtype=torch.uint8)
    length = torch.tensor([mine.numel()], device=device)
    sizes = [torch.zeros_like(length) for _ in range(group.size())]
    guarded(lambda: dist.all_gather(sizes, length, group=group), "start")
    widest = int(max(int(s) for s in sizes))
    padded = torch.zeros(widest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine.to(device)
    texts = [torch.zeros_like(padded) for _ in sizes]
    guarded(lambda: dist.all_gather(texts, padded, group=group), "start")
    for rank, (size, text) in enumerate(zip(sizes, texts, strict=True)):
        theirs = bytes(text[: int(size)].cpu().numpy()).decode()
        if theirs != settings:
            raise MismatchError(
                f"group rank {rank} was started with {theirs}, this one (group rank "
                f"{group.rank()}) with "
                f"{settings}; give register() the same arguments on all ranks"
            )


def guarded(call: Any, stage: str) -> Any:
    """Returns ``call()``; the backend's errors become ours.

    Raises:
        PeerTimeoutError: another rank did not answer in time.
        PeerError: another rank failed, or the backend did.
    """
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        if isinstance(error, PeerError):
            raise
        raise translate(error, stage) from error


def translate(error: BaseException, stage: str) -> PeerError:
    """Returns our error for one the communication backend raised."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "imed out" in text or "imeout" in text:
        return PeerTimeoutError(
            f"{stage}: another rank did not answer within the timeout ({text}). It may be "
            f"frozen, far behind or have another number of backward passes; raise timeout_s "
            f"if it is only slow, else "
            f"restart the job from its last checkpoint"
        )
    return PeerError(
        f"{stage}: the exchange with another rank failed ({text}). A process of the job has "
        f"most likely ended; look at its output and restart the job from its last checkpoint"
    )


def all_gather_flat(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Returns the work of an all-gather of equal messages into one buffer."""
    # torch 2.13 renamed all_gather_into_tensor and warns at the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out.view(-1), own, group=group, async_op=True)
