"""Quantizers: what they keep exactly, what they lose, and what they refuse."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bifeat_pyg import (
    SQ,
    VQ,
    Dequantize,
    FeatureError,
    FormatError,
    NonFiniteError,
    SpecError,
    paper,
    quantizers,
)
from bifeat_pyg._fit import encode, learn
from bifeat_pyg._rows import TensorSource
from bifeat_pyg.kernels import cpu

from .graphs import SPECS, features, name


def packed(x, spec, nan="error"):
    source = TensorSource(x)
    codec = learn(source, spec, nan)
    codes, errors = encode(source, codec, nan)
    return codec, codes, errors


def round_trip(x, spec):
    codec, codes, _ = packed(x, spec)
    return codec.decode(codes)


@pytest.mark.filterwarnings("ignore:only .* rows to fit")
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_bytes_shape_and_error_are_what_the_report_says(spec):
    x = features()
    codec, codes, errors = packed(x, spec)
    out = codec.decode(codes)
    assert codes.dtype == torch.uint8
    assert codes.shape == (400, codec.row_bytes)
    assert out.shape == x.shape
    assert out.dtype == torch.float32
    assert torch.isfinite(out).all()
    squared = (out - x).double().square().sum(0)
    torch.testing.assert_close(errors.squared, squared, rtol=1e-5, atol=1e-9)
    assert errors.relative == pytest.approx(float((out - x).norm() / x.norm()), rel=1e-4)
    # Worse than storing nothing would be a defect of any quantizer that fits its data.
    assert errors.relative < 1


# The mean squared error of the best uniform grid for a normal distribution (Max 1960, table II).
@pytest.mark.parametrize(("bits", "expected"), [(1, 0.3634), (2, 0.1188), (4, 0.01154)])
def test_column_scale_reaches_the_known_optimum_of_a_normal_distribution(bits, expected):
    x = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0))
    _, _, errors = packed(x, SQ(bits))
    mean = errors.squared / 20_000
    assert torch.allclose(mean, torch.full((3,), expected, dtype=torch.float64), rtol=0.04)


def test_more_bits_lose_less():
    x = features(2000, 9)
    lost = [packed(x, SQ(bits))[2].relative for bits in (1, 2, 4, 8, 16)]
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] < 1e-4


def test_column_scale_beats_tensor_scale_where_columns_differ():
    x = features(2000, 12)
    column, tensor = (packed(x, SQ(4, scale=s))[2] for s in ("column", "tensor"))
    assert column.column_relative.max() < tensor.column_relative.max() / 3


def test_an_outlier_does_not_spend_the_codes():
    x = torch.randn(5000, 1, generator=torch.Generator().manual_seed(0))
    x[17] = 1e4
    fitted, spanning = (round_trip(x, SQ(4, fit_range=f)) for f in ("mse", "minmax"))
    others = torch.arange(5000) != 17
    assert (fitted - x)[others].square().mean() <= (spanning - x)[others].square().mean()


EXACT = {
    "bool": torch.rand(70, 9) < 0.3,
    "int8": torch.randint(-3, 12, (70, 9), dtype=torch.int8),
    "int64 offset": torch.randint(1000, 1016, (70, 9)),
    "uint8": torch.randint(0, 16, (70, 9), dtype=torch.uint8),
    "constant float": torch.full((70, 9), 0.1),
    "zeros": torch.zeros(70, 9),
    "0/1 float": (torch.rand(70, 9) < 0.3).float(),
    "grid of 16 floats": torch.arange(144).remainder(16).reshape(9, 16).t().float() * 0.25 - 1,
}


@pytest.mark.parametrize("kind", EXACT)
def test_what_fits_is_exact(kind):
    x = EXACT[kind]
    assert torch.equal(round_trip(x, SQ(4)), x.float())


def test_bools_take_one_bit():
    codec, codes, _ = packed(torch.rand(10, 16) < 0.5, SQ(8))
    assert codes.shape == (10, 2)
    assert codec.spec.bits == 1


@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 20),
    bits=st.sampled_from((1, 2, 4, 8, 16)),
    scale=st.sampled_from(("column", "tensor")),
    seed=st.integers(0, 1000),
)
def test_minmax_error_is_at_most_half_a_step(rows, columns, bits, scale, seed):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    codec, codes, _ = packed(x, SQ(bits, scale, fit_range="minmax"))
    limit = codec.params["step"] / 2 * (1 + 1e-4) + 1e-6
    assert ((codec.decode(codes) - x).abs() <= limit).all()


@pytest.mark.filterwarnings("ignore:only .* rows to fit")
@pytest.mark.parametrize("spec", SPECS, ids=name)
@pytest.mark.parametrize("shape", [(0, 6), (6, 0), (1, 5), (7,), (5, 3, 4)])
def test_odd_shapes_come_back(spec, shape):
    x = torch.randn(shape)
    codec, codes, _ = packed(x, spec)
    assert codec.decode(codes).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_float_dtypes(dtype):
    x = features(100, 5).to(dtype)
    expected = round_trip(x.float(), SQ(8))
    assert torch.equal(round_trip(x, SQ(8)), expected)
    assert torch.equal(round_trip(x.float().numpy(), SQ(8)), expected)


def test_not_contiguous_is_read_right():
    x = features(60, 40)
    assert torch.equal(round_trip(x[:, ::2], SQ(4)), round_trip(x[:, ::2].contiguous(), SQ(4)))
    assert torch.equal(round_trip(x.t()[::2], SQ(4)), round_trip(x.t()[::2].contiguous(), SQ(4)))
    assert torch.equal(round_trip(x.numpy()[::-1], SQ(4)), round_trip(x.flip(0), SQ(4)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_is_refused_with_its_place(bad):
    x = features(5000, 4)
    x[4321, 2] = x[4900, 0] = bad
    with pytest.raises(NonFiniteError, match=r"2 value\(s\).* row 4321, column 2") as caught:
        packed(x, SQ(4))
    assert (caught.value.count, caught.value.row, caught.value.column) == (2, 4321, 2)
    codec, codes, _ = packed(x, SQ(8), nan="zero")
    assert codec.decode(codes)[4321, 2].abs() < 0.1


def test_masked_values_are_missing_ones():
    x = np.ma.masked_array(features(9, 4).numpy(), np.zeros((9, 4), bool))
    assert torch.equal(round_trip(x, SQ(8)), round_trip(x.data, SQ(8)))
    x[5, 2] = np.ma.masked
    with pytest.raises(NonFiniteError, match="row 5, column 2"):
        packed(x, SQ(4))
    codec, codes, _ = packed(x, SQ(16), nan="zero")
    assert codec.decode(codes)[5, 2].abs() < 1e-3


def test_a_double_beyond_float32_is_refused():
    with pytest.raises(NonFiniteError):
        packed(torch.tensor([[1e300]], dtype=torch.float64), SQ(4))


WIDE = {
    "column": (torch.tensor([[0.0, 3e38], [1, -3e38], [2, 1]]), SQ(4), "column 1 .* -3e[+]38"),
    "minmax": (torch.tensor([[3e38], [-3e38]]), SQ(1, fit_range="minmax"), "column 0"),
    "tensor": (torch.tensor([[3e38, 0], [3e38, -3e38]]), SQ(4, scale="tensor"), "Scale or clip"),
    "vq": (torch.randn(99, 8).clamp(-3, 3) * 1e38, VQ(3, 4), "squared distances"),
    "vq cosine": (torch.ones(99, 8) * 1e19, VQ(8, 4, metric="cosine"), "1e[+]19"),
}


@pytest.mark.parametrize("case", WIDE)
def test_a_range_beyond_float32_is_refused(case):
    x, spec, message = WIDE[case]
    with pytest.raises(FeatureError, match=message):
        packed(x, spec)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("fit_range", ["mse", "minmax"])
def test_what_nearly_fills_float32_stays_finite(bits, fit_range):
    x = torch.linspace(-1.7e38, 1.7e38, 500).reshape(-1, 1)
    codec, codes, errors = packed(x, SQ(bits, fit_range=fit_range))
    assert torch.isfinite(codec.decode(codes)).all()
    assert errors.relative < 1  # the squares alone overflow float32


REFUSED = {
    "range": (torch.tensor([[0], [16]]), "column 0 holds integers from 0 to 16"),
    "large": (torch.tensor([[1 << 30], [(1 << 30) + 1]]), "not exact in float32"),
    "sparse": (torch.eye(3).to_sparse(), "sparse"),
    "complex": (torch.zeros(2, 2, dtype=torch.complex64), "complex64"),
    "scalar": (torch.tensor(1.0), "single number"),
    "list": ([[1.0]], "list"),
    "meta": (torch.zeros(2, 2, device="meta"), "meta tensor"),
    "masked": (np.ma.masked_array([[1], [2]], [[0], [1]]), r"masks 1 value\(s\), and int64"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unusable_features_are_refused(kind):
    x, message = REFUSED[kind]
    with pytest.raises(FeatureError, match=message):
        packed(x, SQ(4))


def test_vq_refuses_integers_and_shrinks_to_few_rows():
    with pytest.raises(FeatureError, match="VQ does not keep integers exact"):
        packed(torch.zeros(4, 4, dtype=torch.int64), VQ(2, 2))
    with pytest.warns(UserWarning, match="only 5 rows to fit codebooks of 256"):
        codec, codes, _ = packed(features(5, 8), VQ(8, 256))
    # As many entries as rows: every row is its own entry.
    assert torch.allclose(codec.decode(codes), features(5, 8), atol=1e-6)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_vq_finds_clusters(native, metric, monkeypatch):
    if not native:
        monkeypatch.setattr(cpu, "available", lambda: False)
    centers = torch.nn.functional.normalize(torch.randn(8, 6), dim=1) * 10
    x = centers.repeat_interleave(200, 0) + torch.randn(1600, 6) * 0.01
    _, _, errors = packed(x, VQ(6, 32, metric=metric))
    assert errors.relative < 0.01


@pytest.mark.parametrize("native", [True, False])
def test_vq_is_as_good_as_another_k_means(native, monkeypatch):
    from sklearn.cluster import KMeans

    if not native:
        monkeypatch.setattr(cpu, "available", lambda: False)
    x = torch.randn(8000, 3, generator=torch.Generator().manual_seed(0))
    other = [
        KMeans(32, init="random", n_init=1, random_state=seed).fit(x.numpy()).inertia_
        for seed in range(3)
    ]
    ours = [float(packed(x, VQ(3, 32, seed=seed))[2].squared.sum()) for seed in range(3)]
    assert sum(ours) < 1.03 * sum(other)


@pytest.mark.parametrize("native", [True, False])
def test_stages_lose_less_for_the_same_bytes(native, monkeypatch):
    if not native:
        monkeypatch.setattr(cpu, "available", lambda: False)
    x = features(2000, 24)
    x = torch.cat((x, x @ torch.randn(24, 24, generator=torch.Generator().manual_seed(1))), dim=1)
    specs = VQ(8, 32), VQ(16, 32, stages=2), VQ(48, 32, stages=6)
    found = [packed(x, spec) for spec in specs]
    assert [codec.row_bytes for codec, _, _ in found] == [6, 6, 6]
    one, two, six = (errors.relative for _, _, errors in found)
    assert six < two < one
    codec, codes, _ = found[2]
    book, chosen = codec.params["codebook"], codec.codes(codes)
    back = sum(book[stage][chosen[:, stage]] for stage in range(6))
    assert torch.equal(codec.decode(codes), back)


def test_vq_is_deterministic():
    x = features(3000, 16)
    first, second = (packed(x, VQ(8, 64, stages=2))[0] for _ in range(2))
    other = packed(x, VQ(8, 64, seed=1))[0]
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != other.fingerprint


# The published formulas, stated a second time and without shared code.


def published_decode(codes, low, high, bits):
    half = 2 ** (bits - 1)
    first, last = torch.log2(torch.tensor([low, high], dtype=torch.float64))
    k = codes.double() - half + 0.5
    return torch.sign(k) * 2 ** (k.abs() * (last - first) / half + first)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_paper_scale_decodes_as_published(bits):
    x = features(3000, 7)
    codec, codes, _ = packed(x, paper.sq(bits))
    magnitude = x.abs().double().flatten()
    low = max(float(torch.quantile(magnitude, 0.005)), 1e-5)
    high = max(float(torch.quantile(magnitude, 0.995)), 2e-5)
    from bifeat_pyg.kernels import reference

    raw = reference.unpack(codes, bits, 7)
    expected = published_decode(raw, low, high, bits)
    torch.testing.assert_close(codec.decode(codes).double(), expected, rtol=1e-5, atol=0)
    clipped = x.abs().double().clamp(low, high)
    first, last = math.log2(low), math.log2(high)
    level = ((clipped.log2() - first) / (last - first) * 2 ** (bits - 1)).floor()
    level = level.clamp_max(2 ** (bits - 1) - 1)
    mine = torch.where(x > 0, raw - 2 ** (bits - 1), 2 ** (bits - 1) - 1 - raw)
    # A value within rounding of a boundary may fall on either side of it.
    assert ((mine - level).abs() <= 1).all()
    assert ((mine == level).float().mean()) > 0.999


def test_paper_one_bit_is_the_sign_times_the_mean():
    x = features(500, 6)
    codec, codes, _ = packed(x, paper.sq(1))
    mean = x.abs().mean()
    torch.testing.assert_close(codec.decode(codes), torch.where(x > 0, mean, -mean))
    small = x / x.abs().mean() * 0.05
    codec, codes, _ = packed(small, paper.sq(1))
    torch.testing.assert_close(codec.decode(codes).abs().max(), torch.tensor(0.15))


BAD_SPECS = [
    (lambda: SQ(3), "bits is 3; allowed are 1, 2, 4, 8, 16"),
    (lambda: SQ(True), "bits is True"),
    (lambda: SQ(4.0), "bits is 4.0"),
    (lambda: SQ([4]), r"bits is \[4\]"),
    (lambda: SQ(seed="a"), "seed is 'a'"),
    (lambda: SQ(seed=-1), "seed is -1"),
    (lambda: VQ(seed=1 << 70), "seed is 1180591620717411303424; .* from 0"),
    (lambda: SQ(4, "row"), "scale is 'row'"),
    (lambda: SQ(4, fit_range="x"), "fit_range is 'x'"),
    (lambda: SQ(4, sample_rows=0), "sample_rows is 0"),
    (lambda: VQ(0), "width is 0"),
    (lambda: VQ(8, 1), "length is 1"),
    (lambda: VQ(8, 256, "dot"), "metric is 'dot'"),
    (lambda: VQ(8, stages=0), "stages is 0"),
    (lambda: VQ(8, metric="cosine", stages=2), "stages is 2 with metric 'cosine'"),
    (lambda: SQ.from_dict({"bit": 4}), "not understood"),
    (lambda: quantizers.get("nope"), "installed: sq, vq"),
]


@pytest.mark.parametrize(("make", "message"), BAD_SPECS, ids=[m for _, m in BAD_SPECS])
def test_bad_specs_say_what_is_allowed(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_the_extension_point_finds_the_built_in_ones():
    assert {"sq", "vq"} <= set(quantizers.available())
    assert quantizers.get("sq") is SQ
    assert quantizers.get("vq") is VQ


@pytest.mark.filterwarnings("ignore:only .* rows to fit")
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_codecs_survive_pickle_and_restore(spec):
    assert type(spec).from_dict(spec.to_dict()) == spec
    codec, codes, _ = packed(features(300, 10), spec)
    assert pickle.loads(pickle.dumps(codec)) is codec
    again = codec.spec.restore(codec.columns, codec.params)
    assert again.fingerprint == codec.fingerprint
    assert torch.equal(again.decode(codes), codec.decode(codes))
    with pytest.raises(FormatError):
        codec.spec.restore(codec.columns, {})


def test_decode_refuses_floats_and_narrow_rows():
    codec, codes, _ = packed(features(9, 8), SQ(4))
    with pytest.raises(FormatError, match="already dequantized"):
        codec.decode(codec.decode(codes))
    with pytest.raises(FormatError, match=r"\[N, 4\]"):
        codec.decode(codes[:, :3])


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, "float32", None])
def test_decode_to_what_is_no_float_is_refused(dtype):
    codec, codes, _ = packed(features(9, 8), SQ(4))
    for use in (lambda: codec.decode(codes, dtype), lambda: Dequantize(codec, dtype)):
        with pytest.raises(SpecError, match="dequantized to a float dtype"):
            use()
