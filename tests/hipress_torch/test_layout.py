"""Who owns what: every element once, the same on all ranks, whatever the buckets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hipress_torch import StateError, WireError, codecs
from hipress_torch._layout import Placed, build_parts
from hipress_torch._registry import Registry
from hipress_torch._wire import HEADER_BYTES, NOT_FINITE, read_header, write_header

CPU = torch.device("cpu")
ONEBIT = codecs.get("onebit")(block=64)
PLAIN = codecs.get("none")()

sizes = st.lists(st.integers(1, 20_000), min_size=1, max_size=6)


def placed_of(counts, order=None):
    registry = Registry()
    tensors = [torch.empty(c) for c in counts]
    registry.add_named((f"p{i}", t) for i, t in enumerate(tensors))
    placed, at = {}, 0
    for i in order or range(len(counts)):
        placed[i] = Placed(registry.lookup(tensors[i]), at)
        at += counts[i]
    return tuple(placed.values()), at


def owners_of(counts, ranks, part_elements, min_elements, order=None):
    """Returns the owner of every element, by its place in the residual buffer."""
    placed, total = placed_of(counts, order)
    owner: dict[int, int] = {}
    by_rank = [
        build_parts(placed, ONEBIT, PLAIN, min_elements, part_elements, ranks, r, CPU)
        for r in range(ranks)
    ]
    for rank, parts in enumerate(by_rank):
        covered = torch.zeros(total, dtype=torch.int32)
        for number, part in enumerate(parts):
            assert part.sizes == by_rank[0][number].sizes
            assert part.send.numel() == sum(part.send_sizes)
            assert part.received.shape == (ranks - 1, part.sizes[rank])
            for coded in part.coded:
                for s in coded.own.segments:
                    assert s.wire % 16 == 0
                    assert s.wire >= HEADER_BYTES
                    assert s.wire + coded.codec.wire_bytes(s.count) <= part.sizes[rank]
                    for place in range(s.residual, s.residual + s.count):
                        assert owner.setdefault(place, rank) == rank
                for s in (*coded.send.segments, *coded.own.segments):
                    covered[s.grad : s.grad + s.count] += 1
                assert sum(s.count for s in coded.gathered.segments) == (
                    coded.send.count + coded.own.count
                )
        assert (covered == 1).all()
    assert len(owner) == total
    return owner


@settings(max_examples=40)
@given(sizes, st.integers(2, 5), st.integers(1, 30_000), st.sampled_from([0, 100, 10**9]))
def test_every_element_has_one_owner_and_is_sent_once(counts, ranks, part_elements, min_elements):
    owners_of(counts, ranks, part_elements, min_elements)


@settings(max_examples=25)
@given(sizes, st.integers(2, 5), st.randoms(use_true_random=False))
def test_owners_depend_on_neither_parts_nor_the_order_in_a_bucket(counts, ranks, random):
    order = list(range(len(counts)))
    random.shuffle(order)
    one = owners_of(counts, ranks, 10**9, 100)
    assert owners_of(counts, ranks, 1000, 100, order) == one


def test_a_large_parameter_is_shared_evenly():
    owner = owners_of([60_000], 3, 10**9, 0)
    shares = [list(owner.values()).count(r) for r in range(3)]
    assert max(shares) - min(shares) <= 64 * 64


@pytest.mark.parametrize(
    "change", [{"iteration": 8}, {"part": 1}, {"codec": 5}], ids=["iteration", "part", "codec"]
)
def test_a_message_of_another_step_is_refused(change):
    message = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    write_header(message, NOT_FINITE, 7, 3, 99)
    expected = {"iteration": 7, "part": 3, "codec": 99}
    assert read_header(message, 1, **expected) == NOT_FINITE
    with pytest.raises(WireError, match="from group rank 1"):
        read_header(message, 1, **{**expected, **change})


def test_residuals_are_kept_by_name_and_shape():
    registry = Registry()
    a, b = torch.empty(3, 5), torch.empty(7)
    registry.add_named([("a", a), ("b", b)])
    registry.buffer("residual", CPU).copy_(torch.arange(registry.buffer("residual", CPU).numel()))
    saved = registry.save("residual")
    assert saved["a"].shape == (3, 5)
    other = Registry()
    other.load("residual", saved)
    other.add_named([("b", torch.empty(7))])
    assert torch.equal(other.save("residual")["b"], saved["b"])
    buffer = other.buffer("residual", CPU)
    assert torch.equal(buffer[:7], saved["b"])
    # Met later: it grows a place, with what was loaded for it.
    other.add_named([("a", torch.empty(3, 5))])
    assert other.outgrown
    other.buffer("residual", CPU)
    assert torch.equal(other.save("residual")["a"], saved["a"])
    with pytest.raises(StateError, match=r"\(7,\) in the state dict, \(3, 5\)"):
        other.load("residual", {"a": torch.zeros(7)})
