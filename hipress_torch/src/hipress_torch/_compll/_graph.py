"""The expression graph a codec's functions are traced into.

A value has one of two levels: ``element`` (one value for each element of a block) or ``block``
(one value a block: reductions, constants, options). All values are float32; comparisons give
masks.
"""

import math
from dataclasses import dataclass
from typing import Literal

from hipress_torch._errors import CodecError

Level = Literal["element", "block"]
Number = float | int

UNARY = ("neg", "abs", "floor", "sqrt")
BINARY = ("add", "sub", "mul", "div", "min", "max")
COMPARE = ("lt", "le", "eq")
REDUCE = ("sum", "amin", "amax")


@dataclass(frozen=True, eq=False)
class Value:
    """A node: an operation, what it is applied to, and its level.

    Attributes:
        op: the operation's name.
        args: the nodes it is applied to.
        level: ``element`` or ``block``.
        mask: whether the value is a truth value.
        constant: a constant's value, an option's name, or the index of a block's side value.
    """

    op: str
    args: tuple["Value", ...] = ()
    level: Level = "element"
    mask: bool = False
    constant: float | str | int | None = None

    def __add__(self, other: "Value | Number") -> "Value":
        return apply("add", self, other)

    def __radd__(self, other: Number) -> "Value":
        return apply("add", other, self)

    def __sub__(self, other: "Value | Number") -> "Value":
        return apply("sub", self, other)

    def __rsub__(self, other: Number) -> "Value":
        return apply("sub", other, self)

    def __mul__(self, other: "Value | Number") -> "Value":
        return apply("mul", self, other)

    def __rmul__(self, other: Number) -> "Value":
        return apply("mul", other, self)

    def __truediv__(self, other: "Value | Number") -> "Value":
        return apply("div", self, other)

    def __rtruediv__(self, other: Number) -> "Value":
        return apply("div", other, self)

    def __neg__(self) -> "Value":
        return apply("neg", self)

    def __abs__(self) -> "Value":
        return apply("abs", self)

    def __lt__(self, other: "Value | Number") -> "Value":
        return apply("lt", self, other)

    def __le__(self, other: "Value | Number") -> "Value":
        return apply("le", self, other)

    def __gt__(self, other: "Value | Number") -> "Value":
        return apply("lt", other, self)

    def __ge__(self, other: "Value | Number") -> "Value":
        return apply("le", other, self)

    def __eq__(self, other: object) -> "Value":  # type: ignore[override]
        return apply("eq", self, _as_value(other))

    def __ne__(self, other: object) -> "Value":  # type: ignore[override]
        return apply("not", apply("eq", self, _as_value(other)))

    __hash__ = object.__hash__

    def __and__(self, other: "Value") -> "Value":
        return apply("and", self, other)

    def __or__(self, other: "Value") -> "Value":
        return apply("or", self, other)

    def __invert__(self) -> "Value":
        return apply("not", self)

    def __bool__(self) -> bool:
        raise CodecError(
            "a traced value has no truth value: use ops.where(mask, a, b) in place of `if` or "
            "`and`/`or` (and `&`, `|`, `~` to combine masks)"
        )

    def __iter__(self) -> "Value":
        raise CodecError(f"a traced value ({self.op}) cannot be iterated or unpacked")


def _as_value(value: object) -> Value:
    if isinstance(value, Value):
        return value
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise CodecError(f"expected a number or a traced value, got {value!r}")
    if not math.isfinite(value):
        raise CodecError(f"constants of a codec must be finite, got {value!r}")
    return Value("const", level="block", constant=float(value))


def apply(op: str, *operands: Value | Number) -> Value:
    """Returns the node for ``op`` over ``operands``; numbers become constants.

    Raises:
        CodecError: a mask where a number is needed, or the other way round.
    """
    args = tuple(_as_value(a) for a in operands)
    logical = op in ("and", "or", "not")
    numbers = args[1:] if op == "where" else args
    if op == "where" and not args[0].mask:
        raise CodecError("ops.where: the first argument must be a mask (a comparison)")
    for a in numbers:
        if a.mask != logical:
            got, need = ("a mask", "a number") if a.mask else ("a number", "a mask (a comparison)")
            raise CodecError(f"`{op}` got {got}, needs {need}; ops.where converts masks to numbers")
    level: Level = "element" if any(a.level == "element" for a in args) else "block"
    return Value(op, args, level, mask=logical or op in COMPARE)


def reduce(op: str, value: Value) -> Value:
    """Returns the node that reduces an element-wise value to one value a block."""
    value = _as_value(value)
    if value.level == "block":
        raise CodecError(f"ops.{op}: the argument is already one value a block")
    if op == "sum" and value.op == "not":
        # Counts are exact in float32: what a mask leaves out need not be counted too.
        return apply("sub", Value("length", level="block"), reduce(op, value.args[0]))
    if value.mask:
        value = apply("where", value, 1.0, 0.0)
    return Value(op, (value,), "block")


def walk(*roots: Value) -> list[Value]:
    """Returns every node under ``roots`` once, arguments before users."""
    seen: dict[int, Value] = {}

    def visit(node: Value) -> None:
        if id(node) not in seen:
            for a in node.args:
                visit(a)
            seen[id(node)] = node

    for root in roots:
        visit(root)
    return list(seen.values())


def key_of(node: Value) -> str:
    """Returns a text that two graphs share exactly when they compute the same thing."""
    names: dict[int, str] = {}
    lines = []
    for n in walk(node):
        names[id(n)] = f"v{len(names)}"
        lines.append(f"{n.op}({','.join(names[id(a)] for a in n.args)};{n.constant!r})")
    return "|".join(lines)
