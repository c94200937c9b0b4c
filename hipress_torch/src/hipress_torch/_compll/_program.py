"""A traced codec: the graphs of its encoder and decoder for one choice of structural options."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hipress_torch._compll._graph import Value, key_of, walk
from hipress_torch._errors import CodecError
from hipress_torch.ops import Packed


@dataclass(frozen=True, eq=False)
class Program:
    """One traced codec.

    Attributes:
        name: the codec's name.
        block: elements that share one set of side values.
        bits: bits of one code.
        format: ``uint`` or a floating-point format.
        code: codes as a function of the block's elements.
        sides: float32 values sent with each block.
        value: decoded elements as a function of codes and side values.
        options: names of the options that are read when the kernel runs, in order.
    """

    name: str
    block: int
    bits: int
    format: str
    code: Value
    sides: tuple[Value, ...]
    value: Value
    options: tuple[str, ...]

    @cached_property
    def random(self) -> bool:
        """Whether the codes depend on random numbers."""
        return any(n.op == "uniform" for n in walk(self.code, *self.sides))

    @cached_property
    def digest(self) -> str:
        """Twelve hex digits that name the kernels: equal programs share them."""
        parts = [
            f"{self.block} {self.bits} {self.format} {self.options}",
            key_of(self.code),
            *(key_of(s) for s in self.sides),
            key_of(self.value),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def wire_bytes(self, count: int) -> int:
        """Returns the bytes ``count`` elements take: side values, codes, padded to 16."""
        blocks = -(-count // self.block)
        return -(-(self.side_bytes(blocks) + -(-count * self.bits // 8)) // 16) * 16

    def side_bytes(self, blocks: int) -> int:
        """Returns the bytes of the side values of ``blocks`` blocks, which precede the codes."""
        return 4 * len(self.sides) * blocks


def trace(
    name: str,
    encoder: Callable[..., object],
    decoder: Callable[..., object],
    block: int,
    static: Mapping[str, object],
    dynamic: tuple[str, ...],
    decoder_options: frozenset[str],
) -> Program:
    """Runs the two functions on traced values and returns the program.

    Raises:
        CodecError: they return something else than the contract of :func:`hipress_torch.codec`
            says.
    """
    options = {**static, **{d: Value("option", level="block", constant=d) for d in dynamic}}
    returned = encoder(Value("x"), **options)
    code, *sides = returned if isinstance(returned, tuple) else (returned,)
    if not isinstance(code, Packed):
        raise CodecError(
            f"codec {name!r}: the encoder must return ops.pack(...) first, got "
            f"{type(code).__name__}"
        )
    for i, side in enumerate(sides):
        if not isinstance(side, Value) or side.level != "block" or side.mask:
            raise CodecError(
                f"codec {name!r}: value {i + 1} after ops.pack(...) must be one number a block, "
                f"as a reduction gives"
            )
    leaves = [Value("side", level="block", constant=i) for i in range(len(sides))]
    try:
        value = decoder(
            Value("code"), *leaves, **{k: v for k, v in options.items() if k in decoder_options}
        )
    except TypeError as error:
        raise CodecError(
            f"codec {name!r}: the decoder must take the code and the {len(sides)} side values the "
            f"encoder returns ({error})"
        ) from error
    if not isinstance(value, Value) or value.level != "element" or value.mask:
        raise CodecError(f"codec {name!r}: the decoder must return one number an element")
    if any(n.op in ("uniform", "sum", "amin", "amax") for n in walk(value)):
        raise CodecError(f"codec {name!r}: a decoder may use neither random numbers nor reductions")
    return Program(name, block, code.bits, code.format, code.value, tuple(sides), value, dynamic)
