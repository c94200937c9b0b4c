"""Every loader of PyG, either way of giving it features: batches equal the dequantized graph.

The table of the plugin's README is this file. Loaders that PyG builds on torch-sparse or pyg-lib
are run where one of them is installed; elsewhere they are skipped with that reason, and what PyG
says in their place is tested.
"""

import importlib.util

import pytest
import torch
import torch_geometric.typing
from torch_geometric.data import Data
from torch_geometric.loader import (
    CachedLoader,
    ClusterData,
    ClusterLoader,
    DataLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    LinkLoader,
    LinkNeighborLoader,
    NeighborLoader,
    NodeLoader,
    PrefetchLoader,
    RandomNodeLoader,
    ShaDowKHopSampler,
)

from bifeat_pyg import (
    CSCNeighborSampler,
    LoaderError,
    QuantizedFeatureStore,
    QuantizedLoader,
    quantize,
)

from .graphs import graph, hetero

SPARSE = torch_geometric.typing.WITH_TORCH_SPARSE
SAMPLES = SPARSE or torch_geometric.typing.WITH_PYG_LIB
needs_sparse = pytest.mark.skipif(not SPARSE, reason="PyG needs torch-sparse here; not installed")
needs_sampler = pytest.mark.skipif(
    not SAMPLES, reason="PyG needs pyg-lib or torch-sparse here; neither is installed"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*without.*'pyg-lib'.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using '.*' without:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning"),
    # On a machine, or with a share of one, of fewer processors than workers.
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]

SEEDS = torch.arange(0, 400, 4)


class Given(ClusterData):
    """Clusters by node number: METIS is compiled into neither of the optional packages at hand."""

    def _metis(self, edge_index, num_nodes):
        return torch.arange(num_nodes) * self.num_parts // num_nodes


def node(source, **more):
    sampler = CSCNeighborSampler(source, [4, 2])
    return NodeLoader(source, sampler, input_nodes=SEEDS, batch_size=40, **more)


def link(source, **more):
    ends = graph().edge_index[:, :60]
    return LinkLoader(
        source,
        CSCNeighborSampler(source, [4, 2]),
        # PyG 2.8.1 takes a bare tensor only with a Data.
        edge_label_index=ends if isinstance(source, Data) else (None, ends),
        neg_sampling="binary",
        batch_size=30,
        **more,
    )


def neighbor(source, **more):
    return NeighborLoader(source, [4, 2], input_nodes=SEEDS, batch_size=40, **more)


def link_neighbor(source, **more):
    ends = graph().edge_index[:, :60]
    given = ends if isinstance(source, Data) else (None, ends)
    return LinkNeighborLoader(source, [4, 2], edge_label_index=given, batch_size=30, **more)


def cluster(source, **more):
    return ClusterLoader(Given(source, 5, log=False), batch_size=2, **more)


def random_node(source, **more):
    return RandomNodeLoader(source, num_parts=4, **more)


def graphs(source, **more):
    parts = [
        Data(x=source.x[at : at + 50], x_codec=source.x_codec, n_id=source.n_id[at : at + 50])
        for at in range(0, 400, 50)
    ]
    return DataLoader(parts, batch_size=3, **more)


def prefetched(source, **more):
    return PrefetchLoader(node(source, **more), device="cpu")


def cached(source, **more):
    return CachedLoader(node(source, **more), device="cpu")


def saint(kind, **fixed):
    def made(source, **more):
        return kind(source, batch_size=40, num_steps=2, sample_coverage=0, **fixed, **more)

    return made


def shadow(source, **more):
    return ShaDowKHopSampler(source, depth=2, num_neighbors=3, batch_size=40, **more)


# loader: whether it takes (feature store, graph store), filter_per_worker and transform
BOTH = {"NodeLoader": node, "LinkLoader": link, "PrefetchLoader": prefetched}
BOTH_OPTIONAL = {"NeighborLoader": neighbor, "LinkNeighborLoader": link_neighbor}
DATA = {
    "ClusterLoader": cluster,
    "RandomNodeLoader": random_node,
    "DataLoader": graphs,
    "CachedLoader": cached,
}
DATA_SPARSE = {
    "GraphSAINTNodeSampler": saint(GraphSAINTNodeSampler),
    "GraphSAINTEdgeSampler": saint(GraphSAINTEdgeSampler),
    "GraphSAINTRandomWalkSampler": saint(GraphSAINTRandomWalkSampler, walk_length=2),
    "ShaDowKHopSampler": shadow,
}
MAKERS = BOTH | BOTH_OPTIONAL | DATA | DATA_SPARSE


def case(name):
    marks = needs_sampler if name in BOTH_OPTIONAL else needs_sparse if name in DATA_SPARSE else ()
    return pytest.param(name, marks=marks, id=name)


CASES = [case(name) for name in MAKERS]
FILTERED = [case(name) for name in [*BOTH, *BOTH_OPTIONAL]]


@pytest.fixture(scope="module")
def whole():
    data = graph()
    del data.edge_attr
    data.n_id = torch.arange(400)
    return data


