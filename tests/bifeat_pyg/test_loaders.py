"""QuantizedLoader around PyG's loaders: batches equal those of the dequantized graph."""

import copy
import gc
import subprocess
import sys

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.loader import (
    DataLoader,
    LinkLoader,
    NodeLoader,
    PrefetchLoader,
    RandomNodeLoader,
    ZipLoader,
)

from bifeat_pyg import (
    SQ,
    VQ,
    CSCNeighborSampler,
    Dequantize,
    FeatureError,
    FormatError,
    LoaderError,
    QuantizedFeatureStore,
    QuantizedLoader,
    UnknownAttrError,
    paper,
    quantize,
)

from .graphs import features, graph, hetero

# On a machine, or with a share of one, of fewer processors than workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker:UserWarning")

SETTINGS = [
    {"num_workers": 0},
    {"num_workers": 0, "filter_per_worker": False},
    {"num_workers": 2},
    {"num_workers": 2, "filter_per_worker": False},
]


def ident(settings):
    return "-".join(f"{k}={v}" for k, v in settings.items())


def both_routes(data, spec):
    """The two things PyG's loaders take, and the features that must come out."""
    packed = quantize(data, spec=spec)
    store = QuantizedFeatureStore.from_data(data, spec=spec)
    return {"data": packed, "stores": (store, data)}, packed.x_codec.decode(packed.x)


@pytest.mark.parametrize("settings", SETTINGS, ids=ident)
@pytest.mark.parametrize("route", ["data", "stores"])
@pytest.mark.parametrize("spec", [SQ(4), VQ(4, 32), paper.sq(2)], ids=["sq", "vq", "paper"])
def test_node_loader(route, settings, spec):
    data = graph()
    routes, expected = both_routes(data, spec)
    source = routes[route]
    loader = NodeLoader(
        source,
        CSCNeighborSampler(source, [4, 2]),
        input_nodes=data.train_mask,
        batch_size=32,
        shuffle=True,
        **settings,
    )
    seen = []
    for _ in range(2):
        for batch in QuantizedLoader(loader):
            assert torch.equal(batch.x, expected[batch.n_id])
            assert torch.equal(batch.y, data.y[batch.n_id])
            assert "x_codec" not in batch
            seen.append(batch.n_id[: batch.batch_size])
    seeds = data.train_mask.nonzero().flatten().repeat(2)
    assert torch.equal(torch.cat(seen).sort().values, seeds.sort().values)


