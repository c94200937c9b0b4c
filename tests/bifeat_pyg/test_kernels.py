"""Every kernel against the plain torch statement of it."""

import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bifeat_pyg import RowIndexError, _dispatch
from bifeat_pyg.kernels import cpu, reference

BITS = (1, 2, 4, 8, 16)
SHAPES = [(0, 5), (1, 1), (5, 0), (5, 7), (123, 33), (64, 128), (17, 129)]

needs_c = pytest.mark.skipif(not cpu.available(), reason="built without the C kernels")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def codes_of(rows, columns, bits, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, columns), generator=generator)


def scales_of(columns, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(columns, generator=generator), torch.rand(columns, generator=generator)


def index_of(rows, count=50, seed=2):
    count = count if rows else 0
    return torch.randint(0, max(rows, 1), (count,), generator=torch.Generator().manual_seed(seed))


def widened(packed):
    """The same rows, each in a wider one full of ones: what a file with padded rows looks like."""
    wide = torch.full((packed.shape[0], packed.shape[1] + 11), 255, dtype=torch.uint8)
    wide[:, : packed.shape[1]] = packed
    return wide


@given(
    bits=st.sampled_from(BITS),
    rows=st.integers(0, 9),
    columns=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_unpack_inverts_pack(bits, rows, columns, seed):
    codes = codes_of(rows, columns, bits, seed)
    packed = reference.pack(codes, bits)
    assert packed.shape == (rows, reference.row_bytes(columns, bits))
    assert torch.equal(reference.unpack(packed, bits, columns).long(), codes)


def test_packing_is_planar():
    # 5 columns of 2 bits: two bytes; byte j holds columns j, 2 + j, 4 + j from the top bits down.
    packed = reference.pack(torch.tensor([[1, 2, 3, 0, 2]]), 2)
    assert packed.tolist() == [[0b01_11_10_00, 0b10_00_00_00]]
    assert reference.pack(torch.tensor([[0x1234]]), 16).tolist() == [[0x34, 0x12]]


@needs_c
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
def test_c_affine_equals_reference(shape, bits):
    rows, columns = shape
    low, step = scales_of(columns)
    packed = reference.pack(codes_of(rows, columns, bits), bits)
    index = index_of(rows)
    for table in (packed, widened(packed)):
        for chosen in (None, index):
            count = rows if chosen is None else index.numel()
            out = torch.full((count, columns), torch.nan)
            cpu.affine(table, chosen, low, step, bits, out)
            expected = packed if chosen is None else packed[index]
            # Bit for bit, and every value written over the NaN.
            assert torch.equal(out, reference.affine_decode(expected, low, step, bits))


@needs_c
@pytest.mark.parametrize("columns", [64, 80, 1040])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_c_affine_of_results_larger_than_the_caches(bits, columns):
    # Written past the caches from 8 MiB on, and rows copied together in blocks.
    low, step = scales_of(columns)
    packed = reference.pack(codes_of(1000, columns, bits), bits)
    index = index_of(1000, 40_000 if columns < 100 else 2500)
    expected = reference.affine_decode(packed, low, step, bits)
    assert torch.equal(_dispatch.affine(packed, index, low, step, bits), expected[index])


@needs_c
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
def test_c_lut_and_encode_equal_reference(shape, bits):
    rows, columns = shape
    packed = reference.pack(codes_of(rows, columns, bits), bits)
    values = torch.randn(1 << bits)
    out = torch.full((rows, columns), torch.nan)
    cpu.lut(widened(packed), None, values, bits, out)
    assert torch.equal(out, reference.lut_decode(packed, values, bits, columns))

    low, step = scales_of(columns)
    step[::3] = 0  # constant columns
    x = torch.randn(rows, columns) * 3
    assert torch.equal(
        _dispatch.affine_encode(x, low, step, bits), reference.affine_encode(x, low, step, bits)
    )
    assert torch.equal(
        _dispatch.affine_encode(x.t().contiguous().t(), low, step, bits),
        reference.affine_encode(x, low, step, bits),
    )


@needs_c
@pytest.mark.parametrize("shape", SHAPES)
def test_c_errors_equal_torch(shape):
    x, y = torch.randn(shape) * 1e25, torch.randn(shape)  # squares overflow float32
    squared, power = torch.ones(2, shape[1], dtype=torch.float64)
    cpu.add_errors(x, y, squared, power)
    torch.testing.assert_close(squared, 1 + (y - x).double().square().sum(0))
    torch.testing.assert_close(power, 1 + x.double().square().sum(0))


def vector_case(parts, stages, length, width, columns, rows=40):
    code_bytes = 1 if length <= 256 else 2 if length <= 1 << 16 else 3
    codes = torch.randint(0, length, (rows, parts * stages))
    packed = torch.stack([(codes >> 8 * b & 255).byte() for b in range(code_bytes)], 2)
    book = torch.randn(parts * stages, length, width)
    packed = packed.reshape(rows, parts * stages * code_bytes)
    return packed, (book, stages, code_bytes, columns), codes


# Parts, stages, length, width, columns.
VECTORS = [
    (3, 1, 16, 8, 24), (2, 1, 300, 16, 30), (5, 1, 2, 4, 17), (1, 1, 70_000, 3, 2),
    (4, 1, 256, 8, 32), (2, 3, 16, 5, 7), (3, 4, 256, 32, 90), (2, 2, 500, 8, 16),
    (1, 16, 3, 128, 128), (2, 8, 9, 64, 65),
]  # fmt: skip


@pytest.mark.parametrize("case", VECTORS)
def test_vector_decode_adds_up_what_the_codes_say(case):
    packed, (book, stages, code_bytes, columns), codes = vector_case(*case)
    parts = []
    for first in range(0, len(book), stages):
        parts.append(sum(book[s][codes[:, s]] for s in range(first, first + stages)))
    expected = torch.cat(parts, dim=1)[:, :columns]
    given = book, stages, code_bytes, columns
    assert torch.equal(reference.vector_decode(packed, *given), expected)
    index = index_of(len(packed))
    assert torch.equal(_dispatch.vector(packed, None, *given), expected)
    assert torch.equal(_dispatch.vector(widened(packed), index, *given), expected[index])


@needs_c
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_the_rows(threads, monkeypatch):
    # From 8 MiB on; the last share is shorter.
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    packed, given, _ = vector_case(2, 2, 16, 64, 128, rows=300)
    index = index_of(300, 40_001)
    expected = reference.vector_decode(packed, *given)[index]
    assert torch.equal(_dispatch.vector(packed, index, *given), expected)
    assert torch.equal(_dispatch.vector(packed[index], None, *given), expected)
    low, step = scales_of(256)
    rows = codes_of(300, 256, 8).byte()
    expected = reference.affine_decode(rows, low, step, 8)[index]
    assert torch.equal(_dispatch.affine(rows, index, low, step, 8), expected)
    values = torch.randn(256)
    assert torch.equal(_dispatch.lut(rows, index, values, 8, 256), values[rows[index].long()])
    assert torch.equal(_dispatch.gather(rows, 256, index), rows[index])
    book = expected[:70]
    code, _ = cpu.assign(expected, book, book.square().sum(1) / 2)
    torch.testing.assert_close(book[code[:70]], book)  # each row of the book is its own nearest
    assert torch.equal(
        code,
        torch.cat([cpu.assign(e, book, book.square().sum(1) / 2)[0] for e in expected.split(1000)]),
    )
    damaged = packed[index].clone()
    damaged[39_000, 3] = 200
    with pytest.raises(ValueError, match="row 39000 holds a code outside"):
        _dispatch.vector(damaged, None, *given)


@needs_c
def test_c_refuses_a_code_outside_the_codebook():
    packed = torch.tensor([[0], [3], [9]], dtype=torch.uint8)
    with pytest.raises(ValueError, match="row 2 holds a code outside the codebook of 4"):
        _dispatch.vector(packed, None, torch.randn(1, 4, 8), 1, 1, 8)


@needs_c
def test_c_assigns_to_the_nearest():
    x, book = torch.randn(500, 9), torch.randn(37, 9)
    code, cost = cpu.assign(x, book, book.square().sum(1) / 2)
    distance = torch.cdist(x, book)
    assert torch.equal(code, distance.argmin(1))
    assert torch.allclose(2 * cost + x.square().sum(1), distance.min(1).values ** 2, atol=1e-4)


@needs_c
def test_gather_copies_rows():
    packed = torch.randint(0, 256, (50, 13), dtype=torch.uint8)
    index = index_of(50)
    assert torch.equal(_dispatch.gather(widened(packed), 13, index), packed[index])
    assert _dispatch.gather(packed, 13, index[:0]).shape == (0, 13)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("bad", [-1, 50, 1 << 40])
def test_no_kernel_reads_outside_the_table(bad, native, monkeypatch):
    if not native:
        monkeypatch.setattr(cpu, "available", lambda: False)
    packed = torch.zeros(50, 4, dtype=torch.uint8)
    index = torch.tensor([3, bad])
    low, step = scales_of(8)
    for call in (
        lambda: _dispatch.gather(packed, 4, index),
        lambda: _dispatch.affine(packed, index, low, step, 4),
        lambda: _dispatch.lut(packed, index, torch.randn(16), 4, 8),
        lambda: _dispatch.vector(packed, index, torch.randn(4, 2, 2), 1, 1, 8),
    ):
        with pytest.raises(RowIndexError, match=rf"index\[1\] is {bad}; allowed are 0 to 49"):
            call()


# Triton, in its interpreter: the same Python functions that are compiled for a GPU.


@pytest.fixture
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    from bifeat_pyg.kernels import triton_gather

    for kernel in ("scalar", "vector"):
        function = InterpretedFunction(getattr(triton_gather, f"_{kernel}"))
        monkeypatch.setattr(triton_gather, f"{kernel}_kernel", function)
    return triton_gather


@needs_triton
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (5, 7), (70, 33), (9, 130)])
@pytest.mark.parametrize("bits", BITS)
def test_triton_scalar_equals_reference(interpreted, shape, bits):
    rows, columns = shape
    low, step = scales_of(columns)
    values = torch.randn(1 << bits)
    packed = reference.pack(codes_of(rows, columns, bits), bits)
    for index in (None, index_of(rows, 20)):
        chosen = packed if index is None else packed[index]
        table = widened(packed)
        got = interpreted.affine(table, index, low, step, bits)
        # One rounding may differ: a GPU may fuse the multiply and the add.
        torch.testing.assert_close(
            got, reference.affine_decode(chosen, low, step, bits), rtol=1e-6, atol=1e-6
        )
        got = interpreted.lut(table, index, values, bits, columns)
        assert torch.equal(got, reference.lut_decode(chosen, values, bits, columns))
    half = interpreted.affine(packed, None, low, step, bits, torch.float16)
    assert half.dtype == torch.float16