@pytest.fixture(scope="module")
def sources(whole):
    """The packed Data, the stores, and the features that must come out of either."""
    packed = quantize(whole)
    store = QuantizedFeatureStore.from_data(whole)
    # PyG's own sampler counts the nodes of a pair by the size of its edges, which only
    # put_edge_index notes.
    edges = Data(num_nodes=400)
    edges.put_edge_index(whole.edge_index, layout="coo", size=(400, 400))
    return {"data": packed, "stores": (store, edges)}, packed.x_codec.decode(packed.x)


def check(loader, expected, least=1):
    batches = 0
    for batch in QuantizedLoader(loader):
        assert batch.x.dtype == torch.float32
        assert torch.equal(batch.x, expected[batch.n_id])
        assert "x_codec" not in batch
        batches += 1
    assert batches >= least


@pytest.mark.parametrize("name", CASES)
def test_a_packed_graph_in_every_loader(name, sources):
    routes, expected = sources
    check(MAKERS[name](routes["data"]), expected, least=2)


@pytest.mark.parametrize("name", FILTERED)
def test_stores_in_every_loader_that_takes_them(name, sources):
    routes, expected = sources
    check(MAKERS[name](routes["stores"]), expected, least=2)


@pytest.mark.cluster
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_workers(name, workers, sources):
    routes, expected = sources
    check(MAKERS[name](routes["data"], num_workers=workers), expected, least=2)


@pytest.mark.cluster
@pytest.mark.parametrize("filtered", [True, False], ids=["in the worker", "in the main process"])
@pytest.mark.parametrize("route", ["data", "stores"])
@pytest.mark.parametrize("name", FILTERED)
def test_where_features_are_looked_up(name, route, filtered, sources):
    routes, expected = sources
    check(MAKERS[name](routes[route], num_workers=2, filter_per_worker=filtered), expected)


@pytest.mark.parametrize("name", CASES)
def test_pinned_memory_and_transforms(name, sources):
    routes, expected = sources
    seen = []

    def transform(batch):
        seen.append(batch.x.dtype)
        return batch

    takes = {"transform": transform} if name in BOTH | BOTH_OPTIONAL else {}
    check(MAKERS[name](routes["data"], pin_memory=True, **takes), expected)
    assert all(dtype == torch.uint8 for dtype in seen)  # packed still
    assert bool(seen) == bool(takes)


@needs_sparse
@pytest.mark.parametrize("workers", [0, 2])
def test_hgt_loader(workers):
    data = hetero()
    packed = quantize(data)
    expected = {kind: packed[kind].x_codec.decode(packed[kind].x) for kind in data.node_types}
    loader = HGTLoader(
        packed, [16, 8], input_nodes=("paper", None), batch_size=40, num_workers=workers
    )
    for batch in QuantizedLoader(loader):
        for kind in data.node_types:
            assert torch.equal(batch[kind].x, expected[kind][batch[kind].n_id])


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_lightning") is None,
    reason="PyTorch Lightning is not installed",
)
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_on_a_quantized_loader(sources, tmp_path):
    import pytorch_lightning

    class Model(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(13, 4)

        def training_step(self, batch, _):
            assert batch.x.dtype == torch.float32
            return torch.nn.functional.cross_entropy(self.layer(batch.x), batch.y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pytorch_lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Model(), QuantizedLoader(node(sources[0]["data"])))
    assert trainer.global_step == 6


# What PyG itself does not take.


def hgt(source):
    return HGTLoader(source, [4], ("paper", None))


REFUSING = {"ClusterLoader": cluster, "RandomNodeLoader": random_node} | DATA_SPARSE | {"HGT": hgt}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=needs_sparse if n == "HGT" or n in DATA_SPARSE else ())
        for n in REFUSING
    ],
)
def test_a_loader_that_takes_a_graph_refuses_a_store(name, sources):
    store, data = sources[0]["stores"]
    with pytest.raises(LoaderError, match=r"takes a graph.*quantize\(data\)"):
        REFUSING[name](store)
    # Of a pair PyG speaks by itself: we are not asked.
    with pytest.raises((AttributeError, NotImplementedError)):
        REFUSING[name]((store, data))


def test_a_store_lacks_other_names_as_anything_does(sources):
    store = sources[0]["stores"][0]
    assert not hasattr(store, "edge_index")
    with pytest.raises(AttributeError, match="'QuantizedFeatureStore' object has no attribute 'q'"):
        _ = store.q


def failing(message):
    def __iter__(_):
        raise ImportError(message)
        yield

    return type("Loader", (), {"__iter__": __iter__})()


def test_without_a_compiled_sampler_ours_is_named():
    with pytest.raises(LoaderError, match=r"(?s)requires either.*CSCNeighborSampler\(data"):
        list(
            QuantizedLoader(
                failing("'NeighborSampler' requires either 'pyg-lib' or 'torch-sparse'")
            )
        )
    with pytest.raises(ImportError, match="no module"):
        list(QuantizedLoader(failing("no module named 'x'")))


@pytest.mark.skipif(SAMPLES, reason="PyG can sample here")
@pytest.mark.parametrize("workers", [0, 1])
def test_pygs_own_sampler_without_its_libraries(workers):
    loader = NeighborLoader(quantize(graph()), [4], input_nodes=SEEDS, num_workers=workers)
    with pytest.raises(LoaderError, match=r"(?s)requires either.*CSCNeighborSampler\(data"):
        next(iter(QuantizedLoader(loader)))
