"""The plain torch statement of every kernel.

Shape suffixes: N rows of the table, M gathered rows, D columns, B bytes of a packed row, P bytes of
a plane (for fewer than 8 bits, B == P), S codebooks of a vector quantizer, L entries of one, W
columns of a part.

Packing is planar. With b < 8 bits and P = ceil(D * b / 8), byte j of a row holds column j in its
top bits, column P + j in the next ones, and so on. A plane is then one shift and mask of contiguous
bytes into contiguous columns, which vectorizes on a CPU and coalesces on a GPU. 8 bits are one byte
a column, 16 bits two, low byte first.
"""

import torch
from torch import Tensor


def row_bytes(columns: int, bits: int) -> int:
    """Returns the bytes of a packed row of `columns` codes of `bits` (1, 2, 4, 8 or 16) bits."""
    if bits == 16:
        return 2 * columns
    return -(-columns * bits // 8)


def pack(codes_ND: Tensor, bits: int) -> Tensor:
    """Returns codes packed, uint8 [N, B].

    Args:
        codes_ND: integers in [0, 2**bits), any integer dtype, [N, D].
        bits: 1, 2, 4, 8 or 16.
    """
    rows, columns = codes_ND.shape
    if bits == 16:
        code = codes_ND.to(torch.int32)
        pairs = torch.stack((code & 0xFF, code >> 8), dim=2)
        return pairs.to(torch.uint8).reshape(rows, 2 * columns)
    if bits == 8:
        return codes_ND.to(torch.uint8)
    plane = row_bytes(columns, bits)
    packed_NB = torch.zeros((rows, plane), dtype=torch.uint8, device=codes_ND.device)
    for index, start in enumerate(range(0, columns, max(plane, 1))):
        part = codes_ND[:, start : start + plane].to(torch.uint8)
        packed_NB[:, : part.shape[1]] |= part << (8 - bits * (index + 1))
    return packed_NB


def unpack(packed_NB: Tensor, bits: int, columns: int) -> Tensor:
    """Returns the codes of packed rows, int32 [N, D] (the inverse of `pack`)."""
    if bits == 16:
        pairs = packed_NB[:, : 2 * columns].reshape(packed_NB.shape[0], columns, 2).to(torch.int32)
        return pairs[:, :, 0] | pairs[:, :, 1] << 8
    if bits == 8:
        return packed_NB[:, :columns].to(torch.int32)
    plane = row_bytes(columns, bits)
    mask = (1 << bits) - 1
    planes = [
        packed_NB[:, : min(plane, columns - start)] >> (8 - bits * (index + 1)) & mask
        for index, start in enumerate(range(0, columns, max(plane, 1)))
    ]
    if not planes:
        return packed_NB.new_zeros((packed_NB.shape[0], 0), dtype=torch.int32)
    return torch.cat(planes, dim=1).to(torch.int32)


def affine_encode(x_ND: Tensor, low_D: Tensor, step_D: Tensor, bits: int) -> Tensor:
    """Returns x quantized to `round((x - low) / step)`, clipped to the codes there are, packed.

    A column whose step is 0 is constant: its code is 0. All tensors are float32.
    """
    inverse_D = torch.where(step_D > 0, 1 / step_D, 0)
    codes_ND = ((x_ND - low_D) * inverse_D).round().clamp(0, (1 << bits) - 1)
    return pack(codes_ND.to(torch.int32), bits)


def affine_decode(packed_MB: Tensor, low_D: Tensor, step_D: Tensor, bits: int) -> Tensor:
    """Returns `code * step + low`, float32 [M, D]."""
    codes_MD = unpack(packed_MB, bits, low_D.numel())
    return codes_MD.to(torch.float32) * step_D + low_D


def lut_decode(packed_MB: Tensor, values_L: Tensor, bits: int, columns: int) -> Tensor:
    """Returns `values[code]`, float32 [M, D], for a table of 2**bits float32 values."""
    return values_L[unpack(packed_MB, bits, columns).long()]


def vector_codes(packed_MB: Tensor, code_bytes: int, books: int) -> Tensor:
    """Returns the codes of a vector quantizer, int64 [M, S], low byte first."""
    bytes_MSC = packed_MB[:, : books * code_bytes].reshape(-1, books, code_bytes).long()
    shifts_C = torch.arange(0, 8 * code_bytes, 8, device=packed_MB.device)
    return (bytes_MSC << shifts_C).sum(dim=2)


def vector_decode(
    packed_MB: Tensor, codebook_SLW: Tensor, stages: int, code_bytes: int, columns: int
) -> Tensor:
    """Returns each part's sum of codebook entries, side by side, float32 [M, D].

    A part has `stages` codebooks and codes, one after the other: codebook and code number
    `part * stages + stage`. The last part may be wider than what is left of the D columns; the rest
    of it is dropped.
    """
    books, _, width = codebook_SLW.shape
    codes_MS = vector_codes(packed_MB, code_bytes, books)
    sum_MPW = None
    for stage in range(stages):
        # In the order of the stages: sums of floats depend on it.
        book = torch.arange(stage, books, stages, device=packed_MB.device)
        chosen_MPW = codebook_SLW[book, codes_MS[:, stage::stages]]
        sum_MPW = chosen_MPW if sum_MPW is None else sum_MPW + chosen_MPW
    assert sum_MPW is not None, "there is at least one stage"
    return sum_MPW.reshape(-1, books // stages * width)[:, :columns]
