"""The checks every codec has to pass, whoever wrote it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hipress_torch._codec import Batch, Codec, Segment
from hipress_torch._errors import ConformanceError

COUNTS = (1, 2, 7, 63, 64, 65, 127, 1000, 4095, 4096, 4097, 12_345)
_STREAM = 0x1234_5678_9ABC_DEF0


@dataclass(frozen=True)
class CodecReport:
    """What :func:`check_codec` measured.

    Attributes:
        backend: what coded: ``torch`` or an instruction set.
        bits_per_element: wire bits an element, for the largest size checked.
        relative_error: norm of what one encode of normal numbers loses, over their norm.
        checks: how many comparisons were made.
    """

    backend: str
    bits_per_element: float
    relative_error: float
    checks: int


class _Suite:
    def __init__(self, codec: Codec, tolerance: float) -> None:
        self.codec = codec
        self.tolerance = tolerance
        self.checks = 0
        self.generator = torch.Generator().manual_seed(20_26)

    def require(self, holds: bool, what: str) -> None:
        self.checks += 1
        if not holds:
            raise ConformanceError(f"codec {self.codec!r}: {what}")

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def batch(self, counts: Sequence[int]) -> tuple[Batch, int, int]:
        """Returns segments with odd gaps between them, and the sizes of both buffers."""
        grad, wire = 3, 16
        segments = []
        for i, count in enumerate(counts):
            segments.append(Segment(grad, grad + 16, count, wire, 77 + i, 5 * i))
            grad += count + 5
            wire += self.codec.wire_bytes(count)
        return Batch(tuple(segments)), grad + 32, wire

    def close(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> bool:
        return bool(torch.allclose(a, b, rtol=self.tolerance, atol=self.tolerance * scale))

    def sizes(self) -> None:
        sizes = [self.codec.wire_bytes(n) for n in COUNTS]
        self.require(all(s > 0 and s % 16 == 0 for s in sizes), "wire_bytes is no multiple of 16")
        self.require(sizes == sorted(sizes), "wire_bytes falls where the count grows")

    def against_reference(self, counts: Sequence[int], messages: int, feedback: bool) -> None:
        """The batch functions give what compress and expand of each segment give."""
        c = self.codec
        batch, elements, size = self.batch(counts)
        grad = self.normal(elements)
        start = self.normal(elements + 32) * 0.1
        incoming = torch.zeros(messages, size, dtype=torch.uint8)
        for m in range(messages):
            Codec.encode(c, batch, self.normal(elements), 1.0, None, None, incoming[m], m)
        given = incoming if messages else None
        results = []
        for encode in (Codec.encode, type(c).encode):
            residual = start.clone() if feedback else None
            wire = torch.zeros(size, dtype=torch.uint8)
            # Poisoned, so that bytes the codec leaves out are seen.
            wire[16:] = 0xA5
            bad = encode(c, batch, grad, 0.5, residual, given, wire, _STREAM)
            self.require(not bool(bad.any()), "finite values were flagged as not finite")
            out = torch.full((elements,), float("nan"))
            c.decode(batch, wire, out)
            results.append((residual, out))
            gaps = torch.ones(elements, dtype=torch.bool)
            for s in batch.segments:
                gaps[s.grad : s.grad + s.count] = False
            self.require(bool(out[gaps].isnan().all()), "decode wrote outside of its segments")
            self.require(bool(torch.isfinite(out[~gaps]).all()), "decode left values out")
            if residual is not None:
                self.conserved(batch, grad, start, residual, incoming, out)
        inside = ~gaps
        ours, theirs = results[1][1][inside], results[0][1][inside]
        apart = ~torch.isclose(ours, theirs, rtol=self.tolerance, atol=self.tolerance)
        # A sum in another order may move a threshold past a value that lies on it.
        self.require(
            int(apart.sum()) <= 1 + sum(counts) // 2000,
            f"encode differs from compress ({counts} elements, {messages} messages)",
        )
        self.require(bool((wire[:16] == 0).all()), "encode wrote before its segment")
        again = torch.zeros_like(wire)
        again[16:] = 0x5A
        type(c).encode(
            c, batch, grad, 0.5, start.clone() if feedback else None, given, again, _STREAM
        )
        self.require(bool((again == wire).all()), "the same input gives other bytes")
        reference = torch.full((elements,), float("nan"))
        Codec.decode(c, batch, wire, reference)
        self.require(
            bool((reference[inside] == out[inside]).all()),
            "decode differs from expand, bit for bit",
        )

    def conserved(
        self,
        batch: Batch,
        grad: torch.Tensor,
        before: torch.Tensor,
        after: torch.Tensor,
        incoming: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """What went in is what is sent plus what is kept."""
        received = torch.zeros_like(grad)
        part = torch.zeros_like(grad)
        for message in incoming:
            Codec.decode(self.codec, batch, message, part)
            received += part
        for s in batch.segments:
            at, kept = slice(s.grad, s.grad + s.count), slice(s.residual, s.residual + s.count)
            given = grad[at] * 0.5 + before[kept] + received[at]
            self.require(
                self.close(given, out[at] + after[kept], float(given.abs().max())),
                f"the residual of {s.count} elements is not what the message lost",
            )
        untouched = torch.ones(after.numel(), dtype=torch.bool)
        for s in batch.segments:
            untouched[s.residual : s.residual + s.count] = False
        self.require(
            bool((after[untouched] == before[untouched]).all()),
            "the residual was written outside of its segments",
        )

    def not_finite(self) -> None:
        """A bad value is reported, and the residual stays as it was where it is."""
        batch, elements, size = self.batch((100, 70))
        for value in (float("inf"), float("-inf"), float("nan")):
            grad = self.normal(elements)
            grad[batch.segments[1].grad + 33] = value
            residual = self.normal(elements + 32)
            before = residual.clone()
            wire = torch.zeros(size, dtype=torch.uint8)
            bad = self.codec.encode(batch, grad, 1.0, residual, None, wire, _STREAM)
            self.require(bad.tolist() == [0, 1], f"{value} was not reported for its segment alone")
            self.require(bool(torch.isfinite(residual).all()), f"{value} reached the residual")
            self.codec.undo(batch, grad, 1.0, residual, None, wire)
            self.require(self.close(residual, before, 4.0), "undo does not restore the residual")

    def huge(self, magnitude: float, feedback: bool) -> None:
        """A finite but huge gradient is sent or reported; either way the next step is sound."""
        batch, elements, size = self.batch((100, 4097))
        residual = self.normal(elements + 32) if feedback else None
        wire = torch.zeros(size, dtype=torch.uint8)
        out = torch.zeros(elements)
        what = f"a gradient of {magnitude:g}"
        for step, scale in enumerate((1.0, magnitude, 1.0)):
            grad = self.normal(elements)
            if scale != 1.0:
                grad = torch.where(grad < 0.0, -scale, scale)
            before = None if residual is None else residual.clone()
            bad = self.codec.encode(batch, grad, 1.0, residual, None, wire, _STREAM + step)
            self.require(scale != 1.0 or not bool(bad.any()), f"{what} spoils the steps after it")
            self.codec.decode(batch, wire, out)
            for s, reported in zip(batch.segments, bad.tolist(), strict=True):
                sent = torch.isfinite(out[s.grad : s.grad + s.count])
                self.require(reported or bool(sent.all()), f"{what} is sent as not finite")
            if residual is None or before is None:
                continue
            self.require(bool(torch.isfinite(residual).all()), f"{what} spoils the residual")
            if bool(bad.any()):
                self.codec.undo(batch, grad, 1.0, residual, None, wire)
            for s, reported in zip(batch.segments, bad.tolist(), strict=True):
                kept = slice(s.residual, s.residual + s.count)
                if reported:
                    marked = grad[s.grad : s.grad + s.count].isnan()
                    left = (residual[kept] == before[kept]) | ~marked
                    self.require(bool(marked.any()), f"{what} is not marked for undo")
                    self.require(bool(left.all()), f"{what} changes a residual it must not")

    def repeats(self) -> tuple[float, float]:
        """Over many encodes of one gradient the mean of what arrives is that gradient."""
        count, rounds = 2048, 400
        batch, elements, size = self.batch((count,))
        grad = self.normal(elements)
        residual = torch.zeros(elements + 32) if self.codec.feedback else None
        at = slice(3, 3 + count)
        total, out = torch.zeros(count), torch.zeros(elements)
        wire = torch.zeros(size, dtype=torch.uint8)
        first = 0.0
        for i in range(rounds):
            self.codec.encode(batch, grad, 1.0, residual, None, wire, i * 0x9E3779B97F4A7C15 >> 3)
            self.codec.decode(batch, wire, out)
            total += out[at]
            if i == 0:
                first = float((out[at] - grad[at]).norm() / grad[at].norm())
        bias = float((total / rounds - grad[at]).norm() / grad[at].norm())
        # Feedback leaves one residual in all; unbiased rounding leaves first / sqrt(rounds).
        self.require(
            bias < max(0.15, first / 8), f"the mean of {rounds} encodes is off by {bias:.3f}"
        )
        return first, bias


def check_codec(codec: Codec, *, tolerance: float = 2e-5) -> CodecReport:
    """Checks a codec against what the engine relies on; returns what was measured.

    Checked: sizes; the batch functions (kernels, where there are some) against ``compress`` and
    ``expand`` for odd counts, offsets, several segments and messages; that decoding is the same
    bit for bit; that message and residual add up to what went in; that only the segments are
    written, all of them; equal bytes for equal input; values that are not finite, and finite
    ones whose sums are not; that errors do not accumulate.

    Args:
        codec: the codec, with its options.
        tolerance: relative difference allowed between kernels and reference (sums in another
            order).

    Raises:
        ConformanceError: a check fails; says which.

    Example:
        >>> from hipress_torch import codecs
        >>> check_codec(codecs.get("onebit")()).bits_per_element < 1.1
        True
    """
    suite = _Suite(codec, tolerance)
    suite.sizes()
    for count in COUNTS:
        for feedback in (True, False):
            suite.against_reference((count,), 0, feedback)
    for messages in (1, 3):
        suite.against_reference((5, 4097, 64), messages, True)
        suite.against_reference((129,), messages, False)
    suite.against_reference((), 0, True)
    suite.not_finite()
    for magnitude in (1e38, 3e38):
        for feedback in (True, False):
            suite.huge(magnitude, feedback)
    error, _ = suite.repeats()
    largest = 1 << 20
    return CodecReport(codec.backend, codec.wire_bytes(largest) * 8 / largest, error, suite.checks)
