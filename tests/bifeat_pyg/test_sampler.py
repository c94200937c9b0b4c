"""CSCNeighborSampler: what a sampled neighbourhood must be, and C against numpy, edge for edge."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import NodeSamplerInput

from bifeat_pyg import CSCNeighborSampler, LoaderError, QuantizedFeatureStore
from bifeat_pyg.kernels import cpu

from .graphs import graph, hetero

needs_c = pytest.mark.skipif(not cpu.available(), reason="built without the C kernels")


def sample(sampler, nodes, kind=None, time=None):
    return sampler.sample_from_nodes(NodeSamplerInput(None, torch.as_tensor(nodes), time, kind))


def same(first, second):
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return first == second


FIELDS = ("node", "row", "col", "edge", "batch", "num_sampled_nodes", "num_sampled_edges")
CASES = {
    "two hops": {"num_neighbors": [4, 3]},
    "all": {"num_neighbors": [-1, -1]},
    "none": {"num_neighbors": [3, 0]},
    "more than there are": {"num_neighbors": [60]},
    "many": {"num_neighbors": [40, 2]},
    "replace": {"num_neighbors": [5, 5], "replace": True},
    "disjoint": {"num_neighbors": [4, 3], "disjoint": True},
    "induced": {"num_neighbors": [4, 3], "subgraph_type": "induced"},
    "induced disjoint": {"num_neighbors": [3, 2], "subgraph_type": "induced", "disjoint": True},
    "bidirectional": {"num_neighbors": [4, 3], "subgraph_type": "bidirectional"},
}


@needs_c
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_c_and_numpy_sample_the_same(case, typed, monkeypatch):
    data = hetero() if typed else graph(edges=20_000)
    kind = "paper" if typed else None
    seeds = [5, 3, 77, 3, 110]
    fast = sample(CSCNeighborSampler(data, seed=7, **CASES[case]), seeds, kind)
    monkeypatch.setattr(cpu, "available", lambda: False)
    plain = sample(CSCNeighborSampler(data, seed=7, **CASES[case]), seeds, kind)
    for field in FIELDS:
        assert same(getattr(fast, field), getattr(plain, field)), field


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_sample_is_a_true_part_of_the_graph(case, native, monkeypatch):
    if not native:
        monkeypatch.setattr(cpu, "available", lambda: False)
    data = graph(edges=20_000)
    settings = CASES[case]
    sampler = CSCNeighborSampler(data, seed=1, **settings)
    seeds = torch.tensor([9, 4, 250])
    out = sample(sampler, seeds)
    assert torch.equal(out.node[:3], seeds)
    # Every edge is the edge of the graph that its id says.
    ends = torch.stack((out.node[out.row], out.node[out.col]))
    assert torch.equal(data.edge_index[:, out.edge], ends) or case == "bidirectional"
    if not settings.get("replace") and settings.get("subgraph_type") is None:
        unique = out.edge if out.batch is None else out.batch[out.col] * 20_000 + out.edge
        assert unique.unique().numel() == unique.numel()
    if out.batch is None:
        assert out.node.unique().numel() == out.node.numel()
    else:
        assert torch.equal(out.batch[out.row], out.batch[out.col])
        assert torch.equal(out.batch[:3], torch.arange(3))
    if out.num_sampled_nodes is not None:
        assert sum(out.num_sampled_nodes) == out.node.numel()
        assert sum(out.num_sampled_edges) == out.edge.numel()
        # Each frontier node has as many in-edges as were asked for, or all it has.
        k = settings["num_neighbors"][0]
        degree = torch.bincount(data.edge_index[1], minlength=400)[seeds]
        expected = degree if k < 0 else degree.clamp_max(k)
        if settings.get("replace"):
            expected = torch.where(degree > 0, k, 0)
        assert torch.equal(torch.bincount(out.col, minlength=3)[:3], expected)


def test_draws_are_uniform():
    # One node with 20 neighbours, 5 drawn: each neighbour in a quarter of 4,000 samples.
    data = Data(edge_index=torch.stack((torch.arange(1, 21), torch.zeros(20).long())), num_nodes=21)
    sampler = CSCNeighborSampler(data, [5])
    torch.manual_seed(0)
    counts = torch.zeros(20)
    for _ in range(4000):
        counts[sample(sampler, [0]).edge] += 1
    # Binomial(4000, 1/4): standard deviation 27.4; 20 draws within 4.5 of them.
    assert (counts - 1000).abs().max() < 4.5 * 27.4


def test_torch_manual_seed_or_seed_fix_the_draws():
    data = graph()
    sampler = CSCNeighborSampler(data, [3, 3])
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(sample(sampler, [1, 2, 3]).edge)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    fixed = [sample(CSCNeighborSampler(data, [3, 3], seed=s), [1, 2, 3]).edge for s in (5, 5, 6)]
    assert torch.equal(fixed[0], fixed[1])
    assert not torch.equal(fixed[0], fixed[2])


@pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker:UserWarning")
def test_a_seed_gives_the_same_batches_for_any_number_of_workers():
    data = graph()
    batches = [
        list(NodeLoader(data, CSCNeighborSampler(data, [3], seed=1), batch_size=150, num_workers=w))
        for w in (0, 2)
    ]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one.e_id, other.e_id)


def test_no_edges_or_seeds():
    data = Data(edge_index=torch.empty(2, 0).long(), num_nodes=4)
    out = sample(CSCNeighborSampler(data, [2, 2]), [3, 1])
    assert out.node.tolist() == [3, 1]
    assert out.num_sampled_edges == [0, 0]
    out = sample(CSCNeighborSampler(graph(), [2, 2]), torch.empty(0).long())
    assert out.node.numel() == out.edge.numel() == 0


def test_neighbours_of_each_edge_type():
    data = hetero()
    counts = {
        ("paper", "cites", "paper"): [2, 1],
        ("author", "writes", "paper"): [-1, 0],
        ("paper", "by", "author"): [1, 2],
    }
    out = sample(CSCNeighborSampler(data, counts, seed=3), torch.arange(20), "paper")
    for kind, edge in out.edge.items():
        ends = torch.stack((out.node[kind[0]][out.row[kind]], out.node[kind[-1]][out.col[kind]]))
        assert torch.equal(data[kind].edge_index[:, edge], ends)
    assert out.num_sampled_edges["paper", "by", "author"][0] == 0  # no author is a seed
    written = torch.isin(data["author", "writes", "paper"].edge_index[1], torch.arange(20)).sum()
    assert out.num_sampled_edges["author", "writes", "paper"] == [int(written), 0]
    assert sum(out.num_sampled_nodes["author"]) == out.node["author"].numel()


@pytest.mark.parametrize("where", ["node", "edge"])
@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("native", [True, False])
def test_no_neighbour_is_later_than_its_seed(where, strategy, native, monkeypatch):
    if not native:
        monkeypatch.setattr(cpu, "available", lambda: False)
    data = graph(nodes=60, edges=2000)
    generator = torch.Generator().manual_seed(0)
    data.time = torch.randint(0, 100, (60 if where == "node" else 2000,), generator=generator)
    sampler = CSCNeighborSampler(data, [3, 2], time_attr="time", temporal_strategy=strategy, seed=1)
    seeds, limit = torch.tensor([3, 8, 3]), torch.tensor([40, 60, 99])
    out = sample(sampler, seeds, time=limit)
    assert out.batch is not None
    late = data.time[out.edge] if where == "edge" else data.time[data.edge_index[0, out.edge]]
    assert (late <= limit[out.batch[out.col]]).all()
    if strategy == "last":
        first = out.edge[: out.num_sampled_edges[0]][out.col[: out.num_sampled_edges[0]] == 1]
        into = (data.edge_index[1] == 8).nonzero().flatten()
        of = data.time[into] if where == "edge" else data.time[data.edge_index[0, into]]
        latest = of[of <= 60].sort().values[-3:]
        times = data.time[first] if where == "edge" else data.time[data.edge_index[0, first]]
        assert times.sort().values.tolist() == latest.tolist()


def test_seeds_without_a_time_take_their_nodes():
    data = graph(nodes=60, edges=2000)
    data.time = torch.arange(60)
    out = sample(CSCNeighborSampler(data, [5], time_attr="time"), [30])
    assert (out.node <= 30).all()
    data.time = torch.arange(2000)
    with pytest.raises(LoaderError, match="input_time"):
        sample(CSCNeighborSampler(data, [5], time_attr="time"), [30])


@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
@pytest.mark.parametrize("disjoint", [False, True])
def test_links_with_negatives(negatives, disjoint):
    data = graph()
    sampler = CSCNeighborSampler(data, [3, 2], disjoint=disjoint)
    loader = LinkLoader(
        data,
        sampler,
        edge_label_index=data.edge_index[:, :64],
        neg_sampling=negatives,
        batch_size=16,
    )
    for number, batch in enumerate(loader):
        wanted = data.edge_index[:, 16 * number : 16 * number + 16]
        if negatives == "triplet":
            assert torch.equal(batch.n_id[batch.src_index], wanted[0])
            assert torch.equal(batch.n_id[batch.dst_pos_index], wanted[1])
            assert batch.dst_neg_index.shape == (16,)
        else:
            assert torch.equal(batch.n_id[batch.edge_label_index[:, :16]], wanted)
            assert batch.edge_label_index.shape[1] == (32 if negatives else 16)
        ends = batch.n_id[batch.edge_index]
        assert torch.equal(data.edge_index[:, batch.e_id], ends)


def test_links_between_two_types():
    data = hetero()
    kind = ("author", "writes", "paper")
    loader = LinkLoader(
        data,
        CSCNeighborSampler(data, [3, 2]),
        edge_label_index=(kind, data[kind].edge_index[:, :40]),
        neg_sampling="binary",
        batch_size=40,
    )
    (batch,) = loader
    source, target = batch[kind].edge_label_index[:, :40]
    ends = torch.stack((batch["author"].n_id[source], batch["paper"].n_id[target]))
    assert torch.equal(ends, data[kind].edge_index[:, :40])


def test_a_pair_of_stores_gives_the_same_as_the_data():
    data = graph()
    store = QuantizedFeatureStore.from_data(data)
    one = sample(CSCNeighborSampler(data, [4, 2], seed=1), [7, 8])
    other = sample(CSCNeighborSampler((store, data), [4, 2], seed=1), [7, 8])
    for field in FIELDS:
        assert same(getattr(one, field), getattr(other, field)), field


def refuse_edge(data):
    data.edge_index[0, 5] = 400
    return CSCNeighborSampler(data, [2])


def with_edges(data, edge_index):
    data.edge_index = edge_index
    return CSCNeighborSampler(data, [2])


REFUSED = {
    "float edges": (lambda d: with_edges(d, d.edge_index.float()), "are torch.float32; node num"),
    "bool edges": (lambda d: with_edges(d, d.edge_index > 5), "are torch.bool"),
    "three rows": (
        lambda d: with_edges(d, torch.zeros(3, 9).long()),
        r"\[2, edges\]; got \[3, 9\]",
    ),
    "edge list": (lambda d: with_edges(d, [[0], [1]]), "got list"),
    "missing node": (refuse_edge, r"edge 5 goes from node 400 .* 400 source"),
    "no edges": (lambda d: CSCNeighborSampler(Data(x=d.x), [2]), "no edges"),
    "a list": (lambda d: CSCNeighborSampler([d], [2]), "got list"),
    "seed": (lambda d: sample(CSCNeighborSampler(d, [2]), [400]), "nodes 0 to 399"),
    "negative seed": (lambda d: sample(CSCNeighborSampler(d, [2]), [-1]), "range from -1"),
    "one number": (lambda d: CSCNeighborSampler(d, 3), "num_neighbors is 3; .* for each hop"),
    "no hops": (lambda d: CSCNeighborSampler(d, None), "num_neighbors is None"),
    "no edge type": (lambda d: CSCNeighborSampler(d, {"a": [1]}), "for each edge type"),
    "text seed": (lambda d: CSCNeighborSampler(d, [2], seed="a"), "seed is 'a'"),
    "hops": (lambda d: CSCNeighborSampler(d, [2, -3]), "whole number from -1"),
    "types": (lambda d: CSCNeighborSampler(d, {("a", "b", "c"): [2]}), "the graph has none"),
    "subgraph": (lambda d: CSCNeighborSampler(d, [2], subgraph_type="x"), "'induced'"),
    "strategy": (lambda d: CSCNeighborSampler(d, [2], temporal_strategy="x"), "'last'"),
    "time": (lambda d: CSCNeighborSampler(d, [2], time_attr="when"), "neither nodes nor edges"),
    "float time": (lambda d: CSCNeighborSampler(d, [2], time_attr="x"), "must be integers"),
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case, native, monkeypatch):
    if not native:
        monkeypatch.setattr(cpu, "available", lambda: False)
    make, message = REFUSED[case]
    with pytest.raises(LoaderError, match=message):
        make(graph())
