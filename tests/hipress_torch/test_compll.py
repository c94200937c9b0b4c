"""The decorator: what it refuses, and that the generated C in the repository is current."""

from pathlib import Path

import pytest
import torch

from hipress_torch import CodecError, codec, codecs, ops
from hipress_torch._compll import _hashing
from hipress_torch._native import _generate, _loader, _toolchain


def test_the_generated_c_is_what_the_codecs_give():
    assert _generate.TARGET.read_text(encoding="utf-8") == _generate.source(), (
        "run python -m hipress_torch._native._generate"
    )


def encoder_of(body):
    return codec()(body)


def no_pack(x):
    return x


def side_not_block(x):
    return ops.pack(x >= 0, bits=1), x * 2


def mask_as_number(x):
    return ops.pack((x > 0) + 1, bits=2)


def number_as_mask(x):
    return ops.pack(ops.where(x, 1, 0), bits=1)


def python_if(x):
    return ops.pack(x if x > 0 else -x, "float32")


def infinite(x):
    return ops.pack(x * float("inf"), "float32")


def mask_as_float(x):
    return ops.pack(x > 0, "float16")


def reduce_twice(x):
    return ops.pack(x, "float32"), ops.sum(ops.sum(x))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (no_pack, r"must return ops.pack"),
        (side_not_block, r"value 1 after ops.pack.*one number a block"),
        (mask_as_number, r"`add` got a mask"),
        (number_as_mask, r"first argument must be a mask"),
        (python_if, r"use ops.where"),
        (infinite, r"must be finite"),
        (mask_as_float, r"a mask has no floating-point format"),
        (reduce_twice, r"already one value a block"),
    ],
)
def test_a_wrong_encoder_is_refused(body, told):
    with pytest.raises(CodecError, match=told):
        encoder_of(body)()


def test_a_wrong_decoder_is_refused():
    @codec()
    def signs(x):
        return ops.pack(x >= 0, bits=1), ops.mean(ops.abs(x))

    @signs.decoder
    def signs(code):
        return code

    with pytest.raises(CodecError, match=r"the decoder must take the code and the 1 side values"):
        signs()

    with pytest.raises(CodecError, match=r"no option \['nope'\]"):
        signs.decoder(lambda code, size, *, nope: code)


def test_a_decoder_must_not_reduce_or_draw():
    @codec()
    def signs(x):
        return ops.pack(x >= 0, bits=1)

    signs.decoder(lambda code: code * ops.uniform())
    with pytest.raises(CodecError, match="neither random numbers nor reductions"):
        signs()


@pytest.mark.parametrize("block", [0, 63, 100, 1 << 17])
def test_a_wrong_block_is_refused(block):
    with pytest.raises(CodecError, match="multiple of 64"):
        codec(block=block)(no_pack)


def test_options_need_keywords_and_defaults():
    with pytest.raises(CodecError, match=r"write it as def"):
        codec()(lambda x, bits: ops.pack(x, bits))
    with pytest.raises(CodecError, match=r"option 'bits' needs a default"):
        codec()(lambda x, *, bits: ops.pack(x, bits))


def test_uniform_numbers_are_uniform_and_uncorrelated():
    position = torch.arange(200_000)
    u = _hashing.uniform(position, _hashing.stream_of(0, 5, 0), 77)
    assert float(u.min()) >= 0.0
    assert float(u.max()) < 1.0
    counts = torch.histc(u, 100, 0.0, 1.0)
    # chi-square with 99 degrees of freedom: 99 +- 14
    assert 50 < float(((counts - 2000) ** 2 / 2000).sum()) < 160
    for other in (
        _hashing.uniform(position, _hashing.stream_of(0, 6, 0), 77),
        _hashing.uniform(position, _hashing.stream_of(0, 5, 1), 77),
        _hashing.uniform(position, _hashing.stream_of(1, 5, 0), 77),
        _hashing.uniform(position, _hashing.stream_of(0, 5, 0), 78),
        _hashing.uniform(position + 1, _hashing.stream_of(0, 5, 0), 77),
    ):
        assert abs(float(torch.corrcoef(torch.stack([u, other]))[0, 1])) < 0.01


def test_without_a_compiler_the_reference_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("HIPRESS_TORCH_CACHE", str(tmp_path))
    monkeypatch.setattr(_loader, "compiler", lambda: None)

    @codec(block=128)
    def rare(x):
        return ops.pack(x * 0.9375 > 0.015625, bits=1)

    assert rare().backend == "torch"
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.skipif(_toolchain.compiler() is None, reason="needs a C compiler")
def test_a_codec_from_elsewhere_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.delenv("HIPRESS_TORCH_KERNELS", raising=False)
    monkeypatch.setenv("HIPRESS_TORCH_CACHE", str(tmp_path))

    @codec(block=128)
    def rare(x):
        return ops.pack(x * 0.8125 > 0.03125, bits=1)

    assert rare().backend in _loader.instruction_sets()
    assert len(list(tmp_path.iterdir())) == 1
    assert rare().backend in _loader.instruction_sets()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(_toolchain.compiler() is None, reason="needs a C compiler")
def test_a_failed_compilation_falls_back(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("HIPRESS_TORCH_CACHE", str(tmp_path))
    monkeypatch.setattr(_loader, "flags_of", lambda instructions: ["-not-a-flag"])

    @codec(block=128)
    def rare(x):
        return ops.pack(x * 0.6875 > 0.0625, bits=1)

    assert rare().backend == "torch"
    assert "rare runs without a compiled kernel" in caplog.text


def test_repr_names_options():
    assert repr(codecs.get("nbit")(bits=2)) == "nbit(bits=2, random=True)"
    assert "1-bit" not in repr(codecs.get("onebit"))
