"""Compressed reduce-scatter for FSDP2 (``fully_shard``) and FSDP1.

Sharded training needs the first hop alone: every rank sends the others their shards, encoded, and
adds up what it receives. The own shard is exact, so only what is sent has a residual. A sharded
module keeps the residual of its whole, unsharded gradient.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hipress_torch._checks import (
    check_arguments,
    check_state,
    saved_count,
    saved_mapping,
    saved_tensors,
)
from hipress_torch._codec import Batch, Codec, Segment
from hipress_torch._compll._algorithm import Algorithm
from hipress_torch._compll._hashing import stream_of
from hipress_torch._errors import RegistrationError, StateError, UnsupportedError
from hipress_torch._groups import guarded, require_group
from hipress_torch._making import make_codec
from hipress_torch._wire import HEADER_BYTES, NOT_FINITE, read_header, write_header

STATE_VERSION = 1


@dataclass
class _Unit:
    """One sharded module's exchange: its layout, buffers and residual."""

    name: str
    shard: int
    batches: list[Batch]
    size: int
    send: torch.Tensor
    received: torch.Tensor
    residual: torch.Tensor | None
    iteration: int = 0


@dataclass
class _Counts:
    bytes_sent: int = 0
    bytes_plain: int = 0
    calls: int = 0
    not_finite: int = 0
    units: dict[str, _Unit] = field(default_factory=dict)


