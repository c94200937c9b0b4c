"""The engine for GPUs: on CPU tensors against the pipeline, and on a device."""

import pytest
import torch

from hipress_torch.testing import RankPool
from tests.hipress_torch import ranks as jobs

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize("codec", ["onebit", "nbit", "graddrop"])
def test_it_gives_what_the_pipeline_gives(pool, codec):
    options = {"ratio": 0.02} if codec == "graddrop" else {}
    piped = pool.run(jobs.train, codec, 12, options)
    inline = pool.run(jobs.inline, codec, "cpu", float("nan"))
    assert inline[0]["parameters"] == inline[1]["parameters"]
    assert inline[0]["parameters"] == piped[0]["parameters"]
    assert inline[0]["ratio"] == pytest.approx(piped[0]["metrics"]["ratio"], rel=0.01)
    for r in inline:
        assert all(r["bad"])
        assert r["finite"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("codec", ["onebit", "terngrad", "graddrop"])
def test_ddp_on_cuda_tensors(pool, codec):
    # Two processes share the device; gloo carries the compressed bytes through host memory.
    results = pool.run(jobs.inline, codec, "cuda", float("nan"))
    a, b = results
    assert a["parameters"] == b["parameters"]
    assert sum(a["losses"][-3:]) < sum(a["losses"][:3])
    for r in results:
        assert all(r["bad"])
        assert r["finite"]
