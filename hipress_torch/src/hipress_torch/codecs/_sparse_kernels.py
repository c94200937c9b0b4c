"""Triton kernels that select the largest elements of every segment, for the sparse codecs.

Imported when a tensor is on a GPU: Triton is absent elsewhere. The functions are plain here and are
compiled, or interpreted, by ``_sparse_triton.py``. Magnitudes are compared as the integers that
their bits are, which order them alike, denormal numbers too.

A program of the grid handles a chunk of a segment, from a table of chunks (``CHUNK_FIELDS``), or a
slice of a segment's message, from a table of segments (``SEGMENT_FIELDS``).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import triton.language as tl


def add(
    grad, residual, scale, work, chunks,
    HAS_RESIDUAL: tl.constexpr, FIELDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the gradient, scaled, and the residual into a buffer of the segments in a row."""
    row = chunks + tl.program_id(0).to(tl.int64) * FIELDS
    offset = tl.arange(0, SIZE)
    mask = offset < tl.load(row + 3)
    y = tl.load(grad + tl.load(row) + offset, mask=mask, other=0.0) * scale
    if HAS_RESIDUAL:
        y += tl.load(residual + tl.load(row + 1) + offset, mask=mask, other=0.0)
    tl.store(work + tl.load(row + 2) + offset, y, mask=mask)


def scatter(
    words, values, target, segments,
    COLUMN: tl.constexpr, CLEAR: tl.constexpr, FIELDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Adds a message's values at their places, or clears these; no place is in a message twice."""
    row = segments + tl.program_id(0).to(tl.int64) * FIELDS
    first = tl.load(row + 3)
    count = tl.load(row + 4)
    capacity = tl.load(row + 5)
    slot = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    pairs = tl.minimum(tl.load(words + first).to(tl.int64), capacity)
    at = tl.load(words + first + 4 + slot, mask=slot < pairs, other=-1)
    mask = (at >= 0) & (at < count)
    place = target + tl.load(row + COLUMN) + at
    if CLEAR:
        tl.store(place, tl.zeros([SIZE], tl.float32), mask=mask)
    else:
        value = tl.load(values + first + 4 + capacity + slot, mask=mask, other=0.0)
        tl.store(place, tl.load(place, mask=mask, other=0.0) + value, mask=mask)


def histogram(
    work, chunks, least, prefix, found,
    SHIFT: tl.constexpr, BITS: tl.constexpr, FIELDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Counts the next bits of the magnitudes that begin with the prefix and are large enough."""
    row = chunks + tl.program_id(0).to(tl.int64) * FIELDS
    offset = tl.arange(0, SIZE)
    mask = offset < tl.load(row + 3)
    segment = tl.load(row + 4)
    y = tl.load(work + tl.load(row + 2) + offset, mask=mask, other=0.0)
    size = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    mask = mask & (size >= tl.load(least + segment))
    mask = mask & ((size >> (SHIFT + BITS)) == tl.load(prefix + segment))
    place = found + segment * (1 << BITS) + ((size >> SHIFT) & ((1 << BITS) - 1))
    tl.atomic_add(place, tl.full([SIZE], 1, tl.int32), mask=mask)


def count(work, chunks, least, counts, FIELDS: tl.constexpr, SIZE: tl.constexpr):
    """Counts a chunk's magnitudes above the least and equal to it, and those not finite."""
    row = chunks + tl.program_id(0).to(tl.int64) * FIELDS
    offset = tl.arange(0, SIZE)
    mask = offset < tl.load(row + 3)
    y = tl.load(work + tl.load(row + 2) + offset, mask=mask, other=0.0)
    size = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    edge = tl.load(least + tl.load(row + 4))
    out = counts + tl.program_id(0).to(tl.int64) * 3
    tl.store(out, tl.sum((size > edge).to(tl.int32), 0))
    tl.store(out + 1, tl.sum((mask & (size == edge)).to(tl.int32), 0))
    tl.store(out + 2, tl.sum((size >= 0x7F800000).to(tl.int32), 0))


def head(words, segments, pairs, FIELDS: tl.constexpr, SIZE: tl.constexpr):
    """Writes the number of pairs, and zeros over the rest of a segment's message."""
    row = segments + tl.program_id(0).to(tl.int64) * FIELDS
    slot = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    length = (4 + 2 * tl.load(row + 5) + 3) // 4 * 4
    number = tl.load(pairs + tl.program_id(0))
    value = tl.where(slot == 0, number, 0)
    tl.store(words + tl.load(row + 3) + slot, value, mask=slot < length)


def select(
    work, chunks, segments, least, ties, before, bad, words, values, residual, grad,
    HAS_RESIDUAL: tl.constexpr, FIELDS: tl.constexpr, SEGMENT_FIELDS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the pairs in rising order; what is not sent stays in the residual."""
    row = chunks + tl.program_id(0).to(tl.int64) * FIELDS
    offset = tl.arange(0, SIZE)
    length = tl.load(row + 3)
    mask = offset < length
    segment = tl.load(row + 4)
    y = tl.load(work + tl.load(row + 2) + offset, mask=mask, other=0.0)
    size = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    edge = tl.load(least + segment)
    allowed = tl.load(ties + segment)
    broken = tl.load(bad + segment) != 0
    above = (mask & (size > edge)).to(tl.int32)
    equal = (mask & (size == edge)).to(tl.int32)
    above_before = tl.load(before + tl.program_id(0) * 2) + tl.cumsum(above, 0) - above
    equal_before = tl.load(before + tl.program_id(0) * 2 + 1) + tl.cumsum(equal, 0) - equal
    sent = (above != 0) | ((equal != 0) & (equal_before < allowed))
    at = segments + segment * SEGMENT_FIELDS
    place = tl.load(at + 3) + 4 + above_before + tl.minimum(equal_before, allowed)
    written = sent & (offset < tl.where(broken, 0, length))
    tl.store(words + place, (tl.load(row + 5) + offset).to(tl.int32), mask=written)
    tl.store(values + place + tl.load(at + 5), y, mask=written)
    if HAS_RESIDUAL:
        kept = tl.where(sent, 0.0, y)
        whole = offset < tl.where(broken, 0, length)
        tl.store(residual + tl.load(row + 1) + offset, kept, mask=whole)
    tl.store(grad + tl.load(row) + offset, float("nan"), mask=offset < tl.where(broken, length, 0))


def zero(out, chunks, FIELDS: tl.constexpr, SIZE: tl.constexpr):
    """Writes zeros over a chunk of the gradient."""
    row = chunks + tl.program_id(0).to(tl.int64) * FIELDS
    offset = tl.arange(0, SIZE)
    tl.store(
        out + tl.load(row) + offset, tl.zeros([SIZE], tl.float32), mask=offset < tl.load(row + 3)
    )
