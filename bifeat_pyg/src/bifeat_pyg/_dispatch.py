"""Chooses the kernel for where a tensor lies: C on the CPU, Triton on a GPU, torch otherwise.

All functions take a packed table `codes`, uint8 [N, stride], and an optional int64 `index` [M];
without one, every row is meant. They compute on the device of the parameters (`low`, `values`,
`codebook`), and return `dtype` if a kernel writes it directly, else float32 for the caller to
convert.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from bifeat_pyg._errors import FormatError, RowIndexError
from bifeat_pyg.kernels import cpu, reference


def _use_c(*tensors: Tensor | None) -> bool:
    return cpu.available() and all(t is None or t.device.type == "cpu" for t in tensors)


@functools.cache
def _has_triton() -> bool:
    # Absent on Windows, macOS and some builds of torch; the reference then serves a GPU too.
    return importlib.util.find_spec("triton") is not None


def _use_triton(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and _has_triton()


def _placed(
    codes: Tensor, index: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Returns table and checked index where a kernel on `device` can read them.

    A table in pinned host memory stays there for a GPU kernel; from other host memory the chosen
    rows are copied packed.
    """
    index = None if index is None else check_index(index, codes.shape[0])
    codes = _rows(codes)
    if codes.device == device:
        return codes, None if index is None else index.to(device)
    if _has_triton() and device.type == "cuda" and codes.device.type == "cpu" and codes.is_pinned():
        return codes, None if index is None else index.to(device)
    if index is not None:
        codes = gather(codes, codes.shape[1], index.to(codes.device))
    return codes.to(device, non_blocking=True), None


def _rows(codes: Tensor) -> Tensor:
    """Returns codes whose rows are contiguous bytes (any distance between rows)."""
    return codes if codes.shape[1] < 2 or codes.stride(1) == 1 else codes.contiguous()


def check_index(index: Tensor, rows: int) -> Tensor:
    """Returns the index, int64 and contiguous, after making sure that it stays inside the table.

    Raises:
        RowIndexError: an index is negative or not below `rows`.
    """
    index = index.to(torch.long).contiguous()
    if index.device.type == "cpu" and cpu.available():
        bad = cpu.first_bad(index, rows)
    else:
        outside = (index < 0) | (index >= rows)
        bad = int(outside.nonzero()[0]) if bool(outside.any()) else -1
    if bad >= 0:
        raise RowIndexError(
            f"index[{bad}] is {int(index[bad])}; allowed are 0 to {rows - 1} (the table has {rows} "
            "rows; negative indices are not counted from the end)"
        )
    return index


def gather(codes: Tensor, row_bytes: int, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the packed bytes of the chosen rows, uint8 [M, row_bytes]; `index` is checked."""
    index = check_index(index, codes.shape[0])
    codes = _rows(codes)
    if out is None:
        out = torch.empty((index.numel(), row_bytes), dtype=torch.uint8, device=codes.device)
    if _use_c(codes, index, out) and out.is_contiguous():
        cpu.gather(codes, row_bytes, index, out)
        return out
    return torch.index_select(codes[:, :row_bytes], 0, index, out=out)


def affine(
    codes: Tensor,
    index: Tensor | None,
    low: Tensor,
    step: Tensor,
    bits: int,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Returns `code * step + low` of the chosen rows, [M, D]."""
    codes, index = _placed(codes, index, low.device)
    if _use_c(codes, index, low):
        out = _room(codes, index, low.numel(), out)
        cpu.affine(codes, index, low, step, bits, out)
        return out
    if _use_triton(low):
        from bifeat_pyg.kernels import triton_gather

        return triton_gather.affine(codes, index, low, step, bits, dtype)
    return reference.affine_decode(_select(codes, index), low, step, bits)


def lut(
    codes: Tensor,
    index: Tensor | None,
    values: Tensor,
    bits: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Returns `values[code]` of the chosen rows, [M, D]."""
    codes, index = _placed(codes, index, values.device)
    if _use_c(codes, index, values):
        out = _room(codes, index, columns, out)
        cpu.lut(codes, index, values, bits, out)
        return out
    if _use_triton(values):
        from bifeat_pyg.kernels import triton_gather

        return triton_gather.lut(codes, index, values, bits, columns, dtype)
    return reference.lut_decode(_select(codes, index), values, bits, columns)


def vector(
    codes: Tensor,
    index: Tensor | None,
    codebook: Tensor,
    stages: int,
    code_bytes: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the sums of the chosen rows' codebook entries, [M, D].

    Raises:
        FormatError: a code is not in the codebook (the table was damaged).
    """
    codes, index = _placed(codes, index, codebook.device)
    if _use_c(codes, index, codebook):
        out = _room(codes, index, columns, out)
        if (bad := cpu.vector(codes, index, codebook, stages, code_bytes, out)) >= 0:
            raise FormatError(
                f"row {bad if index is None else int(index[bad])} holds a code outside the "
                f"codebook of {codebook.shape[1]} entries: the packed table is damaged; quantize "
                f"again"
            )
        return out
    if _use_triton(codebook):
        from bifeat_pyg.kernels import triton_gather

        return triton_gather.vector(codes, index, codebook, stages, code_bytes, columns, dtype)
    return reference.vector_decode(_select(codes, index), codebook, stages, code_bytes, columns)


def affine_encode(x: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    """Returns float32 rows quantized and packed, uint8 [N, row_bytes]."""
    if _use_c(x, low):
        x = x.contiguous()
        out = torch.empty((x.shape[0], reference.row_bytes(x.shape[1], bits)), dtype=torch.uint8)
        inverse = torch.where(step > 0, 1 / step, 0)
        cpu.affine_encode(x, low, inverse, bits, out)
        return out
    return reference.affine_encode(x, low, step, bits)


def _room(codes: Tensor, index: Tensor | None, columns: int, out: Tensor | None) -> Tensor:
    """Returns float32 [M, D] to write into: `out` if it fits, else new."""
    shape = (codes.shape[0] if index is None else index.numel(), columns)
    fits = out is not None and out.shape == shape and out.dtype == torch.float32
    if out is not None and fits and out.is_contiguous() and out.device.type == "cpu":
        return out
    return torch.empty(shape, dtype=torch.float32)


def _select(codes: Tensor, index: Tensor | None) -> Tensor:
    return codes if index is None else codes.index_select(0, index)
