"""Codecs: the conformance suite on every backend, each definition against one by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hipress_torch import CodecError, ConformanceError, UnknownCodecError, codec, codecs, ops
from hipress_torch._compll._emit_c import TUNED
from hipress_torch._native import _loader
from hipress_torch.codecs import Batch, Codec, Draw, Segment
from hipress_torch.testing import check_codec
from tests.hipress_torch.cases import CODECS, NAMES

BACKENDS = (*_loader.instruction_sets(), "off")


def round_trip(c: Codec, x: torch.Tensor, stream: int = 1) -> torch.Tensor:
    batch = Batch((Segment(0, 0, x.numel(), 0, 5, 0),))
    wire = torch.zeros(c.wire_bytes(x.numel()), dtype=torch.uint8)
    out = torch.full_like(x, float("nan"))
    c.encode(batch, x, 1.0, None, None, wire, stream)
    c.decode(batch, wire, out)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "options"), CODECS, ids=NAMES)
def test_conformance(name, options, backend, monkeypatch, tmp_path):
    monkeypatch.setenv("HIPRESS_TORCH_KERNELS", backend)
    monkeypatch.setenv("HIPRESS_TORCH_CACHE", str(tmp_path))
    report = check_codec(codecs.get(name)(**options))
    if backend == "off":
        assert report.backend == "torch"
    elif _loader.compiler() and _loader.shared("hp_sparse_encode"):
        assert report.backend == backend


def test_onebit_is_sign_and_the_means_of_both_sides():
    x = torch.tensor([3.0, 1.0, -2.0, -4.0, 0.0, -0.0])
    assert round_trip(codecs.get("onebit")(), x).tolist() == [1.0, 1.0, -3.0, -3.0, 1.0, 1.0]


def test_onebit_of_one_sign_only_has_no_nan():
    assert round_trip(codecs.get("onebit")(), torch.full((70,), -2.0)).tolist() == [-2.0] * 70


def test_tbq_sends_tau_beyond_tau_and_nothing_else():
    x = torch.tensor([0.5, 0.50001, -0.6, 0.1, -0.5, 9.0])
    out = round_trip(codecs.get("tbq")(tau=0.5, relative=False), x)
    assert out.tolist() == [0.0, 0.5, -0.5, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_terngrad_rounds_to_a_neighbouring_level(bits):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    out = round_trip(codecs.get("terngrad")(bits=bits, block=4096), x)
    for part, got in zip(x.split(4096), out.split(4096), strict=True):
        gap = (part.max() - part.min()) / (2**bits - 1)
        assert ((got - part).abs() <= gap * 1.001).all()
        levels = (got - part.min()) / gap
        assert torch.allclose(levels, levels.round(), atol=1e-3)


def test_random_rounding_depends_on_stream_parameter_and_position_alone():
    c = codecs.get("nbit")()
    x = torch.randn(1024, generator=torch.Generator().manual_seed(1))
    assert torch.equal(round_trip(c, x, 7), round_trip(c, x, 7))
    assert not torch.equal(round_trip(c, x, 7), round_trip(c, x, 8))
    # The second half alone, told its position, gives what it gave as part of the whole.
    wire = torch.zeros(c.wire_bytes(512), dtype=torch.uint8)
    out = torch.zeros(512)
    half = Batch((Segment(0, 0, 512, 0, 5, 512),))
    c.encode(half, x[512:].clone(), 1.0, None, None, wire, 7)
    c.decode(half, wire, out)
    assert torch.equal(out, round_trip(c, x, 7)[512:])


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_casts_round_as_torch_does(name, dtype, backend, monkeypatch):
    monkeypatch.setenv("HIPRESS_TORCH_KERNELS", backend)
    g = torch.Generator().manual_seed(2)
    x = torch.cat([torch.randn(3000, generator=g) * 10.0**e for e in range(-9, 5)])
    limit = torch.finfo(dtype).max
    assert torch.equal(round_trip(codecs.get(name)(), x), x.clamp(-limit, limit).to(dtype).float())


@given(
    st.lists(
        st.floats(
            width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99
        ),
        min_size=1,
        max_size=200,
    ),
    st.sampled_from(["onebit", "terngrad", "nbit", "tbq"]),
)
def test_any_finite_values_survive_with_feedback(values, name):
    c = codecs.get(name)()
    x = torch.tensor(values)
    batch = Batch((Segment(0, 0, x.numel(), 0, 5, 0),))
    residual = torch.zeros(x.numel())
    wire = torch.zeros(c.wire_bytes(x.numel()), dtype=torch.uint8)
    out = torch.empty_like(x)
    assert c.encode(batch, x, 1.0, residual, None, wire, 3).tolist() == [0]
    c.decode(batch, wire, out)
    assert torch.isfinite(out).all()
    assert torch.isfinite(residual).all()
    assert torch.allclose(out + residual, x, rtol=1e-4, atol=1e-4 * float(x.abs().max()) + 1e-38)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["onebit", "tbq"])
def test_a_huge_gradient_is_refused_once_and_forgotten(name, backend, monkeypatch):
    monkeypatch.setenv("HIPRESS_TORCH_KERNELS", backend)
    c = codecs.get(name)()
    generator = torch.Generator().manual_seed(4)
    batch = Batch((Segment(0, 0, 4097, 0, 5, 0),))
    residual = torch.zeros(4097)
    wire = torch.zeros(c.wire_bytes(4097), dtype=torch.uint8)
    out, flags = torch.empty(4097), []
    for scale in (1.0, 8e37, 1.0, 1.0):
        grad = torch.randn(4097, generator=generator) * scale
        before = residual.clone()
        flags += c.encode(batch, grad, 1.0, residual, None, wire, 1).tolist()
        if flags[-1]:
            assert torch.equal(residual[:4096], before[:4096])
            c.undo(batch, grad, 1.0, residual, None, wire)
            assert torch.equal(residual[:4096], before[:4096])
    assert flags == [0, 1, 0, 0]
    c.decode(batch, wire, out)
    assert out[:4096].abs().max() < 100
    assert residual.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["onebit", "graddrop", "fp16"])
@pytest.mark.parametrize("messages", [0, 2])
def test_gradient_and_residual_that_overflow_only_together_are_refused(
    name, backend, messages, monkeypatch
):
    monkeypatch.setenv("HIPRESS_TORCH_KERNELS", backend)
    c = codecs.get(name)()
    batch = Batch((Segment(0, 0, 8192, 0, 5, 0),))
    incoming = torch.zeros(messages, c.wire_bytes(8192), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(4)
    for message in incoming:
        c.encode(batch, torch.randn(8192, generator=generator), 1.0, None, None, message, 1)
    grad = torch.randn(8192, generator=generator)
    residual = torch.randn(8192, generator=generator)
    grad[7], residual[7] = 3e38, 3e38
    before = residual.clone()
    wire = torch.zeros(c.wire_bytes(8192), dtype=torch.uint8)
    given = incoming if messages else None
    assert c.encode(batch, grad, 1.0, residual, given, wire, 1).tolist() == [1]
    assert torch.equal(residual[:4096], before[:4096])
    # A sparse segment is coded as a whole, the others in blocks.
    assert torch.equal(residual, before) == (name == "graddrop")
    assert grad[:4096].isnan().all()


def test_the_tuned_kernel_is_that_of_the_codec_it_is_for():
    assert TUNED[codecs.get("onebit")().program.digest][1] == "hp_onebit_block"
    assert codecs.get("onebit")(block=64).program.digest not in TUNED


def test_the_suite_refuses_a_codec_that_a_huge_gradient_poisons():
    class Poisoned(Halves):
        def compress(self, x_N: torch.Tensor, wire: torch.Tensor, draw: Draw) -> None:
            super().compress(x_N + (x_N.sum() - x_N.sum()), wire, draw)

        def encode(self, batch, grad, scale, residual, incoming, wire, stream):
            flags = super().encode(batch, grad, scale, residual, incoming, wire, stream)
            if residual is not None:
                at = [slice(s.grad, s.grad + s.count) for s in batch.segments]
                for s, a, flag in zip(batch.segments, at, flags.tolist(), strict=True):
                    if flag and not grad[a].isinf().any() and s.count > 70:
                        residual[s.residual : s.residual + s.count] = torch.inf
            return flags

    with pytest.raises(ConformanceError, match="spoils the residual"):
        check_codec(Poisoned())


def test_available_names_all_and_imports_on_demand():
    names = codecs.available()
    assert {"onebit", "tbq", "terngrad", "nbit", "fp16", "bf16", "none"} <= set(names)
    assert list(names) == sorted(names)


def test_unknown_codec_says_what_there_is():
    with pytest.raises(UnknownCodecError, match=r"'onbit'.*installed: .*onebit"):
        codecs.get("onbit")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"bit": 2}, r"no option 'bit'; it has: bits, random, block"),
        ({"bits": "2"}, r"bits must be int, got str '2'"),
        ({"bits": 3}, r"bits must be one of \(1, 2, 4, 8\)"),
        ({"bits": True}, r"bits must be int, got bool"),
        ({"block": 100}, r"multiple of 64"),
    ],
)
def test_wrong_options_are_named(options, told):
    with pytest.raises(CodecError, match=told):
        codecs.get("nbit")(**options)


class Halves(Codec):
    """A codec in plain torch: every number halved and sent as float32."""

    name = "halves"

    def __init__(self, lossy: float = 0.5) -> None:
        self.lossy = lossy
        self.feedback = True
        self.granularity = 64

    def wire_bytes(self, count: int) -> int:
        return -(-count // 4) * 16

    def compress(self, x_N: torch.Tensor, wire: torch.Tensor, draw: Draw) -> None:
        raw = (x_N * self.lossy).view(torch.uint8)
        wire.zero_()
        wire[: raw.numel()] = raw

    def expand(self, wire: torch.Tensor, out_N: torch.Tensor) -> None:
        out_N.copy_(wire[: 4 * out_N.numel()].clone().view(torch.float32))


def test_a_codec_of_plain_torch_passes_the_suite():
    report = check_codec(Halves())
    assert report.backend == "torch"
    assert math.isclose(report.relative_error, 0.5, rel_tol=1e-5)


def test_the_suite_refuses_a_codec_that_loses_for_good():
    class Forgets(Halves):
        def encode(self, batch, grad, scale, residual, incoming, wire, stream):
            return super().encode(batch, grad, scale, None, incoming, wire, stream)

    with pytest.raises(ConformanceError, match="residual"):
        check_codec(Forgets())


def test_the_suite_refuses_wrong_sizes():
    class Odd(Halves):
        def wire_bytes(self, count: int) -> int:
            return 4 * count

    with pytest.raises(ConformanceError, match="multiple of 16"):
        check_codec(Odd())


@codec(feedback=True, block=256)
def three_levels(x, *, sharpness: float = 1.5):
    size = ops.mean(ops.abs(x))
    big = ops.abs(x) > size * sharpness
    level = ops.where(big, ops.where(x > 0, 2, 0), 1)
    return ops.pack(level, bits=2), size


@three_levels.decoder
def three_levels(code, size, *, sharpness):
    return (code - 1) * size * sharpness * 1.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_codec_of_a_dozen_lines_passes_the_suite(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("HIPRESS_TORCH_KERNELS", backend)
    monkeypatch.setenv("HIPRESS_TORCH_CACHE", str(tmp_path))
    report = check_codec(three_levels(sharpness=1.0))
    assert report.bits_per_element < 2.2


def test_graddrop_sends_the_largest_and_keeps_the_rest():
    c = codecs.get("graddrop")(ratio=0.1)
    x = torch.tensor([0.1, -5.0, 0.2, 3.0, -0.3, 0.0, 0.4, 0.5, 0.6, 0.7] * 2)
    batch = Batch((Segment(0, 0, 20, 0, 5, 0),))
    wire = torch.zeros(c.wire_bytes(20), dtype=torch.uint8)
    residual, out = torch.zeros(20), torch.empty(20)
    c.encode(batch, x, 1.0, residual, None, wire, 0)
    c.decode(batch, wire, out)
    assert torch.nonzero(out).view(-1).tolist() == [1, 11]
    assert torch.equal(out + residual, x)
    # The next round sends what waited, though nothing is added.
    c.encode(batch, torch.zeros(20), 1.0, residual, None, wire, 0)
    c.decode(batch, wire, out)
    assert torch.nonzero(out).view(-1).tolist() == [3, 13]


def test_dgc_warms_up_to_its_share():
    c = codecs.get("dgc")(ratio=0.001, warmup=40)
    shares = [c.at(i).ratio for i in range(41)]
    assert shares[0] == 0.25
    assert shares[-1] == 0.001
    assert shares == sorted(shares, reverse=True)
    assert c.at(3) is c.at(4)


@pytest.mark.parametrize(
    "options", [{"ratio": 0}, {"momentum": 1.0}, {"clip": -1}, {"warmup": 2.5}]
)
def test_dgc_refuses_wrong_options(options):
    with pytest.raises(CodecError, match=next(iter(options))):
        codecs.get("dgc")(**options)
