"""Triton kernels: gather + unpack + dequantize in one pass, rows read as packed bytes.

The reference is `kernels.reference`, of the same names. Planar packing makes a program's byte loads
contiguous and its stores contiguous for each plane. Row numbers are int64 before any pointer
arithmetic: a table of 2^31 bytes is not large. A row number outside the table is masked and reads
nothing; callers check indices first, so that it does not occur.

The packed table may be pinned host memory: the launcher resolves its device address, and rows then
cross the bus packed, once, without a copy of the table. Import this module only where Triton is
installed.

Shape suffixes as in `kernels.reference`.
"""

# mypy: disable-error-code="no-untyped-def"
# (parameters of a kernel are pointers and numbers of Triton's own)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAM_BYTES = 2048  # packed bytes of a program


def _scalar(
    codes, index, first, second, out, rows, count, stride, columns, plane,
    HAS_INDEX: tl.constexpr, LUT: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    # Affine: first, second are low and step of each column. LUT: first are the values of a code.
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    byte = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    live = row < count
    source = row
    if HAS_INDEX:
        source = tl.load(index + row, mask=live, other=0)
    inside = live & (source >= 0) & (source < rows)
    loaded = inside[:, None] & (byte < plane)[None, :]
    start = codes + source[:, None] * stride
    if BITS == 16:
        packed = tl.load(start + 2 * byte[None, :], mask=loaded, other=0).to(tl.int32)
        high = tl.load(start + 2 * byte[None, :] + 1, mask=loaded, other=0).to(tl.int32)
        packed = packed | (high << 8)
    else:
        packed = tl.load(start + byte[None, :], mask=loaded, other=0).to(tl.int32)
    planes: tl.constexpr = 1 if BITS == 16 else 8 // BITS
    for p in tl.static_range(planes):
        column = p * plane + byte
        kept = (byte < plane) & (column < columns)
        code = packed
        if BITS < 8:
            code = (packed >> (8 - BITS * (p + 1))) & ((1 << BITS) - 1)
        if LUT:
            value = tl.load(first + code, mask=loaded & kept[None, :], other=0.0)
        else:
            base = tl.load(first + column, mask=kept, other=0.0)
            scale = tl.load(second + column, mask=kept, other=0.0)
            value = code.to(tl.float32) * scale[None, :] + base[None, :]
        where = out + row[:, None] * columns + column[None, :]
        tl.store(where, value.to(out.dtype.element_ty), mask=live[:, None] & kept[None, :])


def _vector(
    codes, index, book, out, rows, count, stride, columns, stages, length, width,
    HAS_INDEX: tl.constexpr, CODE_BYTES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = row < count
    source = row
    if HAS_INDEX:
        source = tl.load(index + row, mask=live, other=0)
    inside = live & (source >= 0) & (source < rows)
    kept = inside[:, None] & (column < columns)[None, :]
    total = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    for stage in range(stages):
        part = (column // width) * stages + stage
        start = codes + source[:, None] * stride + (part * CODE_BYTES)[None, :]
        code = tl.load(start, mask=kept, other=0).to(tl.int32)
        for byte in tl.static_range(1, CODE_BYTES):
            code = code | (tl.load(start + byte, mask=kept, other=0).to(tl.int32) << (8 * byte))
        # int64: a codebook may hold more than 2^31 values
        entry = (part[None, :].to(tl.int64) * length + code) * width + (column % width)[None, :]
        total += tl.load(book + entry, mask=kept & (code < length), other=0.0)
    where = out + row[:, None] * columns + column[None, :]
    tl.store(
        where, total.to(out.dtype.element_ty), mask=live[:, None] & (column < columns)[None, :]
    )


scalar_kernel: Any = triton.jit(_scalar)
vector_kernel: Any = triton.jit(_vector)


def affine(
    codes: Tensor,
    index: Tensor | None,
    low: Tensor,
    step: Tensor,
    bits: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns `code * step + low` of the chosen rows (all without an index), `dtype` [M, D]."""
    out = _out(codes, index, low.numel(), dtype, low.device)
    return _scalars(codes, index, low, step, out, bits, lut=False)


def lut(
    codes: Tensor,
    index: Tensor | None,
    values: Tensor,
    bits: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns `values[code]` of the chosen rows, `dtype` [M, D]."""
    out = _out(codes, index, columns, dtype, values.device)
    return _scalars(codes, index, values, values, out, bits, lut=True)


def vector(
    codes: Tensor,
    index: Tensor | None,
    codebook: Tensor,
    stages: int,
    code_bytes: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the sums of codebook entries, `dtype` [M, D]; a damaged code adds nothing."""
    _, length, width = codebook.shape
    out = _out(codes, index, columns, dtype, codebook.device)
    _launch(
        vector_kernel, out, columns,
        codes, codes if index is None else index, codebook, out,
        codes.shape[0], out.shape[0], codes.stride(0), columns, stages, length, width,
        block="BLOCK_D", HAS_INDEX=index is not None, CODE_BYTES=code_bytes,
    )  # fmt: skip
    return out


def _scalars(
    codes: Tensor,
    index: Tensor | None,
    first: Tensor,
    second: Tensor,
    out: Tensor,
    bits: int,
    *,
    lut: bool,
) -> Tensor:
    columns = out.shape[1]
    plane = columns if bits >= 8 else -(-columns * bits // 8)
    _launch(
        scalar_kernel, out, plane,
        codes, codes if index is None else index, first, second, out,
        codes.shape[0], out.shape[0], codes.stride(0), columns, plane,
        HAS_INDEX=index is not None, LUT=lut, BITS=bits,
    )  # fmt: skip
    return out


def _out(
    codes: Tensor, index: Tensor | None, columns: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    count = codes.shape[0] if index is None else index.numel()
    return torch.empty((count, columns), dtype=dtype, device=device)


def _launch(
    kernel: Any, out: Tensor, across: int, *arguments: Any, block: str = "BLOCK_P", **constants: Any
) -> None:
    if out.numel() == 0:
        return
    wide = min(128, triton.next_power_of_2(across))
    tall = max(1, min(64, _PROGRAM_BYTES // wide))
    constants |= {"BLOCK_M": tall, block: wide}
    grid = (triton.cdiv(out.shape[0], tall), triton.cdiv(across, wide))
    if out.device.type == "cuda":
        with torch.cuda.device(out.device):
            kernel[grid](*arguments, **constants)
    else:
        kernel[grid](*arguments, **constants)
