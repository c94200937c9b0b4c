"""C source for a traced codec: one fused encoder (which also merges) and one decoder.

A block is brought into a buffer that stays in the first-level cache, reduced as often as the graph
needs, coded and packed, and the residual is written, before the next block is read: each element
comes from memory once.
"""

import functools
import hashlib
import struct
from collections.abc import Iterable
from importlib.resources import files

import torch

from hipress_torch._compll._graph import REDUCE, Value, key_of, walk
from hipress_torch._compll._program import Program

_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "and": "&",
    "or": "|",
}
_REDUCTION = {
    "sum": ("+", "0.0f", "{a} += {v};"),
    "amin": ("min", "INFINITY", "{a} = {v} < {a} ? {v} : {a};"),
    "amax": ("max", "-INFINITY", "{a} = {v} > {a} ? {v} : {a};"),
}


def literal(value: float) -> str:
    """Returns an exact float32 literal."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded.hex() + "f"


class _Writer:
    """Writes expressions as C statements; what is one value a block is written outside of loops."""

    def __init__(self, program: Program, indent: str) -> None:
        self.program = program
        self.indent = indent
        self.lines: list[str] = []
        self._block: dict[int, str] = {}
        self._count = 0

    def reductions(self, roots: Iterable[Value]) -> None:
        """Writes the loops that compute every reduction under ``roots``, as few as possible.

        The first one also fills ``y``, unless messages were merged into it before, and ``top``.
        """
        stage: dict[int, int] = {}
        by_stage: dict[int, dict[str, list[Value]]] = {1: {}}
        for n in walk(*roots):
            stage[id(n)] = max((stage[id(a)] for a in n.args), default=0)
            if n.op in REDUCE:
                stage[id(n)] += 1
                by_stage.setdefault(stage[id(n)], {}).setdefault(key_of(n), []).append(n)
        for at, equal in sorted(by_stage.items()):
            nodes = [same[0] for same in equal.values()]
            names = []
            for n in nodes:
                names.append(self._fresh("b"))
                self.line(f"float {names[-1]} = {_REDUCTION[n.op][1]};")
            clauses = " ".join(
                f"reduction({_REDUCTION[n.op][0]}:{a})" for n, a in zip(nodes, names, strict=True)
            )
            body = [
                (n.args[0], _REDUCTION[n.op][2].format(a=a, v="{v}"))
                for n, a in zip(nodes, names, strict=True)
            ]
            if at == 1:
                self._first_loop(body, f"reduction(max:top) {clauses}")
            else:
                self.loop(body, clauses, "y[i]")
            for same, a in zip(equal.values(), names, strict=True):
                self._block.update((id(n), a) for n in same)

    def _first_loop(self, body: list[tuple[Value, str]], clauses: str) -> None:
        self.block_values(*(v for v, _ in body))
        x = Value("x")
        for head, source in (
            ("if (messages) {", "y[i]"),
            ("} else if (r) {", "g[i] * scale + r[i]"),
            ("} else {", "g[i] * scale"),
        ):
            self.line(head)
            kept = "" if source == "y[i]" else " y[i] = {v};"
            self.loop([(x, _MAGNITUDE + kept), *body], clauses, source)
        self.line("}")

    def loop(self, body: list[tuple[Value, str]], clauses: str, x: str, code: str = "") -> None:
        """Writes a loop over the block with one statement for each value; ``{v}`` is the value."""
        self.block_values(*(v for v, _ in body))
        self.line(f"#pragma omp simd {clauses}".rstrip())
        self.line("for (int64_t i = 0; i < m; i++) {")
        inner: dict[int, str] = {}
        read = ""
        for value, statement in body:
            for node in walk(value):
                if node.op == "x":
                    # Each node of the graph that is x is the same element: it is read once.
                    read = read or self._element(node, inner, x, code)
                    inner[id(node)] = read
            name = self._element(value, inner, x, code)
            self.line("    " + statement.replace("{v}", name))
        self.line("}")

    def block_values(self, *roots: Value) -> None:
        """Writes what is one value a block under ``roots``, so that no loop has to."""
        for node in walk(*roots):
            if node.level == "block":
                self.block(node)

    def block(self, node: Value) -> str:
        """Returns the C name of a value that is one a block, writing what it needs before."""
        found = self._block.get(id(node))
        if found is not None:
            return found
        match node.op:
            case "const":
                name = literal(float(node.constant or 0.0))
            case "length":
                name = "(float)m"
            case "option":
                name = f"options[{self.program.options.index(str(node.constant))}]"
            case "side":
                name = f"side{node.constant}"
            case _:
                args = [self.block(a) for a in node.args]
                name = self._fresh("b")
                self.line(f"const {_type(node)} {name} = {_expression(node, args)};")
        self._block[id(node)] = name
        return name

    def line(self, text: str) -> None:
        """Adds a line."""
        self.lines.append(text if text.startswith("#") else self.indent + text)

    def _element(self, node: Value, inner: dict[int, str], x: str, code: str) -> str:
        if node.level == "block":
            return self.block(node)
        found = inner.get(id(node))
        if found is not None:
            return found
        if node.op == "code":
            return code
        match node.op:
            case "x":
                expression = x
            case "uniform":
                expression = "hp_uniform(position + (uint32_t)i, low, high)"
            case _:
                args = [self._element(a, inner, x, code) for a in node.args]
                expression = _expression(node, args)
        name = inner[id(node)] = self._fresh("e")
        self.line(f"    const {_type(node)} {name} = {expression};")
        return name

    def _fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"


def _type(node: Value) -> str:
    return "int" if node.mask else "float"


def _expression(node: Value, a: list[str]) -> str:
    match node.op:
        case "neg":
            return f"-{a[0]}"
        case "not":
            return f"!{a[0]}"
        case "abs":
            return f"fabsf({a[0]})"
        case "floor":
            return f"floorf({a[0]})"
        case "sqrt":
            return f"sqrtf({a[0]})"
        case "min":
            return f"{a[0]} < {a[1]} ? {a[0]} : {a[1]}"
        case "max":
            return f"{a[0]} > {a[1]} ? {a[0]} : {a[1]}"
        case "where":
            return f"{a[0]} ? {a[1]} : {a[2]}"
        case op:
            return f"{a[0]} {_INFIX[op]} {a[1]}"


def emit(program: Program) -> str:
    """Returns the C functions ``<symbol>_encode`` and ``<symbol>_decode``."""
    return _emit(program).replace("@NAME@", symbol(program))


@functools.lru_cache(maxsize=256)
def symbol(program: Program) -> str:
    """Returns the stem of the functions' names, made of all that they are compiled from.

    Kernels that were compiled from an older emitter or header are thus never taken for these.
    """
    support = _native_text("support.h")
    return "hp_" + hashlib.sha256((_emit(program) + support).encode()).hexdigest()[:12]


@functools.cache
def _native_text(name: str) -> str:
    return (files("hipress_torch._native") / name).read_text(encoding="utf-8")


def _emit(program: Program) -> str:
    p = program
    uint = p.format == "uint"
    kind = "uint8_t" if uint else "float"
    unpack = f"hp_unpack{p.bits}" if uint else f"hp_load_{p.format}"
    pack = f"hp_pack{p.bits}" if uint else f"hp_store_{p.format}"
    places = {
        "BLOCK": str(p.block),
        "SIDES": str(len(p.sides)),
        "BITS": str(p.bits),
        "KIND": kind,
        "UNPACK": unpack,
        "PACK": pack,
        "TITLE": f"{p.name}, {p.bits} bits, blocks of {p.block}",
        "PAD": "memset(code + m, 0, (size_t)((64 - m % 64) % 64));" if uint else "",
        "KEYS": _KEYS if p.random else "",
        "POSITION": _POSITION if p.random else "",
        "TUNED": _tuned(p),
        "MERGE": _decode_into(p, " " * 20, "y[i] += {v};", "in"),
        "ENCODE": _encode(p),
        "RESIDUAL": _residual(p),
        "DECODE": _decode_into(p, " " * 12, "x[i] = {v};", "wire"),
    }
    text = _native_text("template.c")
    for key, value in places.items():
        text = text.replace(f"@{key}@", value)
    return "\n".join(line.rstrip() for line in text.split("\n") if line.strip() != "@") + "\n"


def _sides(p: Program, indent: str, source: str) -> list[str]:
    return [
        f"{indent}float side{i}; memcpy(&side{i}, {source} + 4 * ({len(p.sides)} * b + {i}), 4);"
        for i in range(len(p.sides))
    ]


def _decode_into(p: Program, indent: str, statement: str, source: str) -> str:
    writer = _Writer(p, indent)
    writer.lines += _sides(p, indent, source)
    writer.loop([(p.value, statement)], "", "", "(float)code[i]")
    return "\n".join(writer.lines).lstrip()


def _encode(p: Program) -> str:
    """Returns the reductions, the side values, and the loops that fill the codes.

    With a residual ``y`` becomes what the message loses. ``top`` tells if what is sent or kept is
    not finite. The wire's own formats saturate: there it always is.
    """
    indent = " " * 16
    writer = _Writer(p, indent)
    writer.reductions([p.code, *p.sides])
    for i, side in enumerate(p.sides):
        writer.line(f"const float side{i} = {writer.block(side)};")
        writer.line(f"memcpy(wire + 4 * ({len(p.sides)} * b + {i}), &side{i}, 4);")
    if p.format == "uint":
        top = literal(2.0**p.bits - 1)
        one_bit = p.code.op == "where" and [a.constant for a in p.code.args[1:]] == [1.0, 0.0]
        # Rounded down and limited to the range of the codes; a comparison with NaN gives 0.
        coded = (
            (p.code.args[0], "const int32_t c = {v};")
            if one_bit
            else (
                p.code,
                f"const int32_t c = (int32_t)({{v}} > 0.0f ? ({{v}} < {top} ? {{v}} : {top}) : "
                f"0.0f);",
            )
        )
        store = (p.code.args[0] if one_bit else p.code, "code[i] = (uint8_t)c;")
        writer.block_values(p.value, coded[0])
        writer.line("if (r) {")
        checked = "reduction(max:top)"
        writer.loop([coded, store, (p.value, _LOST)], checked, "y[i]", "(float)c")
        writer.line("} else {")
        writer.loop([coded, store, (p.value, _MAGNITUDE)], checked, "y[i]", "(float)c")
        writer.line("}")
    else:
        top = literal(torch.finfo(getattr(torch, p.format)).max)
        writer.loop(
            [(p.code, f"code[i] = {{v}} < {top} ? ({{v}} > -{top} ? {{v}} : -{top}) : {top};")],
            "",
            "y[i]",
        )
        if p.value.op != "code":
            # What the others will read, after rounding to the format of the wire.
            writer.line(f"hp_store_{p.format}(bytes, code, m);")
            writer.line(f"hp_load_{p.format}(code, bytes, m);")
            writer.block_values(p.value)
            writer.line("if (r) {")
            writer.loop([(p.value, _LOST)], "reduction(max:top)", "", "code[i]")
            writer.line("} else {")
            writer.loop([(p.value, _MAGNITUDE)], "reduction(max:top)", "", "code[i]")
            writer.line("}")
    return "\n".join(writer.lines).lstrip()


def _residual(p: Program) -> str:
    if p.format == "uint" or p.value.op != "code":
        return "if (r) memcpy(r, y, (size_t)m * 4);"
    indent = " " * 16
    writer = _Writer(p, indent)
    # What the others will read, after rounding to the format of the wire.
    writer.line(f"hp_load_{p.format}(code, bytes, m);")
    writer.loop([(p.value, "r[i] = y[i] - {v};")], "", "", "(float)code[i]")
    inner = "\n".join(writer.lines).lstrip()
    return f"if (r) {{\n{indent}{inner}\n            }}"


def _tuned(p: Program) -> str:
    """Returns the call of the function that codes full blocks in place of the generated code."""
    if p.digest not in TUNED:
        return ""
    defined, function = TUNED[p.digest]
    ahead = f"first + {p.block} < count ? {p.block} : 0"
    call = (
        f"{function}(g, r, scale, incoming ? incoming + t[HP_WIRE] : 0, stride, messages, place, "
        f"b, wire + 4 * {len(p.sides)} * b, bytes, {p.block}, {ahead})"
    )
    return f"#if defined({defined})\n            if (m == {p.block} && {call}) continue;\n#endif"


# By digest: a codec that only shares the name is never taken for the one that was tuned.
TUNED = {"d744da238841": ("HP_TUNED_ONEBIT", "hp_onebit_block")}
_MAGNITUDE = "const int32_t u = hp_magnitude({v}); top = u > top ? u : top;"
_LOST = "y[i] = y[i] - {v}; " + _MAGNITUDE.replace("{v}", "y[i]")
_KEYS = """const uint64_t key = hp_splitmix64(stream ^ (uint64_t)t[HP_PARAMETER]);
        const uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);"""
_POSITION = "const uint32_t position = (uint32_t)(t[HP_POSITION] + first);"
