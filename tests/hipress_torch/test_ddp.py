"""DDP on real gloo processes: what crosses the wire, what ranks end up with, what goes wrong."""

import json
import math
import signal
from pathlib import Path

import pytest

from hipress_torch.testing import RankPool
from tests.hipress_torch import ranks as jobs

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


COUNT = sum(p.numel() for p in jobs.network().parameters())


def test_codec_none_is_plain_ddp(pool):
    plain = pool.run(jobs.train, None, 6, {})
    ours = pool.run(jobs.train, "none", 6, {"strategy": "ps"})
    assert ours[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-5)
    assert ours[0]["parameters"] == pytest.approx(plain[0]["parameters"], rel=1e-4, abs=1e-6)
    assert ours[0]["metrics"]["bytes_sent"] >= 4 * COUNT * 6


def test_compressed_bytes_are_what_crosses_the_wire(pool):
    check_bytes(pool, 2)


def test_three_ranks():
    with RankPool(3) as pool:
        check_bytes(pool, 3)
        exact = pool.run(jobs.train, "none", 3, {"strategy": "ps"})
        plain = pool.run(jobs.train, None, 3, {})
        ring = pool.run(jobs.train, "none", 3, {"strategy": "ring"})
        for r in ring:
            assert r["parameters"] == pytest.approx(exact[0]["parameters"], rel=1e-4, abs=1e-6)
            assert r["parameters"] == ring[0]["parameters"]
        coded = pool.run(jobs.train, "onebit", 40, {"strategy": "ring"})
        assert coded[0]["parameters"] == coded[2]["parameters"]
        assert coded[0]["metrics"]["ratio"] > 20
        assert sum(coded[0]["losses"][-5:]) < 0.8 * sum(coded[0]["losses"][:5])
        for r in pool.run(jobs.not_finite, float("nan"), "ring"):
            assert all(r["bad"])
            assert r["finite"]
            assert r["moved"] < 1e-5 * max(1.0, r["size"])
        assert exact[2]["parameters"] == pytest.approx(plain[0]["parameters"], rel=1e-4, abs=1e-6)


def check_bytes(pool, ranks):
    steps = 5
    results = pool.run(jobs.train, "onebit", steps, {})
    for r in results:
        # Nothing but bytes is given to a collective while training ...
        assert {dtype for _, dtype, _ in r["sent"]} == {"torch.uint8"}
        scattered = sum(n for name, _, n in r["sent"] if name == "all_to_all_single")
        gathered = sum(n for name, _, n in r["sent"] if name != "all_to_all_single")
        # ... and the metrics are those bytes: a gathered message goes to each of the others.
        assert r["metrics"]["bytes_sent"] == scattered + (ranks - 1) * gathered
        assert r["metrics"]["bytes_plain"] == steps * (8 * (ranks - 1) * COUNT // ranks)
        assert r["metrics"]["ratio"] > 20
        # Memory: a residual of the gradients' size, aligned, and what is under way.
        assert 4 * COUNT <= r["metrics"]["residual_bytes"] < 4.01 * COUNT
        assert 0 < r["metrics"]["message_bytes"] < 0.15 * 4 * COUNT
    assert all(r["parameters"] == results[0]["parameters"] for r in results)
    assert results[0]["metrics"]["iterations"] == steps


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("onebit", {}),
        ("terngrad", {}),
        ("tbq", {}),
        ("graddrop", {"ratio": 0.02}),
        ("dgc", {"ratio": 0.02, "momentum": 0.5, "clip": 5.0, "warmup": 10}),
    ],
)
def test_training_learns(pool, codec, options):
    results = pool.run(jobs.train, codec, 40, options)
    losses = results[0]["losses"]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    assert results[0]["parameters"] == results[1]["parameters"]


def test_small_parts_give_the_same_training(pool):
    whole = pool.run(jobs.train, "onebit", 5, {})
    parts = pool.run(jobs.train, "onebit", 5, {"part_elements": 10_000})
    assert parts[0]["parameters"] == whole[0]["parameters"]
    assert len(parts[0]["sent"]) > len(whole[0]["sent"])


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ({"codec": "terngrad"}, "terngrad"),
        ({"codec": "onebit", "seed": 3}, "seed=3"),
        ({"codec": "onebit", "min_elements": 7}, "min_elements=7"),
    ],
)
def test_ranks_that_disagree_are_told_so(pool, second, told):
    messages = pool.run(jobs.mismatched, [{"codec": "onebit"}, second])
    for message in messages:
        assert message.startswith("MismatchError: group rank ")
        assert told in message
        assert "same arguments on all ranks" in message


