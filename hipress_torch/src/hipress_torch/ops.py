"""The operators a codec is written in.

Every value is float32. ``x`` and what is computed from it element by element has one value an
element; reductions, options and numbers have one value a block, and the two mix freely.
"""

from dataclasses import dataclass

from hipress_torch._compll._graph import Number, Value, apply, reduce
from hipress_torch._errors import CodecError

FORMATS = ("float32", "float16", "bfloat16")
BITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Packed:
    """What :func:`pack` returns: the codes and how they are laid out on the wire.

    Attributes:
        value: the traced codes.
        bits: bits of one code on the wire.
        format: ``uint`` for small integers, else the floating-point format.
    """

    value: Value
    bits: int
    format: str


def abs(x: Value) -> Value:  # the operators are read as ops.abs, ops.min
    """Returns the absolute value."""
    return apply("abs", x)


def floor(x: Value) -> Value:
    """Returns the largest whole number not above ``x``."""
    return apply("floor", x)


def sqrt(x: Value) -> Value:
    """Returns the square root; ``x`` must not be negative."""
    return apply("sqrt", x)


def minimum(a: Value | Number, b: Value | Number) -> Value:
    """Returns the smaller of two values, element by element."""
    return apply("min", a, b)


def maximum(a: Value | Number, b: Value | Number) -> Value:
    """Returns the larger of two values, element by element."""
    return apply("max", a, b)


def clip(x: Value, low: Value | Number, high: Value | Number) -> Value:
    """Returns ``x`` limited to ``[low, high]``."""
    return apply("min", apply("max", x, low), high)


def where(mask: Value, a: Value | Number, b: Value | Number) -> Value:
    """Returns ``a`` where the mask holds and ``b`` elsewhere."""
    return apply("where", mask, a, b)


def sum(x: Value) -> Value:
    """Returns the block's sum; of a mask, how many elements it holds for."""
    return reduce("sum", x)


def min(x: Value) -> Value:
    """Returns the block's smallest value."""
    return reduce("amin", x)


def max(x: Value) -> Value:
    """Returns the block's largest value."""
    return reduce("amax", x)


def mean(x: Value, where: Value | None = None) -> Value:
    """Returns the block's mean, over the elements where the mask holds (0 if it holds for none)."""
    if where is None:
        return apply("div", reduce("sum", x), length())
    total = reduce("sum", apply("where", where, x, 0.0))
    return apply("div", total, apply("max", reduce("sum", where), 1.0))


def length() -> Value:
    """Returns the number of elements of the block (the last block of a tensor may be short)."""
    return Value("length", level="block")


def uniform() -> Value:
    """Returns a random number in [0, 1) for each element.

    It is a function of (seed, iteration, parameter, position) and of nothing else, the same on
    every
    backend: the upper 24 bits of a keyed integer hash. Each call gives the same numbers within a
        codec.
    """
    return Value("uniform")


def pack(value: Value, bits: int | str) -> Packed:
    """Returns the codes to send, as the first value a codec's encoder returns.

    Args:
        value: a mask, or whole numbers from 0 to ``2**bits - 1`` (others are rounded down and
            limited to that range); for a floating-point format, the numbers themselves.
        bits: 1, 2, 4 or 8 bits for each code, or ``"float32"``, ``"float16"``, ``"bfloat16"``.

    Raises:
        CodecError: ``bits`` is none of these, or ``value`` is not one value an element.
    """
    if not isinstance(value, Value) or value.level != "element":
        raise CodecError("ops.pack: the codes must be one value an element, computed from x")
    if bits in FORMATS:
        if value.mask:
            raise CodecError("ops.pack: a mask has no floating-point format; use bits=1")
        return Packed(value, 32 if bits == "float32" else 16, str(bits))
    if bits not in BITS:
        raise CodecError(f"ops.pack: bits must be one of {BITS} or {FORMATS}, got {bits!r}")
    if value.mask:
        value = apply("where", value, 1.0, 0.0)
    return Packed(value, int(bits), "uint")
