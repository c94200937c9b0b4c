"""Launches the kernels of the sparse codecs on CUDA or ROCm tensors; nothing waits for the device.

A segment's threshold comes from a strided sample, as on the CPU. If more elements reach it than a
message can hold, the exact one is found in three passes over the bits of magnitudes, 11, 10 and 10
of them at a time.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hipress_torch._codec import Batch
from hipress_torch._errors import UnsupportedError

NAMES = ("add", "scatter", "histogram", "count", "head", "select", "zero")
CHUNK_FIELDS = ("grad", "residual", "work", "count", "segment", "first")
SEGMENT_FIELDS = ("work", "grad", "residual", "wire", "count", "capacity")
WORK, GRAD, RESIDUAL = 0, 1, 2
PASSES = ((20, 11), (10, 10), (0, 10))
CHUNK = 2048
MANY = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """What the selection in one segment goes by.

    Attributes:
        capacity: pairs that its message can hold.
        stride: every how many elements one is looked at for the threshold.
        rank: which of those, from 1, is the threshold.
    """

    capacity: int
    stride: int
    rank: int


@dataclass(frozen=True)
class Tables:
    """Where a batch's segments and their chunks lie, on the device.

    Attributes:
        chunks: (C, 6) as in ``CHUNK_FIELDS``.
        segments: (S, 6) as in ``SEGMENT_FIELDS``; ``wire`` in words of four bytes.
        firsts: (S,) each segment's first chunk.
        owners: (C,) each chunk's segment.
        capacities: (S,) pairs of a message, int32.
        samples: (S, M) places of the sample in the work buffer, padded with the first one.
        sampled: (S, M) whether a place is one.
        ranks: (S, 1) which of the sample, from 0, is the threshold.
        most: how many of the sample the lowest threshold needs.
        widest: the largest capacity.
        elements: of all segments.
    """

    chunks: torch.Tensor
    segments: torch.Tensor
    firsts: torch.Tensor
    owners: torch.Tensor
    capacities: torch.Tensor
    samples: torch.Tensor
    sampled: torch.Tensor
    ranks: torch.Tensor
    most: int
    widest: int
    elements: int


class SparseKernels:
    """The kernels, and the steps between them."""

    def __init__(self, wrap: Callable[[Any], Any] | None = None, chunk: int = CHUNK) -> None:
        """Compiles nothing yet.

        Args:
            wrap: ``triton.jit``, or what makes interpreted functions.
            chunk: elements that one program handles.

        Raises:
            UnsupportedError: Triton is not installed.
        """
        self._run = wrapped(wrap)
        self._chunk = chunk
        self._launch = {"SIZE": chunk, "num_warps": 4, "enable_fp_fusion": False}

    def encode(
        self,
        batch: Batch,
        ranges: tuple[Range, ...],
        grad: torch.Tensor,
        scale: float,
        residual: torch.Tensor | None,
        incoming: torch.Tensor | None,
        wire: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the flags of :meth:`hipress_torch.codecs.Codec.encode`, on the same device.

        Args:
            batch: the segments.
            ranges: what the selection in each goes by.
            grad: as in ``Codec.encode``, and so are the others.
            scale: factor on the gradient.
            residual: updated in place, or None.
            incoming: messages to add, or None.
            wire: what is written.
        """
        device = grad.device
        count = len(batch.segments)
        if not count:
            return torch.zeros(0, dtype=torch.int32, device=device)
        t = _tables(batch, ranges, self._chunk, device)
        chunk = {"FIELDS": len(CHUNK_FIELDS), **self._launch}
        grid = (t.chunks.shape[0],)
        work = torch.empty(t.elements, device=device)
        kept = grad if residual is None else residual
        has = residual is not None
        self._run["add"][grid](grad, kept, scale, work, t.chunks, HAS_RESIDUAL=has, **chunk)
        for message in () if incoming is None else incoming:
            self._scatter(message, work, t, WORK)
        least, ties = self._threshold(work, t)
        counts = torch.empty(grid[0], 3, dtype=torch.int32, device=device)
        self._run["count"][grid](work, t.chunks, least, counts, **chunk)
        ends = counts.cumsum(0)
        starts = ends - counts
        before = (starts - starts[t.firsts][t.owners])[:, :2].to(torch.int32).contiguous()
        sums = torch.zeros(count, 3, dtype=torch.int64, device=device)
        sums.index_add_(0, t.owners, counts.long())
        bad = (sums[:, 2] != 0).to(torch.int32)
        pairs = (sums[:, 0] + torch.minimum(sums[:, 1], ties.long())) * (1 - bad)
        words, values = wire.view(torch.int32), wire.view(torch.float32)
        length = 4 + 2 * t.widest + 3
        self._run["head"][count, -(-length // self._chunk)](
            words, t.segments, pairs.to(torch.int32), FIELDS=len(SEGMENT_FIELDS), **self._launch
        )
        self._run["select"][grid](
            work, t.chunks, t.segments, least, ties, before, bad, words, values, kept, grad,
            HAS_RESIDUAL=has, SEGMENT_FIELDS=len(SEGMENT_FIELDS), **chunk,
        )  # fmt: skip
        return bad

    def decode(
        self,
        batch: Batch,
        ranges: tuple[Range, ...],
        wire: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Writes what the messages stand for into ``out``."""
        if batch.segments:
            t = _tables(batch, ranges, self._chunk, out.device)
            fields = len(CHUNK_FIELDS)
            self._run["zero"][(t.chunks.shape[0],)](out, t.chunks, FIELDS=fields, **self._launch)
            self._scatter(wire, out, t, GRAD)

    def clear(
        self,
        batch: Batch,
        ranges: tuple[Range, ...],
        wire: torch.Tensor,
        velocity: torch.Tensor,
    ) -> None:
        """Clears the velocity of what the messages hold."""
        if batch.segments:
            t = _tables(batch, ranges, self._chunk, velocity.device)
            self._scatter(wire, velocity, t, RESIDUAL, clear=True)

    def _scatter(
        self, wire: torch.Tensor, target: torch.Tensor, t: Tables, column: int, clear: bool = False
    ) -> None:
        grid = (t.segments.shape[0], max(1, -(-t.widest // self._chunk)))
        self._run["scatter"][grid](
            wire.view(torch.int32), wire.view(torch.float32), target, t.segments,
            COLUMN=column, CLEAR=clear, FIELDS=len(SEGMENT_FIELDS), **self._launch,
        )  # fmt: skip

    def _threshold(self, work: torch.Tensor, t: Tables) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each segment's least magnitude, as bits, and how many equal to it are sent."""
        sizes = torch.where(t.sampled, work[t.samples].abs(), -1.0)
        edge = sizes.topk(t.most, 1).values.gather(1, t.ranks).view(-1).contiguous()
        # Nothing is sent for zeros.
        low = edge.view(torch.int32).clamp(min=1)
        prefix = torch.zeros_like(low)
        want = t.capacities.long()
        enough = torch.ones_like(low, dtype=torch.bool)
        for shift, bits in PASSES:
            found = torch.zeros(low.numel(), 1 << bits, dtype=torch.int32, device=low.device)
            self._run["histogram"][(t.chunks.shape[0],)](
                work, t.chunks, low, prefix, found,
                SHIFT=shift, BITS=bits, FIELDS=len(CHUNK_FIELDS), **self._launch,
            )  # fmt: skip
            # How many have these bits or larger ones, from the largest down.
            down = found.flip(1).cumsum(1)
            place = (down < want[:, None]).sum(1).clamp(max=(1 << bits) - 1)
            if shift == PASSES[0][0]:
                enough = down[:, -1] >= want
            larger = down.gather(1, (place - 1).clamp(min=0)[:, None]).view(-1)
            want = want - torch.where(place > 0, larger, 0)
            prefix = (prefix << bits) | ((1 << bits) - 1 - place).to(torch.int32)
        least = torch.where(enough, prefix, low)
        ties = torch.where(enough, want.to(torch.int32), MANY)
        return least, ties


def wrapped(wrap: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Returns the kernels by name, each wrapped; compiled by ``triton.jit`` if not told else.

    Raises:
        UnsupportedError: Triton is not installed.
    """
    try:
        import triton

        from hipress_torch.codecs import _sparse_kernels
    except ImportError as error:
        raise UnsupportedError(
            "gradients on a GPU need Triton, which is not installed here; install the triton "
            "package that belongs to this torch, or train on CPU tensors"
        ) from error
    how = wrap or triton.jit
    return {name: how(getattr(_sparse_kernels, name)) for name in NAMES}


@functools.lru_cache(maxsize=1)
def kernels() -> SparseKernels:
    """Returns the kernels, compiled when they are first launched."""
    return SparseKernels()


@functools.lru_cache(maxsize=256)
def _tables(
    batch: Batch,
    ranges: tuple[Range, ...],
    chunk: int,
    device: torch.device,
) -> Tables:
    chunks, segments, firsts, samples = [], [], [], []
    work = chunks_so_far = 0
    for i, (s, known) in enumerate(zip(batch.segments, ranges, strict=True)):
        first = np.arange(0, s.count, chunk, dtype=np.int64)
        row = np.empty((len(first), len(CHUNK_FIELDS)), dtype=np.int64)
        row[:, 0] = s.grad + first
        row[:, 1] = s.residual + first
        row[:, 2] = work + first
        row[:, 3] = np.minimum(chunk, s.count - first)
        row[:, 4] = i
        row[:, 5] = first
        chunks.append(row)
        firsts.append(chunks_so_far)
        chunks_so_far += len(first)
        segments.append((work, s.grad, s.residual, s.wire // 4, s.count, known.capacity))
        samples.append(work + np.arange(0, s.count, known.stride, dtype=np.int64))
        work += s.count
    width = max(len(places) for places in samples)
    padded = np.array([np.pad(p, (0, width - len(p)), mode="edge") for p in samples])
    sampled = np.arange(width) < np.array([[len(p)] for p in samples])
    whole = np.concatenate(chunks)
    return Tables(
        torch.from_numpy(whole).to(device),
        torch.tensor(segments, device=device),
        torch.tensor(firsts, device=device),
        torch.from_numpy(whole[:, 4].copy()).to(device),
        torch.tensor([r.capacity for r in ranges], dtype=torch.int32, device=device),
        torch.from_numpy(padded).to(device),
        torch.from_numpy(sampled).to(device),
        torch.tensor([[r.rank - 1] for r in ranges], device=device),
        max(r.rank for r in ranges),
        max(r.capacity for r in ranges),
        work,
    )


def compile_ahead(backend: str, architecture: int | str, warp: int) -> dict[str, Any]:
    """Returns the kernels compiled for a GPU that need not be here, by name.

    Args:
        backend: ``cuda`` or ``hip``.
        architecture: 80, 90, ... for CUDA; ``gfx942``, ... for HIP.
        warp: threads of a warp: 32, on CDNA 64.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    chunk, segment = len(CHUNK_FIELDS), len(SEGMENT_FIELDS)
    types: dict[str, str] = {
        **dict.fromkeys(("grad", "residual", "work", "values", "target", "out"), "*fp32"),
        **dict.fromkeys(("chunks", "segments"), "*i64"),
        "scale": "fp32",
    }
    fixed: dict[str, dict[str, Any]] = {
        "add": {"HAS_RESIDUAL": True, "FIELDS": chunk},
        "scatter": {"COLUMN": WORK, "CLEAR": False, "FIELDS": segment},
        "histogram": {"SHIFT": PASSES[0][0], "BITS": PASSES[0][1], "FIELDS": chunk},
        "count": {"FIELDS": chunk},
        "head": {"FIELDS": segment},
        "select": {"HAS_RESIDUAL": True, "FIELDS": chunk, "SEGMENT_FIELDS": segment},
        "zero": {"FIELDS": chunk},
    }
    made = {}
    for name, kernel in wrapped().items():
        known = {**fixed[name], "SIZE": CHUNK}
        signature = {
            a: "constexpr" if a in known else types.get(a, "*i32") for a in kernel.arg_names
        }
        places = {(kernel.arg_names.index(a),): v for a, v in known.items()}
        made[name] = triton.compile(
            ASTSource(kernel, signature=signature, constexprs=places),
            target=GPUTarget(backend, architecture, warp),
            options={"enable_fp_fusion": False},
        )
    return made
