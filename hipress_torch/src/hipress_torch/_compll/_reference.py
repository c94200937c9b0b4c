"""The reference: a program evaluated with plain torch operations, block by block in rows.

Slow and simple on purpose. Every kernel is tested against it, and it is what runs where there is
neither a compiled kernel nor a compiler.

Shapes: B blocks, C elements of a block.
"""

from collections.abc import Mapping

import torch

from hipress_torch._compll._graph import Value
from hipress_torch._compll._program import Program


def evaluate(
    node: Value,
    leaves: Mapping[str, torch.Tensor],
    options: Mapping[str, float],
    memo: dict[int, torch.Tensor],
) -> torch.Tensor:
    """Returns the value of ``node``: (B, C) for elements, (B, 1) for blocks."""
    found = memo.get(id(node))
    if found is not None:
        return found
    a = [evaluate(n, leaves, options, memo) for n in node.args]
    match node.op:
        case "x" | "code" | "uniform" | "length":
            result = leaves[node.op]
        case "side":
            result = leaves[f"side{node.constant}"]
        case "const":
            result = torch.full((1, 1), float(node.constant or 0.0), device=leaves["any"].device)
        case "option":
            result = torch.full((1, 1), options[str(node.constant)], device=leaves["any"].device)
        case "add":
            result = a[0] + a[1]
        case "sub":
            result = a[0] - a[1]
        case "mul":
            result = a[0] * a[1]
        case "div":
            result = a[0] / a[1]
        case "min":
            result = torch.minimum(a[0], a[1])
        case "max":
            result = torch.maximum(a[0], a[1])
        case "neg":
            result = -a[0]
        case "abs":
            result = a[0].abs()
        case "floor":
            result = a[0].floor()
        case "sqrt":
            result = a[0].sqrt()
        case "lt":
            result = a[0] < a[1]
        case "le":
            result = a[0] <= a[1]
        case "eq":
            result = a[0] == a[1]
        case "and":
            result = a[0] & a[1]
        case "or":
            result = a[0] | a[1]
        case "not":
            result = ~a[0]
        case "where":
            result = torch.where(a[0], a[1], a[2])
        case "sum":
            result = _rows(a[0], leaves["any"]).sum(1, keepdim=True)
        case "amin":
            result = _rows(a[0], leaves["any"]).amin(1, keepdim=True)
        case "amax":
            result = _rows(a[0], leaves["any"]).amax(1, keepdim=True)
        case _:
            raise AssertionError(f"unknown operation {node.op}")
    memo[id(node)] = result
    return result


def _rows(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    # An expression of constants alone keeps the shape (1, 1): a reduction needs all its elements.
    return value.expand(like.shape)


def encode_rows(
    program: Program,
    x_BC: torch.Tensor,
    uniform_BC: torch.Tensor | None,
    options: Mapping[str, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes (B, C), float32, and the side values (B, S) of blocks of equal length."""
    leaves = {
        "x": x_BC,
        "any": x_BC,
        "length": torch.full((1, 1), float(x_BC.shape[1]), device=x_BC.device),
    }
    if uniform_BC is not None:
        leaves["uniform"] = uniform_BC
    memo: dict[int, torch.Tensor] = {}
    code_BC = evaluate(program.code, leaves, options, memo).expand(x_BC.shape)
    if program.format == "uint":
        code_BC = code_BC.clamp(0, 2**program.bits - 1).floor()
    sides = [evaluate(s, leaves, options, memo).expand(x_BC.shape[0], 1) for s in program.sides]
    side_BS = torch.cat(sides, 1) if sides else x_BC.new_zeros(x_BC.shape[0], 0)
    return code_BC, side_BS


def decode_rows(
    program: Program, code_BC: torch.Tensor, side_BS: torch.Tensor, options: Mapping[str, float]
) -> torch.Tensor:
    """Returns the decoded elements (B, C) of blocks of equal length."""
    leaves = {"code": code_BC, "any": code_BC}
    leaves["length"] = torch.full((1, 1), float(code_BC.shape[1]), device=code_BC.device)
    for i in range(side_BS.shape[1]):
        leaves[f"side{i}"] = side_BS[:, i : i + 1]
    return evaluate(program.value, leaves, options, {}).expand(code_BC.shape)


def pack_codes(code_N: torch.Tensor, bits: int, kind: str) -> torch.Tensor:
    """Returns the codes of one tensor as bytes, first code in the lowest bits."""
    if kind != "uint":
        # Saturates: an infinity made by rounding would poison the residual.
        limit = torch.finfo(getattr(torch, kind)).max
        return code_N.clamp(-limit, limit).to(getattr(torch, kind)).contiguous().view(torch.uint8)
    code = code_N.to(torch.int32)
    per_byte = 8 // bits
    if code.numel() % per_byte:
        code = torch.nn.functional.pad(code, (0, per_byte - code.numel() % per_byte))
    shift = torch.arange(0, 8, bits, dtype=torch.int32, device=code.device)
    return (code.view(-1, per_byte) << shift).sum(1).to(torch.uint8)


def unpack_codes(wire: torch.Tensor, count: int, bits: int, kind: str) -> torch.Tensor:
    """Returns ``count`` codes as float32 from the bytes :func:`pack_codes` made."""
    if kind != "uint":
        dtype: torch.dtype = getattr(torch, kind)
        return wire[: count * bits // 8].view(dtype).to(torch.float32)
    shift = torch.arange(0, 8, bits, dtype=torch.int32, device=wire.device)
    code = (wire[: -(-count * bits // 8)].to(torch.int32)[:, None] >> shift) & (2**bits - 1)
    result: torch.Tensor = code.reshape(-1)[:count].to(torch.float32)
    return result
