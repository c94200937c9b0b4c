"""The Triton kernels: interpreted against the reference, compiled ahead of time, and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hipress_torch import codecs
from hipress_torch.codecs import Batch, Codec, Segment, _sparse_triton
from tests.hipress_torch.cases import CODECS, NAMES, PROGRAMS, SPARSE

pytest.importorskip("triton", reason="triton is not installed on this platform")

ROOT = Path(__file__).parents[2]
TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)]


def test_interpreted_kernels_match_the_reference():
    done = subprocess.run(
        [sys.executable, "-m", "tests.hipress_torch.triton_interpreter"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(PROGRAMS) + len(SPARSE)


@pytest.mark.parametrize("name", ["onebit", "terngrad", "tbq", "fp16", "bf16", "none"])
@pytest.mark.parametrize("target", TARGETS, ids=[f"{b}-{a}" for b, a, _ in TARGETS])
def test_kernels_compile_ahead_of_time(name, target, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from hipress_torch._triton import compile_ahead

    encode, decode = compile_ahead(codecs.get(name)().program, *target)
    binary = "cubin" if target[0] == "cuda" else "hsaco"
    assert encode.asm[binary]
    assert decode.asm[binary]
    # 228 KB a multiprocessor on Hopper; more than a few would keep blocks from running side by
    # side.
    assert encode.metadata.shared <= 16_384


@pytest.mark.parametrize("target", TARGETS, ids=[f"{b}-{a}" for b, a, _ in TARGETS])
def test_sparse_kernels_compile_ahead_of_time(target, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = _sparse_triton.compile_ahead(*target)
    assert sorted(made) == sorted(_sparse_triton.NAMES)
    binary = "cubin" if target[0] == "cuda" else "hsaco"
    for kernel in made.values():
        assert kernel.asm[binary]
        assert kernel.metadata.shared <= 16_384


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "options"), CODECS, ids=NAMES)
@pytest.mark.parametrize("messages", [0, 3])
def test_kernels_on_a_device_match_the_reference(name, options, messages):
    c = codecs.get(name)(**options)
    generator = torch.Generator().manual_seed(3)
    segments, grad_at, wire_at = [], 0, 16
    for i, count in enumerate((1, 63, 5000, 100_003)):
        segments.append(Segment(grad_at, grad_at, count, wire_at, 2**62 + i, 11 * i))
        grad_at += count + 5
        wire_at += c.wire_bytes(count)
    batch = Batch(tuple(segments))
    grad = torch.randn(grad_at, generator=generator)
    start = torch.randn(grad_at, generator=generator) * 0.1
    incoming = torch.zeros(max(messages, 1), wire_at, dtype=torch.uint8)
    for m in range(messages):
        Codec.encode(c, batch, torch.randn(grad_at), 1.0, None, None, incoming[m], m)
    results = []
    for device in ("cpu", "cuda"):
        residual = start.clone().to(device)
        wire = torch.zeros(wire_at, dtype=torch.uint8, device=device)
        given = incoming.to(device) if messages else None
        flags = c.encode(batch, grad.to(device), 0.25, residual, given, wire, 2**63 + 1)
        out = torch.full((grad_at,), 7.0, device=device)
        c.decode(batch, wire, out)
        assert not flags.any()
        results.append((residual.cpu(), out.cpu(), wire.cpu()))
    (r0, o0, w0), (r1, o1, _) = results
    # A sum in another order may move a value across a threshold: few may differ.
    assert (~torch.isclose(o0, o1, rtol=1e-4, atol=1e-5)).float().mean() < 1e-3
    assert (~torch.isclose(r0, r1, rtol=1e-4, atol=1e-5)).float().mean() < 1e-3
    again = torch.full((grad_at,), 7.0, device="cuda")
    c.decode(batch, w0.cuda(), again)
    assert torch.equal(again.cpu(), o0)
