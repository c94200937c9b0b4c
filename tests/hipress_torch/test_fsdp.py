"""FSDP2 and FSDP1 on real gloo processes."""

import pytest
import torch

from hipress_torch import (
    FSDPState,
    RegistrationError,
    StateError,
    UnsupportedError,
    apply_fsdp,
    fsdp1_hook,
)
from hipress_torch.testing import RankPool
from tests.hipress_torch import ranks as jobs

pytestmark = [
    # FSDP1 is deprecated, and says so.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_training_sharded(pool, kind):
    plain = pool.run(jobs.sharded, kind, None)
    exact = pool.run(jobs.sharded, kind, "none")
    onebit = pool.run(jobs.sharded, kind, "onebit")
    assert exact[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-4)
    assert exact[1]["losses"] == pytest.approx(plain[1]["losses"], rel=1e-4)
    losses = onebit[0]["losses"]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert losses != exact[0]["losses"]
    assert onebit[0]["metrics"]["ratio"] > 20


def test_a_plain_module_is_refused():
    with pytest.raises(RegistrationError, match="fully_shard first"):
        apply_fsdp(torch.nn.Linear(2, 2))


def test_velocities_are_refused():
    with pytest.raises(UnsupportedError, match="momentum=0"):
        FSDPState("dgc")


def test_an_unsharded_module_is_refused():
    with pytest.raises(UnsupportedError, match="NO_SHARD"):
        fsdp1_hook(FSDPState(), torch.zeros(4))


def test_a_wrong_state_is_refused():
    state = FSDPState()
    with pytest.raises(StateError, match="version 2, this release reads 1"):
        state.load_state_dict({**state.state_dict(), "version": 2})
