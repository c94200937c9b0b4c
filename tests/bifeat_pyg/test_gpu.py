"""What only a CUDA device can show: compiled kernels, zero copy from pinned memory, prefetch."""

import pytest
import torch
from torch_geometric.loader import NodeLoader

from bifeat_pyg import (
    CSCNeighborSampler,
    Dequantize,
    QuantizedFeatureStore,
    QuantizedLoader,
    RowIndexError,
    quantize,
)

from .graphs import SPECS, graph, name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:only .* rows to fit"),
]
# (dtype, relative, absolute): a fused multiply-add rounds once where the CPU rounds twice.
TOLERANCES = [
    (torch.float32, 1e-6, 1e-5),
    (torch.float16, 1e-3, 2e-2),
    (torch.bfloat16, 1e-2, 2e-1),
]


@pytest.mark.parametrize("spec", SPECS, ids=name)
@pytest.mark.parametrize("tolerance", TOLERANCES, ids=lambda t: str(t[0]))
@pytest.mark.parametrize("columns", [1, 33, 128])
def test_decode_on_the_device_equals_the_cpu(spec, tolerance, columns):
    dtype, rtol, atol = tolerance
    packed = quantize(graph(columns=columns), spec=spec)
    index = torch.randint(0, 400, (777,))
    expected = packed.x_codec.decode(packed.x)
    for rows in (packed.x.cuda(), packed.x.pin_memory(), packed.x):
        got = packed.x_codec.decode(rows, dtype, device="cuda")
        torch.testing.assert_close(got.cpu(), expected.to(dtype), rtol=rtol, atol=atol)
        # From pinned memory the kernel reads the chosen rows in place.
        got = packed.x_codec.decode(rows, dtype, index.cuda(), device="cuda")
        torch.testing.assert_close(got.cpu(), expected[index].to(dtype), rtol=rtol, atol=atol)
    with pytest.raises(RowIndexError):
        packed.x_codec.decode(packed.x.cuda(), index=torch.tensor([400]).cuda())


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("route", ["data", "stores"])
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_on_the_device(prefetch, route, workers):
    data = graph()
    packed = quantize(data)
    source = packed if route == "data" else (QuantizedFeatureStore.from_data(data), data)
    expected = packed.x_codec.decode(packed.x)
    loader = NodeLoader(
        source,
        CSCNeighborSampler(source, [4, 2]),
        input_nodes=data.train_mask,
        batch_size=16,
        num_workers=workers,
    )
    count = 0
    for batch in QuantizedLoader(loader, device="cuda", prefetch=prefetch):
        assert batch.x.is_cuda
        got = batch.x.cpu()
        torch.testing.assert_close(got, expected[batch.n_id.cpu()], rtol=1e-6, atol=1e-5)
        count += 1
    assert count == len(loader)


def test_dequantize_module_follows_its_input():
    packed = quantize(graph())
    model = torch.nn.Sequential(Dequantize(packed.x_codec), torch.nn.Linear(13, 3)).cuda()
    assert model(packed.x.cuda()).shape == (400, 3)
