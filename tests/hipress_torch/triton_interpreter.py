"""Compares the interpreted Triton kernels with the reference; run as a program, see test_triton.py.

Triton's own functions are interpreted only if the variable is set before triton is imported, so
this needs a process to itself.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime.interpreter import InterpretedFunction

from hipress_torch import codecs
from hipress_torch._compll._algorithm import ProgramCodec
from hipress_torch._triton import TritonKernels
from hipress_torch.codecs import Batch, Codec, Segment
from hipress_torch.codecs._sparse_triton import SparseKernels
from tests.hipress_torch.cases import PROGRAMS, SPARSE


def compare(name: str, options: dict[str, object]) -> None:
    c = codecs.get(name)(**{"block": 128, **options})
    kernels = TritonKernels(c.program, InterpretedFunction)
    generator = torch.Generator().manual_seed(3)
    for counts in ((1, 64), (5, 300), (129,)):
        grad_at, wire_at, segments = 2, 16, []
        for i, count in enumerate(counts):
            segments.append(Segment(grad_at, grad_at + 1, count, wire_at, 2**62 + i, 9 * i))
            grad_at += count + 3
            wire_at += c.wire_bytes(count)
        batch = Batch(tuple(segments))
        for messages, feedback in ((0, True), (2, True), (1, False)):
            grad = torch.randn(grad_at, generator=generator)
            start = torch.randn(grad_at + 8, generator=generator) * 0.1
            incoming = torch.zeros(messages, wire_at, dtype=torch.uint8)
            for m in range(messages):
                other = torch.randn(grad_at, generator=generator)
                Codec.encode(c, batch, other, 1.0, None, None, incoming[m], m)
            given = incoming if messages else None
            wires, residuals = [], []
            for kind in ("reference", "kernel"):
                residual = start.clone() if feedback else None
                wire = torch.zeros(wire_at, dtype=torch.uint8)
                arguments = (batch, grad, 0.5, residual, given, wire, 2**63 + 5)
                if kind == "reference":
                    flags = Codec.encode(c, *arguments)
                else:
                    flags = kernels.encode(*arguments, c._values)
                assert not flags.any()
                wires.append(wire)
                residuals.append(residual)
            out = [torch.full((grad_at,), float("nan")) for _ in wires]
            Codec.decode(c, batch, wires[0], out[0])
            kernels.decode(batch, wires[0], out[1], c._values)
            assert torch.equal(out[0].nan_to_num(7.0), out[1].nan_to_num(7.0)), (name, counts)
            Codec.decode(c, batch, wires[1], out[1])
            torch.testing.assert_close(out[1], out[0], rtol=2e-6, atol=2e-6, equal_nan=True)
            if feedback:
                torch.testing.assert_close(residuals[1], residuals[0], rtol=2e-6, atol=2e-6)
    bad = torch.randn(grad_at, generator=generator)
    bad[5] = float("inf")
    residual = torch.zeros(grad_at + 8)
    flags = kernels.encode(batch, bad, 1.0, residual, None, wires[0].clone(), 1, c._values)
    assert flags.tolist() == [1] + [0] * (len(counts) - 1)
    assert torch.isfinite(residual).all()
    compare_huge(c, kernels, generator)


def compare_huge(c: ProgramCodec, kernels: TritonKernels, generator: torch.Generator) -> None:
    """Finite values that overflow in a sum: the same blocks are refused, and left alone."""
    batch = Batch((Segment(0, 0, 300, 16, 5, 0),))
    grad = torch.randn(300, generator=generator)
    grad[:128] = torch.where(grad[:128] < 0.0, -3e38, 3e38)
    start = torch.randn(300, generator=generator)
    for feedback in (True, False):
        kept = []
        for kind in ("reference", "kernel"):
            given, residual = grad.clone(), start.clone() if feedback else None
            wire = torch.zeros(16 + c.wire_bytes(300), dtype=torch.uint8)
            if kind == "reference":
                flags = Codec.encode(c, batch, given, 1.0, residual, None, wire, 3)
            else:
                flags = kernels.encode(batch, given, 1.0, residual, None, wire, 3, c._values)
            kept.append((flags.tolist(), given.isnan(), residual))
        assert kept[0][0] == kept[1][0], (c, kept)
        assert torch.equal(kept[0][1], kept[1][1]), c
        if feedback:
            torch.testing.assert_close(kept[1][2], kept[0][2], rtol=2e-6, atol=2e-6)
    if c.name == "onebit":
        assert kept[1][0] == [1]


def compare_sparse(ratio: float, chunk: int) -> None:
    """Encodes, merges and decodes with the sparse kernels; all bytes are those of the reference."""
    c = codecs.get("dgc")(ratio=ratio, momentum=0.5)
    kernels = SparseKernels(InterpretedFunction, chunk)
    generator = torch.Generator().manual_seed(7)
    grad_at, wire_at, segments = 2, 16, []
    for i, count in enumerate((1, 64, 200, 333)):
        segments.append(Segment(grad_at, grad_at + 1, count, wire_at, i, 0))
        grad_at += count + 3
        wire_at += c.wire_bytes(count)
    batch = Batch(tuple(segments))
    incoming = torch.zeros(2, wire_at, dtype=torch.uint8)
    for m in range(2):
        Codec.encode(
            c, batch, torch.randn(grad_at, generator=generator), 1.0, None, None, incoming[m], m
        )
    normal = torch.randn(grad_at, generator=generator)
    # Ties beyond what a message holds, in one segment nothing but zeros, and one bad value.
    level = normal.sign() * (normal.abs() * 2).floor()
    level[segments[1].grad : segments[1].grad + 64] = 0.0
    broken = normal.clone()
    broken[segments[2].grad + 190] = float("nan")
    tiny = normal * 1e-42
    for given in (normal, level, broken, tiny, torch.full((grad_at,), 3.0)):
        for messages, feedback in ((0, True), (2, True), (1, False)):
            kept = []
            for kind in ("reference", "kernel"):
                grad = given.clone()
                residual = torch.linspace(-0.5, 0.5, grad_at + 8) if feedback else None
                wire = torch.full((wire_at,), 255 if kind == "kernel" else 0, dtype=torch.uint8)
                wire[:16] = 0
                more = incoming[:messages] if messages else None
                if kind == "reference":
                    flags = Codec.encode(c, batch, grad, 0.5, residual, more, wire, 1)
                else:
                    flags = kernels.encode(batch, c.ranges(batch), grad, 0.5, residual, more, wire)
                out = torch.full((grad_at,), 7.0)
                velocity = torch.ones(grad_at + 8)
                if kind == "reference":
                    Codec.decode(c, batch, wire, out)
                    c.clear_sent(batch, wire, velocity)
                else:
                    kernels.decode(batch, c.ranges(batch), wire, out)
                    kernels.clear(batch, c.ranges(batch), wire, velocity)
                kept.append((flags, grad, residual, wire, out, velocity))
            reference, kernel = kept
            assert torch.equal(reference[0], kernel[0])
            assert torch.equal(reference[1].isnan(), kernel[1].isnan())
            if feedback:
                assert torch.equal(reference[2], kernel[2])
            for s, bad in zip(segments, reference[0].tolist(), strict=True):
                if not bad:
                    at = slice(s.wire, s.wire + c.wire_bytes(s.count))
                    assert torch.equal(reference[3][at], kernel[3][at])
                    at = slice(s.grad, s.grad + s.count)
                    assert torch.equal(reference[4][at], kernel[4][at])
                    at = slice(s.residual, s.residual + s.count)
                    assert torch.equal(reference[5][at], kernel[5][at])


if __name__ == "__main__":
    for name, options in PROGRAMS:
        compare(name, options)
        print(name, options)
    for ratio, chunk in SPARSE:
        compare_sparse(ratio, chunk)
        print("sparse", ratio, chunk)
    sys.exit(0)