def test_a_second_registration_is_refused(pool):
    for message in pool.run(jobs.register_twice):
        assert "takes one communication hook" in message


@pytest.mark.parametrize(
    ("how", "error", "timeout_s"),
    # A killed rank's connections are closed at once; of a frozen one only the timeout tells.
    [(signal.SIGKILL, "PeerError", 120.0), (signal.SIGSTOP, "PeerTimeoutError", 4.0)],
)
def test_a_lost_rank_gives_a_typed_error_in_time(how, error, timeout_s):
    with RankPool(2) as pool:
        ((name, told, took_s),) = pool.run(jobs.lose_a_peer, how, timeout_s, ranks=[0])
    assert name == error, told
    assert "restart the job" in told
    assert took_s < 100


@pytest.mark.parametrize("value", [float("nan"), math.inf])
def test_a_bad_value_reaches_all_ranks_and_no_residual(pool, value):
    results = pool.run(jobs.not_finite, value)
    assert results[0]["bad"] == results[1]["bad"]
    assert any(results[0]["bad"])
    # A saturated tanh keeps the later layers finite: they are exchanged as usual.
    for r in results:
        assert r["size"] > 0
        assert r["finite"]
        assert r["moved"] < 1e-5 * max(1.0, r["size"])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_the_raw_hook_works_for_other_dtypes(pool, dtype):
    results = pool.run(jobs.raw_hook, dtype)
    assert results[0]["parameters"] == results[1]["parameters"]
    assert sum(results[0]["losses"][-5:]) < sum(results[0]["losses"][:5])
    assert results[0]["metrics"]["ratio"] > 20


@pytest.mark.parametrize("codec", ["onebit", "terngrad", "dgc"])
@pytest.mark.parametrize("caps", [(0.2, 0.2), (0.2, 25.0)])
def test_a_run_continues_bit_for_bit_from_a_file(pool, codec, caps, tmp_path):
    for r in pool.run(jobs.continued, codec, str(tmp_path), caps):
        assert r["equal"]
        assert r["residuals"]
        assert r["iteration"] == 8
        events = json.loads(Path(r["trace"]).read_text(encoding="utf-8"))["traceEvents"]
        assert {"encode", "merge", "decode", "exposed"} <= {e["name"] for e in events}
        assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


@pytest.mark.parametrize(
    "feature", ["no_sync", "unused", "static_graph", "bucket_view", "sparse", "join"]
)
def test_features_of_ddp(pool, feature):
    results = pool.run(jobs.features, feature)
    for codec in ("none", "onebit"):
        a, b = (r[codec] for r in results)
        assert a["parameters"] == b["parameters"], codec
        assert a["iterations"] == b["iterations"]
        if feature != "join":
            assert sum(a["losses"][-5:]) < sum(a["losses"][:5])
    plain, onebit = results[0]["none"], results[0]["onebit"]
    if feature == "no_sync":
        assert plain["iterations"] == onebit["iterations"] == 10


def test_the_default_plan_is_measured_and_the_same_on_all_ranks(pool, tmp_path):
    results = pool.run(jobs.planned, str(tmp_path))
    a, b = results
    assert a["profile"] == b["profile"]
    assert a["explained"] == b["explained"]
    assert a["parameters"] == b["parameters"]
    assert a["saved"]["profile"] == a["profile"]
    lines = a["explained"].splitlines()
    assert lines[0].split()[:4] == ["bucket", "elements", "codec", "part"]
    assert len(lines) >= 4
    assert all(line.split()[2] == "onebit" for line in a["slow"].splitlines()[2:])
    assert a["ratio"] > 15


def test_a_scaler_skips_the_step_on_all_ranks(pool):
    a, b = pool.run(jobs.scaled)
    assert a["scales"] == b["scales"]
    assert a["scales"][2:5] == [2.0**10, 2.0**9, 2.0**9]
    assert a["parameters"] == b["parameters"]
    assert a["not_finite"] > 0
    assert sum(a["losses"][-3:]) < sum(a["losses"][:3])
