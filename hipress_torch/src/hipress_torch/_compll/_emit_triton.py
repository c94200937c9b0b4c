"""Triton source for a traced codec: the fused encoder, which also merges, and the decoder.

One program of the grid handles one block. Where a block lies comes from a table of blocks, so that
one launch serves any number of parameters. Offsets are 64-bit before they touch a pointer.
"""

from hipress_torch._compll._graph import REDUCE, Value, walk
from hipress_torch._compll._program import Program

# Columns of the block table.
FIELDS = ("grad", "residual", "count", "side", "code", "parameter", "position")

_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "and": "&",
    "or": "|",
}
_CALL = {
    # Rounded as IEEE 754 says, like C and torch: the default division is not.
    "div": "tl.div_rn",
    "sqrt": "tl.sqrt_rn",
    "abs": "tl.abs",
    "floor": "tl.floor",
    "min": "tl.minimum",
    "max": "tl.maximum",
    "where": "tl.where",
}
_REDUCTION = {
    "sum": "tl.sum(tl.where(mask, {v}, 0.0), 0)",
    "amin": "tl.min(tl.where(mask, {v}, float('inf')), 0)",
    "amax": "tl.max(tl.where(mask, {v}, float('-inf')), 0)",
}


class _Writer:
    """Writes expressions as assignments, each node once."""

    def __init__(self, program: Program, prefix: str, indent: str) -> None:
        self.program = program
        self.prefix = prefix
        self.indent = indent
        self.lines: list[str] = []
        self._names: dict[int, str] = {}

    def expression(self, node: Value, leaves: dict[str, str]) -> str:
        """Returns the name of a value, writing what it needs before."""
        for n in walk(node):
            if id(n) not in self._names:
                self._names[id(n)] = self._write(n, leaves)
        return self._names[id(node)]

    def line(self, text: str) -> None:
        """Adds a line."""
        self.lines.append(self.indent + text)

    def _write(self, n: Value, leaves: dict[str, str]) -> str:
        a = [self._names[id(x)] for x in n.args]
        match n.op:
            case "x" | "code":
                return leaves[n.op]
            case "side":
                return leaves[f"side{n.constant}"]
            case "const":
                return repr(float(n.constant or 0.0))
            case "length":
                return "count.to(tl.float32)"
            case "option":
                value = f"tl.load(options + {self.program.options.index(str(n.constant))})"
            case "uniform":
                value = "uniform(position, offset, stream, parameter)"
            case "neg":
                value = f"-{a[0]}"
            case "not":
                value = f"{a[0]} == 0"
            case op if op in REDUCE:
                value = _REDUCTION[op].format(v=a[0])
            case op if op in _CALL:
                value = f"{_CALL[op]}({', '.join(a)})"
            case op:
                value = f"{a[0]} {_INFIX[op]} {a[1]}"
        name = f"{self.prefix}{len(self.lines)}"
        self.line(f"{name} = {value}")
        return name


def emit(program: Program) -> str:
    """Returns a module's source with the kernels ``encode`` and ``decode``."""
    p = program
    size = 1 << (p.block - 1).bit_length()
    per_word = 32 // p.bits
    places = {
        "TITLE": f"{p.name}, {p.bits} bits, blocks of {p.block}",
        "SIZE": str(size),
        "FIELDS": str(len(FIELDS)),
        "LOAD_INCOMING": _load_code(p, "incoming", "message * stride + ", " " * 8),
        "LOAD_SIDES_INCOMING": _load_sides(
            p, "incoming_sides", "message * stride // 4 + ", " " * 8
        ),
        "MERGE": _decoded(p, "m", " " * 8, "y += {v}"),
        "ENCODE": _encode(p),
        "STORE": _store_code(p, size, per_word),
        "SENT": _decoded(p, "r", " " * 4, "sent = {v}"),
        "LOAD": _load_code(p, "wire", "", " " * 4),
        "LOAD_SIDES": _load_sides(p, "wire_sides", "", " " * 4),
        "DECODE": _decoded(p, "d", " " * 4, "tl.store(out + grad_at + offset, {v}, mask=mask)"),
    }
    text = _TEMPLATE
    for key, value in places.items():
        text = text.replace(f"@{key}@", value)
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _load_code(p: Program, name: str, base: str, indent: str) -> str:
    if p.format != "uint":
        place = f"{name} + ({base}code_at) // {p.bits // 8} + offset"
        if p.format == "bfloat16":
            load = f"half = tl.load({place}, mask=mask, other=0).to(tl.uint16, bitcast=True)"
            return f"{load}\n{indent}code = (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)"
        return f"code = tl.load({place}, mask=mask, other=0.0).to(tl.float32)"
    per_word = 32 // p.bits
    lines = [
        f"word = tl.load({name} + ({base}code_at) // 4 + offset // {per_word}, mask=mask, other=0)",
        f"code = ((word >> ((offset % {per_word}) * {p.bits})) & {2**p.bits - 1}).to(tl.float32)",
    ]
    return f"\n{indent}".join(lines)


def _load_sides(p: Program, name: str, base: str, indent: str) -> str:
    return f"\n{indent}".join(
        f"side{i} = tl.load({name} + {base}side_at // 4 + {i})" for i in range(len(p.sides))
    )


