"""The ``codec`` decorator, and the codec it makes of two traced functions."""

import inspect
from collections.abc import Callable, Mapping

import torch

from hipress_torch import _triton
from hipress_torch._codec import Batch, Codec, Draw
from hipress_torch._compll import _hashing, _reference
from hipress_torch._compll._program import Program, trace
from hipress_torch._errors import CodecError
from hipress_torch._native import _loader


class Algorithm:
    """A codec before its options are chosen: call it with options to get a :class:`Codec`.

    Attributes:
        name: the name of the function it was made from.
        options: the options and their defaults.
        summary: the first line of the function's docstring.
    """

    def __init__(self, encoder: Callable[..., object], feedback: bool, block: int) -> None:
        if block % 64 or not 64 <= block <= 65536:
            raise CodecError(f"codec: block must be a multiple of 64 from 64 to 65536, got {block}")
        self.name = encoder.__name__
        self.feedback = feedback
        self.block = block
        self.summary = (inspect.getdoc(encoder) or "").partition("\n")[0]
        self._encoder = encoder
        self._decoder: Callable[..., object] = _identity
        parameters = list(inspect.signature(encoder).parameters.values())
        if not parameters or any(p.kind is not p.KEYWORD_ONLY for p in parameters[1:]):
            raise CodecError(
                f"codec {self.name!r}: write it as def {self.name}(x, *, option=default)"
            )
        self.options: dict[str, float | int | str | bool] = {}
        for p in parameters[1:]:
            if not isinstance(p.default, float | int | str | bool):
                raise CodecError(
                    f"codec {self.name!r}: option {p.name!r} needs a default that is a number, "
                    f"a text or a truth value"
                )
            self.options[p.name] = p.default

    def decoder(self, decode: Callable[..., object]) -> "Algorithm":
        """Sets the decoder: a function of the codes and side values, and of options by keyword.

        Raises:
            CodecError: it names an option that the encoder does not have.
        """
        named = self._options_of(decode)
        if unknown := named - set(self.options):
            raise CodecError(f"codec {self.name!r}: the encoder has no option {sorted(unknown)}")
        self._decoder = decode
        return self

    def __call__(
        self, *, block: int | None = None, **options: float | int | str | bool
    ) -> "ProgramCodec":
        """Returns the codec with these options.

        Args:
            block: elements that share one set of side values, in place of the codec's own.
            options: options of the codec; whole numbers, texts and truth values select how it is
                built, fractions are read while it runs.

        Raises:
            CodecError: an unknown option, a wrong type, or a value the codec refuses.
        """
        chosen = dict(self.options)
        for key, value in options.items():
            if key not in chosen:
                allowed = ", ".join(chosen) or "none"
                raise CodecError(
                    f"codec {self.name!r} has no option {key!r}; it has: {allowed}, block"
                )
            default = chosen[key]
            if (
                isinstance(default, float)
                and isinstance(value, int)
                and not isinstance(value, bool)
            ):
                value = float(value)
            if type(value) is not type(default):
                raise CodecError(
                    f"codec {self.name!r}: {key} must be {type(default).__name__}, "
                    f"got {type(value).__name__} {value!r}"
                )
            chosen[key] = value
        size = self.block if block is None else block
        if size % 64 or not 64 <= size <= 65536:
            raise CodecError(
                f"codec {self.name!r}: block must be a multiple of 64 from 64 to 65536, got {size}"
            )
        dynamic = tuple(k for k, v in chosen.items() if isinstance(v, float))
        static = {k: v for k, v in chosen.items() if k not in dynamic}
        program = trace(
            self.name,
            self._encoder,
            self._decoder,
            size,
            static,
            dynamic,
            frozenset(self._options_of(self._decoder)),
        )
        return ProgramCodec(program, chosen, self.feedback)

    @staticmethod
    def _options_of(function: Callable[..., object]) -> set[str]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

    def __repr__(self) -> str:
        return f"<codec {self.name}: {self.summary}>"


def codec(
    *, feedback: bool = False, block: int = 4096
) -> Callable[[Callable[..., object]], Algorithm]:
    """Returns a decorator that makes a codec of a function over :mod:`hipress_torch.ops`.

    The function takes a block of the gradient, ``x``, and returns ``ops.pack(codes, bits)`` and any
    number of values to send with the block. Keyword-only arguments are the codec's options. Its
    decoder takes the codes and those values. From the two come the encoder with error feedback,
    the decoder, the merge of several messages, the size on the wire, the reference and the
    kernels.

    Args:
        feedback: whether what is lost is kept and added to the next gradient by default.
        block: elements that share one set of side values; a multiple of 64.

    Raises:
        CodecError: ``block`` or the function's arguments are wrong.

    Example:
        >>> from hipress_torch import codec, ops
        >>> @codec(feedback=True)
        ... def signs(x):
        ...     return ops.pack(x >= 0, bits=1), ops.mean(ops.abs(x))
        >>> @signs.decoder
        ... def signs(code, size):
        ...     return ops.where(code == 1, size, -size)
        >>> signs().wire_bytes(4096)
        528
    """

    def decorate(encoder: Callable[..., object]) -> Algorithm:
        return Algorithm(encoder, feedback, block)

    return decorate


