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


def _affine(
    codes, index, low, step, out, rows, count, stride, columns, plane,
    HAS_INDEX: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
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
        scale = tl.load(step + column, mask=kept, other=0.0)
        base = tl.load(low + column, mask=kept, other=0.0)
        code = packed
        if BITS < 8:
            code = (packed >> (8 - BITS * (p + 1))) & ((1 << BITS) - 1)
        value = code.to(tl.float32) * scale[None, :] + base[None, :]
        where = out + row[:, None] * columns + column[None, :]
        tl.store(where, value.to(out.dtype.element_ty), mask=live[:, None] & kept[None, :])


def _lut(
    codes, index, values, out, rows, count, stride, columns, plane,
    HAS_INDEX: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
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
        kept = loaded & (column < columns)[None, :]
        code = packed
        if BITS < 8:
            code = (packed >> (8 - BITS * (p + 1))) & ((1 << BITS) - 1)
        value = tl.load(values + code, mask=kept, other=0.0)
        where = out + row[:, None] * columns + column[None, :]
        tl.store(where, value.to(out.dtype.element_ty), mask=kept)


def _vector(
    codes, index, book, out, rows, count, stride, columns, length, width,
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
    part = column // width
    start = codes + source[:, None] * stride + (part * CODE_BYTES)[None, :]
    code = tl.load(start, mask=kept, other=0).to(tl.int32)
    for byte in tl.static_range(1, CODE_BYTES):
        code = code | (tl.load(start + byte, mask=kept, other=0).to(tl.int32) << (8 * byte))
    # int64: a codebook may hold more than 2^31 values
    entry = (part[None, :].to(tl.int64) * length + code) * width + (column % width)[None, :]
    value = tl.load(book + entry, mask=kept & (code < length), other=0.0)
    where = out + row[:, None] * columns + column[None, :]
    tl.store(
        where, value.to(out.dtype.element_ty), mask=live[:, None] & (column < columns)[None, :]
    )


affine_kernel: Any = triton.jit(_affine)
lut_kernel: Any = triton.jit(_lut)
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
    columns = low.numel()
    out = _out(codes, index, columns, dtype, low.device)
    plane = columns if bits >= 8 else -(-columns * bits // 8)
    _launch(
        affine_kernel, out, plane,
        codes, codes if index is None else index, low, step, out,
        codes.shape[0], out.shape[0], codes.stride(0), columns, plane,
        HAS_INDEX=index is not None, BITS=bits,
    )  # fmt: skip
    return out


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
    plane = columns if bits >= 8 else -(-columns * bits // 8)
    _launch(
        lut_kernel, out, plane,
        codes, codes if index is None else index, values, out,
        codes.shape[0], out.shape[0], codes.stride(0), columns, plane,
        HAS_INDEX=index is not None, BITS=bits,
    )  # fmt: skip
    return out


def vector(
    codes: Tensor,
    index: Tensor | None,
    codebook: Tensor,
    code_bytes: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the codebook entries of the chosen rows, `dtype` [M, D]; zeros for damaged codes."""
    _, length, width = codebook.shape
    out = _out(codes, index, columns, dtype, codebook.device)
    _launch(
        vector_kernel, out, columns,
        codes, codes if index is None else index, codebook, out,
        codes.shape[0], out.shape[0], codes.stride(0), columns, length, width,
        block="BLOCK_D", HAS_INDEX=index is not None, CODE_BYTES=code_bytes,
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