def test_persistent_workers():
    # One worker: PyG's loaders take five seconds to shut down each persistent one (2.8.1).
    packed = quantize(graph())
    expected = packed.x_codec.decode(packed.x)
    sampler = CSCNeighborSampler(packed, [3])
    inner = NodeLoader(packed, sampler, batch_size=100, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for batch in QuantizedLoader(inner):
            assert torch.equal(batch.x, expected[batch.n_id])
    # Its iterator lives in a reference cycle: collected here, not in a worker forked later.
    del inner
    gc.collect()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("route", ["data", "stores"])
def test_link_loader(route, workers):
    data = graph()
    routes, expected = both_routes(data, SQ(4))
    source = routes[route]
    edges = data.edge_index[:, :90]
    loader = LinkLoader(
        source,
        CSCNeighborSampler(source, [4, 2]),
        # PyG 2.8.1 takes a bare tensor only with a Data.
        edge_label_index=edges if route == "data" else (None, edges),
        neg_sampling="binary",
        batch_size=30,
        num_workers=workers,
    )
    for batch in QuantizedLoader(loader):
        assert torch.equal(batch.x, expected[batch.n_id])
        assert batch.edge_label_index.shape == (2, 60)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("route", ["data", "stores"])
def test_types_have_codecs_of_their_own(route, workers):
    data = hetero()
    packed = quantize(data, spec=SQ(8))
    expected = {kind: packed[kind].x_codec.decode(packed[kind].x) for kind in data.node_types}
    source = (
        packed if route == "data" else (QuantizedFeatureStore.from_data(data, spec=SQ(8)), data)
    )
    loader = NodeLoader(
        source,
        CSCNeighborSampler(source, [4, 2]),
        input_nodes=("paper", torch.arange(100)),
        batch_size=30,
        num_workers=workers,
    )
    for batch in QuantizedLoader(loader, dtype=torch.float16):
        for kind in data.node_types:
            assert batch[kind].x.dtype == torch.float16
            assert torch.equal(batch[kind].x, expected[kind][batch[kind].n_id].half())
        assert torch.equal(batch["paper"].y, data["paper"].y[batch["paper"].n_id])


def test_edge_features_travel_packed_on_the_data_route():
    data = hetero()
    packed = quantize(data, attrs=("x", "edge_attr"), spec={"x": SQ(4), "edge_attr": SQ(8)})
    kind = ("author", "writes", "paper")
    assert packed[kind].edge_attr.dtype == torch.uint8
    expected = packed[kind].edge_attr_codec.decode(packed[kind].edge_attr)
    loader = NodeLoader(
        packed, CSCNeighborSampler(packed, [4, 2]), input_nodes="paper", batch_size=60
    )
    for batch in QuantizedLoader(loader):
        assert torch.equal(batch[kind].edge_attr, expected[batch[kind].e_id])


def test_edge_features_are_refused_by_the_store():
    with pytest.raises(LoaderError, match=r"attribute of edges.*quantize\(data"):
        QuantizedFeatureStore.from_data(graph(), attrs=("edge_attr",))
    with pytest.raises(LoaderError, match="attribute of edges"):
        QuantizedFeatureStore.from_data(hetero(), keep=("edge_attr",))


def test_random_node_loader():
    data = graph()
    packed = quantize(data)
    expected = packed.x_codec.decode(packed.x)
    packed.n_id = torch.arange(400)
    for batch in QuantizedLoader(RandomNodeLoader(packed, num_parts=4)):
        assert torch.equal(batch.x, expected[batch.n_id])


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_batches_graphs_cut_from_one(workers):
    x = features(90, 6)
    whole = quantize(Data(x=x, edge_index=torch.empty(2, 0).long()))
    expected = whole.x_codec.decode(whole.x)
    parts = [
        Data(x=whole.x[at : at + 30], x_codec=whole.x_codec, edge_index=torch.empty(2, 0).long())
        for at in (0, 30, 60)
    ]
    loader = DataLoader(parts, batch_size=3, num_workers=workers)
    (batch,) = QuantizedLoader(loader)
    assert isinstance(batch, Batch)
    assert torch.equal(batch.x, expected)


def test_graphs_packed_apart_do_not_mix():
    parts = [quantize(Data(x=features(30, 6, seed))) for seed in (0, 1)]
    with pytest.raises(FeatureError, match="different codecs"):
        list(QuantizedLoader(DataLoader(parts, batch_size=2)))


def test_prefetch_and_zip_loaders_and_plain_iterables():
    data = graph()
    routes, expected = both_routes(data, SQ(4))
    sampler = CSCNeighborSampler(data, [3])
    inner = NodeLoader(routes["stores"], sampler, input_nodes=torch.arange(400), batch_size=100)
    for batch in QuantizedLoader(PrefetchLoader(inner, device="cpu")):
        assert torch.equal(batch.x, expected[batch.n_id])

    loaders = [
        NodeLoader(routes["data"], sampler, batch_size=100, filter_per_worker=True)
        for _ in range(2)
    ]
    for first, second in QuantizedLoader(ZipLoader(loaders, filter_per_worker=True)):
        assert torch.equal(first.x, expected[first.n_id])
        assert torch.equal(second.x, expected[second.n_id])

    batches = list(NodeLoader(routes["stores"], sampler, input_nodes=torch.arange(400)))
    assert batches[0].x.dtype == torch.uint8
    loader = QuantizedLoader(batches, store=routes["stores"][0])
    for _ in range(2):  # the user's own batches stay packed
        for batch in loader:
            assert torch.equal(batch.x, expected[batch.n_id])


def test_what_is_not_packed_passes_untouched():
    data = graph()
    (batch,) = QuantizedLoader([data])
    assert batch.x is data.x
    assert list(QuantizedLoader([None, "text"])) == [None, "text"]


def test_the_wrapped_loader_shines_through():
    data = quantize(graph())
    inner = NodeLoader(data, CSCNeighborSampler(data, [3]), batch_size=100)
    loader = QuantizedLoader(inner)
    assert len(loader) == len(inner) == 4
    assert loader.batch_size == 100
    assert copy.copy(loader).loader is inner
    with pytest.raises(AttributeError):
        _ = loader.no_such_thing


def test_transforms_see_packed_rows():
    data = quantize(graph())
    seen = []

    def transform(batch):
        seen.append(batch.x.dtype)
        return batch

    loader = NodeLoader(data, CSCNeighborSampler(data, [3]), batch_size=400, transform=transform)
    (batch,) = QuantizedLoader(loader)
    assert seen == [torch.uint8]
    assert batch.x.dtype == torch.float32


def test_batches_that_cross_processes_are_small():
    # A codec with a large codebook must not travel with every batch.
    import io
    import pickle

    data = quantize(graph(columns=64), spec=VQ(8, 256))
    book = data.x_codec.param_bytes

    class Probe:
        def __getitem__(self, index):
            buffer = io.BytesIO()
            pickle.Pickler(buffer).dump(data.x_codec)
            return len(buffer.getvalue())

        def __len__(self):
            return 1

    (size,) = torch.utils.data.DataLoader(Probe(), num_workers=1, batch_size=None)
    assert size < 300 < book


def test_dequantize_inside_a_model():
    data = graph()
    packed = quantize(data)
    model = torch.nn.Sequential(Dequantize(packed.x_codec), torch.nn.Linear(13, 2))
    torch.manual_seed(0)
    assert model(packed.x).shape == (400, 2)
    assert torch.equal(model[0](packed.x), packed.x_codec.decode(packed.x))
    assert copy.deepcopy(model)[0].codec is packed.x_codec
    with pytest.raises(FeatureError, match="x_codec"):
        Dequantize(packed.x)


def test_quantize_leaves_the_graph_as_it_was():
    data = graph()
    before = {key: value for key, value in data}  # noqa: C416 - Data is no mapping
    packed = quantize(data, keep=["y"])
    assert all(data[key] is value for key, value in before.items())
    assert sorted(packed.keys()) == ["edge_index", "x", "x_codec", "y"]
    assert packed.num_nodes == 400
    assert packed.edge_index is data.edge_index


def shortened(**more):
    data = graph()
    data.x = data.x[:300]
    data.update(more)
    return data


def shortened_type():
    data = hetero()
    data["author"].x = data["author"].x[:20]
    return data


BAD = {
    "attr": (lambda: quantize(graph(), attrs=("z",)), UnknownAttrError, "'z'; there are"),
    "twice": (lambda: quantize(quantize(graph())), FeatureError, "packed already"),
    "data": (lambda: quantize({"x": 1}), FeatureError, "got dict"),
    "spec": (lambda: quantize(graph(), spec=4), FeatureError, r"use SQ\(...\)"),
    "specs": (lambda: quantize(graph(), spec={"y": SQ(4)}), UnknownAttrError, "no entry for 'x'"),
    "nan": (lambda: quantize(graph(), nan="drop"), FeatureError, "'error' and 'zero'"),
    "store": (lambda: QuantizedFeatureStore.from_data(graph(), attrs="q"), UnknownAttrError, "'q'"),
    "structure": (lambda: quantize(graph(), "edge_index"), FeatureError, "cannot be packed"),
    "no names": (lambda: quantize(graph(), attrs=None), FeatureError, "attrs is None; give names"),
    "names": (lambda: quantize(graph(), attrs=("x", 3)), FeatureError, "'x', 3"),
    "fewer": (lambda: quantize(shortened()), FeatureError, "x has 300 rows, .* at least 400 nodes"),
    "fewer in a store": (
        lambda: QuantizedFeatureStore.from_data(shortened(num_nodes=400)),
        FeatureError,
        "x has 300 rows, but there are 400 nodes",
    ),
    "fewer of a type": (
        lambda: quantize(shortened_type()),
        FeatureError,
        "'author' x has 20 rows",
    ),
    "loader": (lambda: QuantizedLoader(3), LoaderError, "cannot be iterated"),
    "dtype": (lambda: QuantizedLoader([], dtype=torch.int8), LoaderError, "float dtype"),
    "dtype by name": (lambda: QuantizedLoader([], dtype="float32"), LoaderError, "'float32'"),
    "device": (lambda: QuantizedLoader([], device="foo"), LoaderError, "device is 'foo'"),
    "rows": (lambda: QuantizedLoader([], rows=[1]), LoaderError, r"rows is \[1\]"),
    "wrong store": (lambda: QuantizedLoader([], store="s"), LoaderError, "store is a str"),
    "codec": (
        lambda: list(QuantizedLoader([Data(x=features(), x_codec=quantize(graph()).x_codec)])),
        FormatError,
        "already dequantized",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_says_what_to_do(case):
    make, error, message = BAD[case]
    with pytest.raises(error, match=message):
        make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    with pytest.raises(LoaderError, match="no CUDA device"):
        QuantizedLoader([], device="cuda")


def test_importing_brings_in_nothing_optional():
    # Other packages may have loaded them in this process already.
    code = (
        "import sys, torch_geometric; before = set(sys.modules); import bifeat_pyg;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(new & {'pyg_lib', 'torch_sparse', 'faiss', 'triton', 'matplotlib', 'pyarrow'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