def _identity(code: object) -> object:
    return code


class ProgramCodec(Codec):
    """A codec made of a traced program: the reference, and the kernels where there are some."""

    def __init__(
        self, program: Program, options: Mapping[str, float | int | str | bool], feedback: bool
    ) -> None:
        self.program = program
        self.name = program.name
        self.options = options
        self.feedback = feedback
        self.granularity = program.block
        self._dynamic = {k: float(options[k]) for k in program.options}
        # One element at least: an empty tensor has no address to pass.
        self._values = torch.tensor([*self._dynamic.values(), 0.0], dtype=torch.float32)

    @property
    def backend(self) -> str:
        """What codes CPU tensors: an instruction set of the C kernels, or ``torch``."""
        kernels = _loader.find(self.program)
        return "torch" if kernels is None else kernels.instructions

    def _kernels(self, device: torch.device) -> "_loader.Kernels | _triton.TritonKernels | None":
        if device.type == "cpu":
            return _loader.find(self.program)
        return _triton.kernels(self.program) if device.type == "cuda" else None

    def encode(
        self,
        batch: Batch,
        grad: torch.Tensor,
        scale: float,
        residual: torch.Tensor | None,
        incoming: torch.Tensor | None,
        wire: torch.Tensor,
        stream: int,
    ) -> torch.Tensor:
        """Encodes with the compiled kernel where there is one; see :meth:`Codec.encode`."""
        kernels = self._kernels(grad.device)
        if kernels is None:
            return super().encode(batch, grad, scale, residual, incoming, wire, stream)
        return kernels.encode(batch, grad, scale, residual, incoming, wire, stream, self._values)

    def decode(self, batch: Batch, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Decodes with the compiled kernel where there is one; see :meth:`Codec.decode`."""
        kernels = self._kernels(out.device)
        if kernels is None:
            super().decode(batch, wire, out)
        else:
            kernels.decode(batch, wire, out, self._values)

    def wire_bytes(self, count: int) -> int:
        """Returns the bytes that ``count`` elements take: side values, then codes, padded to 16."""
        return self.program.wire_bytes(count)

    def compress(self, x_N: torch.Tensor, wire: torch.Tensor, draw: Draw) -> None:
        """Writes the elements with plain torch operations."""
        p = self.program
        codes, sides = [], []
        for rows_BC, first in _rows(x_N, p.block):
            random = None
            if p.random:
                position = torch.arange(rows_BC.numel(), device=x_N.device) + draw.position + first
                random = _hashing.uniform(position, draw.stream, draw.parameter).view(rows_BC.shape)
            code_BC, side_BS = _reference.encode_rows(p, rows_BC, random, self._dynamic)
            codes.append(code_BC.reshape(-1))
            sides.append(side_BS)
        head = torch.cat(sides).contiguous().view(-1).view(torch.uint8)
        body = _reference.pack_codes(torch.cat(codes), p.bits, p.format)
        wire[: head.numel()] = head
        wire[head.numel() : head.numel() + body.numel()] = body
        wire[head.numel() + body.numel() :] = 0

    def expand(self, wire: torch.Tensor, out_N: torch.Tensor) -> None:
        """Decodes with plain torch operations."""
        p = self.program
        count = out_N.numel()
        blocks = -(-count // p.block)
        split = p.side_bytes(blocks)
        side_BS = wire[:split].clone().view(torch.float32).view(blocks, len(p.sides))
        body = wire[split:] if split % 16 == 0 else wire[split:].clone()
        code_N = _reference.unpack_codes(body, count, p.bits, p.format)
        done = 0
        for rows_BC, first in _rows(code_N, p.block):
            side = side_BS[done : done + rows_BC.shape[0]]
            done += rows_BC.shape[0]
            decoded = _reference.decode_rows(p, rows_BC, side, self._dynamic)
            out_N[first : first + rows_BC.numel()] = decoded.reshape(-1)


def _rows(x_N: torch.Tensor, block: int) -> list[tuple[torch.Tensor, int]]:
    """Returns the full blocks as rows, then the short last one, each with its first position."""
    full = x_N.numel() // block * block
    parts = [(x_N[:full].view(-1, block), 0)] if full else []
    if full < x_N.numel():
        parts.append((x_N[full:].view(1, -1), full))
    return parts
