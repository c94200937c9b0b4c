"""The DDP communication hook, and the one line that registers it.

DDP reads the hook's annotations as objects: this module must not have them as texts (no
``from __future__ import annotations``), and the second parameter must be called ``bucket``.
"""

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from hipress_torch._codec import Codec
from hipress_torch._compll._algorithm import Algorithm
from hipress_torch._errors import RegistrationError
from hipress_torch._state import HiPressState


def hipress_hook(state: HiPressState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Returns the future of the bucket's mean over all ranks: the hook for ``register_comm_hook``.

    Raises:
        PeerError: another rank failed or did not answer in time.
        UnsupportedError: the gradients' dtype or device is not handled.
    """
    if not isinstance(bucket, GradBucket):
        raise RegistrationError(
            "the hook was called with something that is no DDP bucket; torch.compile with "
            "torch._dynamo.config.optimize_ddp='python_reducer' does that: use 'ddp_optimizer' "
            "(the default)"
        )
    return state.synchronize(bucket)


def register(
    ddp: DistributedDataParallel, codec: str | Algorithm | Codec = "onebit", **options: Any
) -> HiPressState:
    """Makes DDP exchange compressed gradients; returns the state.

    Every rank calls it with the same arguments, before the first backward pass.

    Args:
        ddp: the wrapped module.
        codec: a name from :func:`hipress_torch.codecs.available`, or a codec.
        options: those of :class:`HiPressState`, and those of the codec.

    Raises:
        RegistrationError: not a DDP module, or it has a communication hook already.
        CodecError: the codec or its options are wrong.
        MismatchError: ranks were given different arguments.
        UnsupportedError: the process group's backend is not handled.

    Example:
        >>> state = hipress_torch.register(ddp, codec="onebit")  # doctest: +SKIP
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise RegistrationError(
            f"ddp must be a torch.nn.parallel.DistributedDataParallel, got "
            f"{type(ddp).__name__}; wrap the "
            f"module first: ddp = DistributedDataParallel(module)"
        )
    group = options.pop("process_group", None) or ddp.process_group
    state = HiPressState(codec, process_group=group, **options)
    state.bind((n, p) for n, p in ddp.module.named_parameters() if p.requires_grad)
    state.start()
    try:
        ddp.register_comm_hook(state, hipress_hook)
    except (RuntimeError, TypeError, ValueError) as error:
        state.close()
        raise RegistrationError(
            f"DDP refused the hook ({str(error).splitlines()[0]}). A module takes one "
            f"communication hook, "
            f"and mixed_precision= takes that place; register once, on a fresh DDP module"
        ) from error
    return state