@needs_triton
@pytest.mark.parametrize("case", VECTORS)
def test_triton_vector_equals_reference(interpreted, case):
    packed, given, _ = vector_case(*case)
    index = index_of(len(packed), 20)
    got = interpreted.vector(widened(packed), index, *given)
    assert torch.equal(got, reference.vector_decode(packed[index], *given))


SCALAR = {"index": "*i64", "rows": "i64", "count": "i64", "stride": "i64", "columns": "i32"}
TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)]


@needs_triton
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t[0]}-{t[1]}")
@pytest.mark.parametrize("kernel", ["affine", "lut", "vector"])
def test_triton_compiles_ahead_of_time(target, kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import JITFunction

    from bifeat_pyg.kernels import triton_gather

    signature = {"codes": "*u8", "out": "*fp16"} | SCALAR
    constants = {"HAS_INDEX": True, "BLOCK_M": 32}
    if kernel == "vector":
        signature |= {"book": "*fp32"} | dict.fromkeys(("stages", "length", "width"), "i32")
        constants |= {"CODE_BYTES": 2, "BLOCK_D": 64}
    else:
        signature |= dict.fromkeys(("first", "second"), "*fp32") | {"plane": "i32"}
        constants |= {"LUT": kernel == "lut", "BITS": 4, "BLOCK_P": 64}
    written = triton_gather._vector if kernel == "vector" else triton_gather._scalar
    function = JITFunction(written)
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = {n: signature[n] for n in function.arg_names}
    source = ASTSource(
        function, ordered, {(function.arg_names.index(k),): v for k, v in constants.items()}
    )
    binary = triton.compile(source, target=GPUTarget(*target))
    made = binary.asm["ptx" if target[0] == "cuda" else "amdgcn"]
    assert "st.global" in made or "global_store" in made or "buffer_store" in made
