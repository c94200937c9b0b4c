"""Features of torch that the exchange lives with, on real gloo processes."""

import re

import pytest

from hipress_torch.testing import RankPool
from tests.hipress_torch import ranks_features as jobs
from tests.hipress_torch import ranks_planning as planning

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as made:
        yield made


@pytest.fixture(scope="module")
def three():
    with RankPool(3) as made:
        yield made


def learned(result, before=5):
    losses = result["losses"]
    return sum(losses[-before:]) < sum(losses[:before])


def test_small_buckets_travel_together(pool):
    many, one = (pool.run(jobs.small_buckets, cap)[0] for cap in (0.001, 25.0))
    assert many["calls"] == one["calls"] == 1
    assert re.fullmatch("0-[2-5]", many["explained"].splitlines()[2].split()[0])
    # What is sent belongs to parameters: how they travel changes nothing.
    assert many["parameters"] == one["parameters"]


def test_a_subgroup_trains_by_itself(three):
    _, a, b = three.run(jobs.subgroups)
    assert a["parameters"] == b["parameters"]
    assert a["metrics"]["ratio"] > 20
    assert learned(a)


def test_two_modules_have_a_state_each(pool):
    a, b = pool.run(jobs.two_modules)
    assert a["parameters"] == b["parameters"]
    assert learned(a)
    assert a["ratios"][0] > 20 > a["ratios"][1] > 5


def test_residuals_survive_a_rank_that_is_added(three, tmp_path):
    results = three.run(jobs.more_ranks, str(tmp_path))
    assert all(r["same"] for r in results)
    assert all(r["parameters"] == results[0]["parameters"] for r in results)
    assert all(r["iteration"] == 30 for r in results)
    assert learned(results[0])


def test_compiled_modules_train_with_the_default_optimizer_of_ddp(pool):
    a, b = pool.run(jobs.compiled, "ddp_optimizer")
    assert "error" not in a, a
    assert a["parameters"] == b["parameters"]
    assert learned(a)
    assert a["ratio"] > 20


def test_the_form_of_lightning(pool):
    a, b = pool.run(jobs.lightning)
    assert a["parameters"] == b["parameters"]
    assert learned(a)
    assert a["ratio"] > 20


@pytest.mark.parametrize("codec", ["onebit", "dgc"])
def test_a_skipped_step_leaves_no_trace_with_rollback(pool, codec):
    for r in pool.run(jobs.rolled_back, codec):
        assert r["bad"] == [True, True, False, False, False, False]
        assert r["same"]
        assert r["moved"]


def test_the_plan_is_made_anew_when_exchanges_slow_down(pool):
    a, b = pool.run(planning.slowed_down)
    assert a["anew"] == b["anew"]
    # Two whole windows of three passes after step 24, and the pass that sees them end; once only.
    first = a["anew"].index(1)
    assert 29 <= first <= 33
    assert a["anew"] == [0] * first + [1] * (50 - first)
    # Measured at first, planned together, measured anew, planned together.
    assert [len(p) > 0 for p in a["backward"]] == [False, True, False, True]
    assert a["profiles"] == b["profiles"]
    before, *_, after = a["profiles"]
    assert before != after
    assert a["explained"] == b["explained"]
    assert a["parameters"] == b["parameters"]


def test_what_is_owed_is_sent_when_a_bucket_is_no_longer_compressed(pool):
    for r in pool.run(planning.switched):
        assert r["residual"] == 0.0
        assert r["lost"] < 1e-4 * r["size"]


def test_a_plan_may_choose_a_ring(three):
    results = three.run(planning.by_ring)
    for r in results:
        assert r["measured"] == ["all_gather", "all_reduce", "all_to_all", "hop"]
        lines = r["planned explained"].splitlines()[2:]
        assert lines
        assert all("onebit (ring)" in line for line in lines)
        assert r["planned"] == r["ring"] == results[0]["ring"]