def _leaves(p: Program) -> dict[str, str]:
    return {"x": "y", "code": "code", **{f"side{i}": f"side{i}" for i in range(len(p.sides))}}


def _decoded(p: Program, prefix: str, indent: str, statement: str) -> str:
    writer = _Writer(p, prefix, indent)
    name = writer.expression(p.value, _leaves(p))
    # A decoder of block values alone would give a scalar; the blocks' shape comes from the codes.
    writer.line(statement.format(v=name))
    return "\n".join(writer.lines).lstrip()


def _encode(p: Program) -> str:
    writer = _Writer(p, "e", " " * 4)
    leaves = _leaves(p)
    code = writer.expression(p.code, leaves)
    sides = [writer.expression(s, leaves) for s in p.sides]
    if p.format == "uint":
        top = float(2**p.bits - 1)
        writer.line(f"code = tl.floor(tl.minimum(tl.maximum({code}, 0.0), {top}))")
    else:
        limit = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}.get(p.format)
        bounded = code if limit is None else f"tl.minimum(tl.maximum({code}, -{limit}), {limit})"
        if p.format == "bfloat16":
            # To nearest even by integer operations: Triton's interpreter rounds down instead.
            writer.line(f"raw = ({bounded}).to(tl.uint32, bitcast=True)")
            writer.line("half = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16")
            writer.line("stored = half.to(tl.uint16).to(tl.int16, bitcast=True)")
            writer.line("code = (half << 16).to(tl.float32, bitcast=True)")
        else:
            writer.line(f"stored = ({bounded}).to(tl.{p.format})")
            writer.line("code = stored.to(tl.float32)")
    for i, side in enumerate(sides):
        writer.line(f"side{i} = {side}")
        writer.line(f"tl.store(wire_sides + side_at // 4 + {i}, side{i})")
    return "\n".join(writer.lines).lstrip()


def _store_code(p: Program, size: int, per_word: int) -> str:
    if p.format != "uint":
        return f"tl.store(wire + code_at // {p.bits // 8} + offset, stored, mask=mask)"
    lines = [
        "whole = tl.where(mask, code, 0.0).to(tl.int32)",
        f"lane = tl.reshape(whole, ({size // per_word}, {per_word}))",
        f"lane = lane << (tl.arange(0, {per_word})[None, :] * {p.bits})",
        f"place = tl.arange(0, {size // per_word})",
        "tl.store(",
        f"    wire + code_at // 4 + place, tl.sum(lane, 1), mask=place * {per_word} < count",
        ")",
    ]
    return "\n    ".join(lines)


_TEMPLATE = '''"""@TITLE@. Generated."""

import triton
import triton.language as tl


def mix32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


def uniform(position, offset, stream, parameter):
    key = stream.to(tl.uint64, bitcast=True) ^ parameter.to(tl.uint64, bitcast=True)
    key = key + 0x9E3779B97F4A7C15
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key = key ^ (key >> 31)
    x = (position + offset).to(tl.uint32) + key.to(tl.uint32)
    x = mix32(mix32(x) ^ (key >> 32).to(tl.uint32))
    return (x >> 8).to(tl.float32) * 5.9604644775390625e-08


def encode(
    grad, residual, scale, incoming, incoming_sides, stride, messages, wire, wire_sides, table,
    options, streams, bad, HAS_RESIDUAL: tl.constexpr,
):
    row = table + tl.program_id(0).to(tl.int64) * @FIELDS@
    grad_at = tl.load(row)
    residual_at = tl.load(row + 1)
    count = tl.load(row + 2)
    side_at = tl.load(row + 3)
    code_at = tl.load(row + 4)
    parameter = tl.load(row + 5)
    position = tl.load(row + 6)
    stream = tl.load(streams)
    offset = tl.arange(0, @SIZE@)
    mask = offset < count
    y = tl.load(grad + grad_at + offset, mask=mask, other=0.0) * scale
    if HAS_RESIDUAL:
        y += tl.load(residual + residual_at + offset, mask=mask, other=0.0)
    for message in range(messages):
        @LOAD_INCOMING@
        @LOAD_SIDES_INCOMING@
        @MERGE@
    finite = tl.sum(tl.where(mask, y * 0.0, 0.0), 0) == 0.0
    y = tl.where(finite, y, 0.0)
    @ENCODE@
    @STORE@
    @SENT@
    lost = y - sent
    # Finite values may overflow in a sum over the block.
    if HAS_RESIDUAL:
        check = lost * 0.0
    else:
        check = sent * 0.0
    good = finite & (tl.sum(tl.where(mask, check, 0.0), 0) == 0.0)
    tl.store(bad + tl.program_id(0), 1 - good.to(tl.int32))
    tl.store(grad + grad_at + offset, float("nan"), mask=offset < tl.where(good, 0, count))
    if HAS_RESIDUAL:
        tl.store(residual + residual_at + offset, lost, mask=offset < tl.where(good, count, 0))


def decode(wire, wire_sides, out, table, options):
    row = table + tl.program_id(0).to(tl.int64) * @FIELDS@
    grad_at = tl.load(row)
    count = tl.load(row + 2)
    side_at = tl.load(row + 3)
    code_at = tl.load(row + 4)
    offset = tl.arange(0, @SIZE@)
    mask = offset < count
    @LOAD@
    @LOAD_SIDES@
    @DECODE@
'''