class FSDPState:
    """Codec, residuals and counters of compressed reduce-scatter.

    :func:`apply_fsdp` makes one for FSDP2. For FSDP1 make it yourself and register it:
    ``fsdp.register_comm_hook(FSDPState("onebit"), fsdp1_hook)``.
    """

    def __init__(
        self,
        codec: str | Algorithm | Codec = "onebit",
        *,
        process_group: dist.ProcessGroup | None = None,
        error_feedback: bool | None = None,
        seed: int = 0,
        **codec_options: Any,
    ) -> None:
        """Checks the arguments; starts nothing.

        Args:
            codec: a name, or a codec; not one with a momentum.
            process_group: the group of an FSDP1 module; FSDP2 passes its own.
            error_feedback: whether what a message lost is added to the next gradient; None leaves
                it to the codec.
            seed: seed of the codec's random numbers; the same on all ranks.
            codec_options: options of the codec.

        Raises:
            CodecError: the codec or its options are wrong.
            PlanError: another argument is.
            UnsupportedError: the codec has a momentum.
        """
        check_arguments(process_group, error_feedback, seed)
        self.codec = make_codec(codec, codec_options)
        if self.codec.momentum:
            raise UnsupportedError(
                f"codec {self.codec.name!r} keeps velocities, which FSDP does not have yet; use "
                f"'graddrop', or 'dgc' with momentum=0"
            )
        self.error_feedback = self.codec.feedback if error_feedback is None else error_feedback
        self.seed = seed
        self._group = process_group
        self._checksum = zlib.crc32(self.codec.fingerprint().encode())
        self._counts = _Counts()
        self._loaded: dict[str, torch.Tensor] = {}
        self._loaded_iterations: dict[str, int] = {}
        self._calls_in_backward = 0

    def reduce_scatter(
        self,
        name: str,
        out_M: torch.Tensor,
        in_NM: torch.Tensor,
        group: dist.ProcessGroup,
        average: bool,
    ) -> None:
        """Writes this rank's shard of the sum or the mean of all ranks' gradients.

        Args:
            name: what identifies the module from one iteration to the next.
            out_M: the shard, M elements.
            in_NM: the padded gradient, one row of M for each of the N ranks, flat.
            group: the ranks.
            average: whether the sum is divided by N.

        Raises:
            UnsupportedError: the tensors are not on the CPU.
            PeerError: another rank failed or did not answer.
            WireError: a message is not the one expected.
        """
        if in_NM.device.type != "cpu":
            raise UnsupportedError(
                f"gradients on {in_NM.device} are not handled yet; FSDP on CPU tensors is"
            )
        ranks, rank, shard = group.size(), group.rank(), out_M.numel()
        unit = self._unit(name, shard, ranks, rank)
        scale = 1.0 / ranks if average else 1.0
        grad = in_NM.reshape(-1).to(torch.float32)
        sizes = [0 if r == rank else unit.size for r in range(ranks)]
        stream = stream_of(self.seed, unit.iteration, 0)
        others = [r for r in range(ranks) if r != rank]
        for place, owner in enumerate(others):
            message = unit.send[place * unit.size : (place + 1) * unit.size]
            bad = self.codec.encode(
                unit.batches[owner], grad, scale, unit.residual, None, message, stream
            )
            flags = NOT_FINITE if bool(bad.any()) else 0
            write_header(message[:HEADER_BYTES], flags, unit.iteration, 0, self._checksum)
        guarded(
            lambda: dist.all_to_all_single(
                unit.received.view(-1), unit.send, sizes, sizes, group=group
            ),
            f"{name}, reduce-scatter",
        )
        total = grad[rank * shard : (rank + 1) * shard] * scale
        part = torch.empty_like(total)
        for sender, message in zip(others, unit.received, strict=True):
            flags = read_header(message[:HEADER_BYTES], sender, unit.iteration, 0, self._checksum)
            if flags & NOT_FINITE:
                self._counts.not_finite += 1
                total.fill_(float("nan"))
            # The segments of a shard are the same whoever owns it; only their start differs.
            self.codec.decode(unit.batches[ranks], message, part)
            total += part
        out_M.copy_(total.view(out_M.shape))
        unit.iteration += 1
        self._counts.calls += 1
        self._counts.bytes_sent += len(others) * unit.size
        self._counts.bytes_plain += len(others) * shard * 4

    def _unit(self, name: str, shard: int, ranks: int, rank: int) -> _Unit:
        found = self._counts.units.get(name)
        if found is not None and found.shard == shard:
            return found
        step = 64 * self.codec.granularity
        key = zlib.crc32(name.encode())
        starts = range(0, shard, step)
        places, size = [], HEADER_BYTES
        for start in starts:
            places.append(size)
            size += self.codec.wire_bytes(min(step, shard - start))

        def batch(first: int) -> Batch:
            return Batch(
                tuple(
                    Segment(
                        first + start,
                        first + start,
                        min(step, shard - start),
                        place,
                        key,
                        first + start,
                    )
                    for start, place in zip(starts, places, strict=True)
                )
            )

        # One for each rank's row, and one at 0 to decode with.
        batches = [batch(owner * shard) for owner in range(ranks)] + [batch(0)]
        unit = _Unit(
            name,
            shard,
            batches,
            size,
            torch.zeros((ranks - 1) * size, dtype=torch.uint8),
            torch.zeros(ranks - 1, size, dtype=torch.uint8),
            torch.zeros(ranks * shard) if self.error_feedback else None,
        )
        saved = self._loaded.pop(name, None)
        if saved is not None and unit.residual is not None:
            if saved.numel() != unit.residual.numel():
                raise StateError(
                    f"residual of {name!r}: {saved.numel()} elements in the state dict, "
                    f"{unit.residual.numel()} here; load it with the same model and number of ranks"
                )
            unit.residual.copy_(saved)
        unit.iteration = int(self._loaded_iterations.pop(name, 0))
        self._counts.units[name] = unit
        return unit

    def metrics(self) -> dict[str, Any]:
        """Returns plain values: codec, backend, calls, bytes sent and plain, ratio, residuals."""
        c = self._counts
        return {
            "codec": repr(self.codec),
            "backend": self.codec.backend,
            "calls": c.calls,
            "bytes_sent": c.bytes_sent,
            "bytes_plain": c.bytes_plain,
            "ratio": c.bytes_plain / c.bytes_sent if c.bytes_sent else 1.0,
            "not_finite": c.not_finite,
            "residual_bytes": sum(
                u.residual.numel() * 4 for u in c.units.values() if u.residual is not None
            ),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's residuals, flat float32 tensors by module name, and the counters."""
        units = self._counts.units
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "iterations": {n: u.iteration for n, u in units.items()},
            "residuals": {
                n: u.residual.clone() for n, u in units.items() if u.residual is not None
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state_dict` left off; with the same model, ranks and seed.

        Raises:
            StateError: something is missing, of another version or another seed.
        """
        check_state(state, ("iterations", "residuals"), STATE_VERSION, self.seed)
        saved = saved_mapping(state["iterations"], "iterations")
        iterations = {n: saved_count(i, f"iterations of {n!r}") for n, i in saved.items()}
        residuals = saved_tensors(state["residuals"], "residuals")
        self._counts.units.clear()
        self._loaded = {n: r.detach().clone() for n, r in residuals.items()}
        self._loaded_iterations = iterations


class _ReduceScatter:
    """What FSDP2 calls in place of its reduce-scatter; has the methods its interface names."""

    def __init__(self, state: FSDPState, name: str) -> None:
        self._state = state
        self._name = name

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an uninitialized buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduces and scatters; done when it returns."""
        del async_op
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UnsupportedError(
                f"reduction {op!r} is not handled, only SUM and AVG; do not set a gradient "
                f"divide factor"
            )
        self._state.reduce_scatter(
            self._name, output_tensor, input_tensor, group, op == dist.ReduceOp.AVG
        )


def apply_fsdp(
    module: nn.Module, codec: str | Algorithm | Codec = "onebit", **options: Any
) -> FSDPState:
    """Makes every FSDP2 module under ``module`` reduce-scatter compressed gradients.

    Args:
        module: a module that ``torch.distributed.fsdp.fully_shard`` was applied to, or that holds
            some.
        codec: a name from :func:`hipress_torch.codecs.available`, or a codec.
        options: those of :class:`FSDPState`, and those of the codec.

    Returns:
        The state that all of them share.

    Raises:
        RegistrationError: there is no FSDP2 module, or one has several parameter groups.
        CodecError: the codec or its options are wrong.
    """
    from torch.distributed.fsdp import FSDPModule

    found = [(n, m) for n, m in module.named_modules() if isinstance(m, FSDPModule)]
    if not found:
        raise RegistrationError(
            f"module: no FSDP2 module in this {type(module).__name__}; apply "
            f"torch.distributed.fsdp.fully_shard first (for FSDP1 see fsdp1_hook)"
        )
    state = FSDPState(codec, **options)
    for name, sharded in found:
        try:
            sharded.set_custom_reduce_scatter(_ReduceScatter(state, name or "root"))  # type: ignore[arg-type]
        except ValueError as error:
            raise RegistrationError(f"module {name!r}: {error}") from error
    return state


def fsdp1_hook(state: FSDPState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Writes this rank's shard of the mean gradient: the hook for FSDP1's ``register_comm_hook``.

    Args:
        state: the state it was registered with.
        grad: the padded, unsharded gradient.
        output: the shard, written here.

    Raises:
        UnsupportedError: the module is not sharded (``NO_SHARD``).
        PeerError: another rank failed or did not answer.
    """
    if output is None:
        raise UnsupportedError(
            "FSDP1 with NO_SHARD has nothing to scatter; use DistributedDataParallel and register()"
        )
    if state._calls_in_backward == 0:
        # FSDP1 does not say which module a gradient is of: their order in a backward pass does.
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: setattr(state, "_calls_in_backward", 0)
        )
    name = f"unit{state._calls_in_backward}"
    state._calls_in_backward += 1
    group = require_group(state._group)
    state.reduce_scatter(name, output, grad, group, True)
