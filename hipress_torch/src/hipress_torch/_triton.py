"""Runs the generated Triton kernels on CUDA or ROCm tensors.

Triton is imported when a kernel is first needed: it is absent on macOS, Windows and CPU-only
installs.
"""

import functools
import linecache
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hipress_torch._codec import Batch
from hipress_torch._compll._emit_triton import FIELDS, emit
from hipress_torch._compll._program import Program
from hipress_torch._errors import UnsupportedError

# What the codes of each format are read and written as.
WORDS = {
    "uint": torch.int32,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.int16,
}
HELPERS = ("mix32", "uniform")


def plain_functions(program: Program) -> types.ModuleType:
    """Returns the generated module, its functions not compiled yet.

    Raises:
        UnsupportedError: Triton is not installed.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "gradients on a GPU need Triton, which is not installed here; install the triton "
            "package that belongs to this torch, or train on CPU tensors"
        ) from error
    source = emit(program)
    name = f"<hipress_torch {program.name} {program.digest}>"
    # Triton reads a function's source through inspect, which finds it here.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def wrapped(program: Program, wrap: Callable[[Any], Any]) -> types.ModuleType:
    """Returns the generated module with every function wrapped, helpers first.

    Args:
        program: the traced codec.
        wrap: ``triton.jit``, or what makes interpreted functions.
    """
    module = plain_functions(program)
    for name in (*HELPERS, "encode", "decode"):
        setattr(module, name, wrap(getattr(module, name)))
    return module


class TritonKernels:
    """The two kernels of one program."""

    def __init__(self, program: Program, wrap: Callable[[Any], Any] | None = None) -> None:
        if wrap is None:
            import triton

            wrap = triton.jit
        self.program = program
        self._module = wrapped(program, wrap)
        size = 1 << (program.block - 1).bit_length()
        # Without fused multiply-add a GPU rounds as the CPU does, and residuals are reproducible.
        self._launch = {"num_warps": max(1, min(8, size // 512)), "enable_fp_fusion": False}

    def encode(
        self,
        batch: Batch,
        grad: torch.Tensor,
        scale: float,
        residual: torch.Tensor | None,
        incoming: torch.Tensor | None,
        wire: torch.Tensor,
        stream: int,
        options: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the flags of :meth:`hipress_torch.codecs.Codec.encode`, on the same device."""
        table, segment_of = _tables(batch, self.program, grad.device)
        bad = torch.zeros(table.shape[0], dtype=torch.int32, device=grad.device)
        flags = torch.zeros(len(batch.segments), dtype=torch.int32, device=grad.device)
        if not table.shape[0]:
            return flags
        signed = stream - (1 << 64) if stream >> 63 else stream
        streams = torch.tensor([signed], dtype=torch.int64, device=grad.device)
        messages = 0 if incoming is None else incoming.shape[0]
        source = wire if incoming is None else incoming
        self._module.encode[(table.shape[0],)](
            grad,
            grad if residual is None else residual,
            scale,
            self._codes(source),
            source.view(torch.float32),
            source.stride(0) if messages else 0,
            messages,
            self._codes(wire),
            wire.view(torch.float32),
            table,
            options.to(grad.device),
            streams,
            bad,
            HAS_RESIDUAL=residual is not None,
            **self._launch,
        )
        return flags.index_add_(0, segment_of, bad).clamp_(max=1)

    def decode(
        self, batch: Batch, wire: torch.Tensor, out: torch.Tensor, options: torch.Tensor
    ) -> None:
        """Writes what the messages stand for into ``out``."""
        table, _ = _tables(batch, self.program, out.device)
        if table.shape[0]:
            self._module.decode[(table.shape[0],)](
                self._codes(wire),
                wire.view(torch.float32),
                out,
                table,
                options.to(out.device),
                **self._launch,
            )

    def _codes(self, wire: torch.Tensor) -> torch.Tensor:
        return wire.view(WORDS[self.program.format])


@functools.lru_cache(maxsize=64)
def kernels(program: Program) -> TritonKernels:
    """Returns the kernels of a program, compiled when they are first launched."""
    return TritonKernels(program)


def block_table(
    batch: Batch, program: Program
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns where each block lies, (blocks, fields), and the segment it belongs to, (blocks,)."""
    rows: list[npt.NDArray[np.int64]] = []
    owners: list[npt.NDArray[np.int64]] = []
    for s, segment in enumerate(batch.segments):
        blocks = -(-segment.count // program.block)
        first = np.arange(blocks, dtype=np.int64) * program.block
        row = np.empty((blocks, len(FIELDS)), dtype=np.int64)
        row[:, 0] = segment.grad + first
        row[:, 1] = segment.residual + first
        row[:, 2] = np.minimum(program.block, segment.count - first)
        row[:, 3] = segment.wire + program.side_bytes(1) * np.arange(blocks)
        row[:, 4] = segment.wire + program.side_bytes(blocks) + first * program.bits // 8
        row[:, 5] = segment.parameter
        row[:, 6] = segment.position + first
        rows.append(row)
        owners.append(np.full(blocks, s, dtype=np.int64))
    if not rows:
        return np.empty((0, len(FIELDS)), dtype=np.int64), np.empty(0, dtype=np.int64)
    return np.concatenate(rows), np.concatenate(owners)


@functools.lru_cache(maxsize=256)
def _tables(
    batch: Batch, program: Program, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    table, owners = block_table(batch, program)
    return torch.from_numpy(table).to(device), torch.from_numpy(owners).to(device)


def compile_ahead(program: Program, backend: str, architecture: int | str, warp: int) -> list[Any]:
    """Returns both kernels compiled for a GPU that need not be here.

    Args:
        program: the traced codec.
        backend: ``cuda`` or ``hip``.
        architecture: 80, 90, ... for CUDA; ``gfx942``, ... for HIP.
        warp: threads of a warp: 32, on CDNA 64.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = wrapped(program, triton.jit)
    word = {
        torch.int32: "*i32",
        torch.int16: "*i16",
        torch.float16: "*fp16",
        torch.float32: "*fp32",
    }
    codes = word[WORDS[program.format]]
    signatures = {
        "encode": {
            "grad": "*fp32",
            "residual": "*fp32",
            "scale": "fp32",
            "incoming": codes,
            "incoming_sides": "*fp32",
            "stride": "i64",
            "messages": "i32",
            "wire": codes,
            "wire_sides": "*fp32",
            "table": "*i64",
            "options": "*fp32",
            "streams": "*i64",
            "bad": "*i32",
            "HAS_RESIDUAL": "constexpr",
        },
        "decode": {
            "wire": codes,
            "wire_sides": "*fp32",
            "out": "*fp32",
            "table": "*i64",
            "options": "*fp32",
        },
    }
    return [
        triton.compile(
            ASTSource(
                getattr(module, name),
                signature=signature,
                constexprs={(13,): True} if name == "encode" else {},
            ),
            target=GPUTarget(backend, architecture, warp),
            options={"enable_fp_fusion": False},
        )
        for name, signature in signatures.items()
    ]
