"""CachedRows gives the same rows as the table; choose_spec keeps its promise."""

import numpy as np
import pytest
import torch
from torch_geometric.loader import NodeLoader
from torch_geometric.utils import degree

from bifeat_pyg import (
    SQ,
    VQ,
    CachedRows,
    CSCNeighborSampler,
    FeatureError,
    LoaderError,
    QuantizedFeatureStore,
    QuantizedLoader,
    RowIndexError,
    SpecError,
    UnknownAttrError,
    choose_spec,
    quantize,
)

from .graphs import features, graph, hetero


@pytest.mark.parametrize("kept", [0, 37, 400, 1000])
def test_cached_rows_equal_the_table(kept):
    data = graph()
    store = QuantizedFeatureStore.from_data(data)
    wanted = degree(data.edge_index[0], 400)
    cached = CachedRows(store, wanted, rows=kept)
    assert cached.cached_rows == min(kept, 400)
    for index in (torch.randint(0, 400, (90,)), torch.empty(0).long(), slice(5, 50), [3]):
        assert torch.equal(cached.gather(index), store.get_tensor(None, "x", index))
    top = wanted.argsort(descending=True, stable=True)[:kept]
    index = torch.cat((top, torch.arange(400)))
    cached.counts.rows = cached.counts.hits = 0
    assert torch.equal(cached.fetch(index), store.fetch(None, "x", index))
    assert cached.counts.hits == 2 * min(kept, 400)
    assert cached.counts.hit_rate == cached.counts.hits / index.numel()
    with pytest.raises(RowIndexError):
        cached.gather([400])


def test_a_loader_takes_features_from_the_cache():
    data = graph()
    packed = quantize(data)
    expected = packed.x_codec.decode(packed.x)
    cached = CachedRows(packed, degree(data.edge_index[0], 400), budget_bytes=400 * 4 + 50 * 7)
    assert cached.cached_rows == 50
    assert cached.cache_bytes == 400 * 4 + 50 * 7
    bare = graph()
    del bare.x
    bare.num_nodes = 400
    loader = NodeLoader(bare, CSCNeighborSampler(bare, [4, 2]), batch_size=64)
    for batch in QuantizedLoader(loader, rows=cached):
        assert torch.equal(batch.x, expected[batch.n_id])
    assert 50 / 400 < cached.counts.hit_rate < 1


def test_a_cache_for_each_node_type():
    data = hetero()
    packed = quantize(data)
    expected = {kind: packed[kind].x_codec.decode(packed[kind].x) for kind in packed.node_types}
    caches = [
        CachedRows(packed, torch.ones(data[kind].num_nodes), rows=20, group_name=kind)
        for kind in data.node_types
    ]
    bare = hetero()
    for kind in bare.node_types:
        bare[kind].num_nodes = bare[kind].num_nodes
        del bare[kind].x
    loader = NodeLoader(bare, CSCNeighborSampler(bare, [4, 2]), input_nodes="paper", batch_size=40)
    for batch in QuantizedLoader(loader, rows=caches):
        for kind in bare.node_types:
            assert torch.equal(batch[kind].x, expected[kind][batch[kind].n_id])


BAD_CACHES = {
    "degree": (lambda s: CachedRows(s, torch.ones(3), rows=2), LoaderError, "400 rows"),
    "both": (
        lambda s: CachedRows(s, torch.ones(400), rows=2, budget_bytes=9),
        LoaderError,
        "one of them",
    ),
    "budget": (
        lambda s: CachedRows(s, torch.ones(400), budget_bytes=9),
        LoaderError,
        "alone takes 1600",
    ),
    "negative": (lambda s: CachedRows(s, torch.ones(400), rows=-1), LoaderError, "-1"),
    "degrees": (lambda s: CachedRows(s, [1] * 400, rows=2), LoaderError, "degree is a list"),
    "NaN": (
        lambda s: CachedRows(s, torch.full((400,), torch.nan), rows=2),
        LoaderError,
        "400 NaN",
    ),
    "part": (
        lambda s: CachedRows(s, torch.ones(400), rows=3.5),
        LoaderError,
        "rows is 3.5",
    ),
    "budget part": (
        lambda s: CachedRows(s, torch.ones(400), budget_bytes="1 GB"),
        LoaderError,
        "budget_bytes is '1 GB'",
    ),
    "type": (
        lambda s: CachedRows(quantize(hetero()), torch.ones(400), rows=1, group_name="movie"),
        UnknownAttrError,
        "no node type 'movie'; there are: .'paper', 'author'",
    ),
    "no types": (
        lambda s: CachedRows(quantize(graph()), torch.ones(400), rows=1, group_name="movie"),
        UnknownAttrError,
        "no node type 'movie'",
    ),
    "attr": (
        lambda s: CachedRows(s, torch.ones(400), rows=1, attr_name="y"),
        UnknownAttrError,
        "no y",
    ),
    "plain": (
        lambda s: CachedRows(graph(), torch.ones(400), rows=1),
        UnknownAttrError,
        "no packed 'x'",
    ),
}


@pytest.mark.parametrize("case", BAD_CACHES)
def test_a_cache_that_cannot_be(case):
    make, error, message = BAD_CACHES[case]
    with pytest.raises(error, match=message):
        make(QuantizedFeatureStore.from_data(graph()))


def test_the_choice_within_a_budget_has_the_least_error():
    x = features(3000, 32)
    choice = choose_spec(x, budget=3000 * 16 + 1000)
    chosen = next(trial for trial in choice.trials if trial.spec == choice.spec)
    assert choice.spec == SQ(4)
    assert chosen.packed_bytes <= 3000 * 16 + 1000
    assert all(chosen.error <= t.error for t in choice.trials if t.fits)
    # What was said of it is what it then does.
    table = QuantizedFeatureStore.from_data(_data(x), spec=choice.spec).report().tables[0]
    assert table.packed_bytes == chosen.packed_bytes
    assert table.error == pytest.approx(chosen.error)
    assert "*" in str(choice)


def test_the_choice_within_an_error_has_the_fewest_bytes(tmp_path):
    x = features(50_000, 32)
    np.save(tmp_path / "x.npy", x.numpy())
    choice = choose_spec(tmp_path / "x.npy", max_error=0.15, sample_rows=2000)
    chosen = next(trial for trial in choice.trials if trial.spec == choice.spec)
    assert chosen.error <= 0.15
    assert all(chosen.packed_bytes <= t.packed_bytes for t in choice.trials if t.fits)


def test_choices_that_cannot_be():
    x = features(300, 8)
    with pytest.raises(SpecError, match="one of them"):
        choose_spec(x)
    with pytest.raises(SpecError, match="no spec fits 10 bytes; the smallest"):
        choose_spec(x, budget=10, specs=[SQ(4), SQ(1)])
    with pytest.raises(SpecError, match=r"no spec reaches an error of 0\.0"):
        choose_spec(x, max_error=0.0, specs=[SQ(4), SQ(8)])
    with pytest.raises(FeatureError, match="none of the 2 specs"):
        choose_spec(torch.randint(0, 99, (50, 4)), max_error=1.0, specs=[SQ(1), VQ(2, 4)])
    # Integers are exact or not at all: the smallest that keeps them.
    assert choose_spec(torch.randint(0, 9, (50, 4)), max_error=0.0).spec == SQ(4)


def _data(x):
    from torch_geometric.data import Data

    return Data(x=x)
