"""The cost model, profiles and what they make of bucket sizes."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipress_torch import HiPressState, Plan, PlanError, Profile, codecs
from hipress_torch._cli import main
from hipress_torch._plan import Term
from hipress_torch._replan import Watch

CODECS = {name: codecs.get(name)() for name in ("onebit", "fp16")}


def profile_of(bytes_per_s: float, latency_s: float = 1e-4, ranks: int = 4) -> Profile:
    """A network of a given rate, and kernels of 4 GB/s."""
    per_byte = 1 / bytes_per_s
    ring = 2 * (ranks - 1) / ranks
    kernel = {k: Term(1e-6, 0.0, 1e-9) for k in ("encode", "merge", "decode")}
    return Profile(
        ranks,
        {
            "all_reduce": Term(latency_s, latency_s, ring * per_byte),
            "all_to_all": Term(latency_s, latency_s, per_byte),
            "all_gather": Term(latency_s, latency_s, (ranks - 1) * per_byte),
        },
        {"onebit": kernel, "fp16": kernel},
    )


def test_a_slow_network_compresses_what_is_large_and_a_fast_one_nothing():
    slow = Plan(profile_of(12.5e6), ("onebit", "fp16"))
    assert slow.choose(10_000_000, CODECS).codec == "onebit"
    assert slow.choose(100, CODECS).codec == "none"
    fast = Plan(profile_of(50e9), ("onebit", "fp16"))
    for elements in (1_000, 1_000_000, 100_000_000):
        assert fast.choose(elements, CODECS).codec == "none"


@given(
    st.integers(1, 10**9),
    st.floats(1e6, 1e11),
    st.floats(1e-6, 1e-2),
    st.integers(2, 64),
)
def test_the_choice_is_the_cheapest_candidate(elements, rate, latency, ranks):
    plan = Plan(profile_of(rate, latency, ranks), ("onebit", "fp16"))
    choice = plan.choose(elements, CODECS)
    times = dict(choice.candidates)
    assert set(times) == {"none", "onebit", "fp16"}
    assert choice.seconds == times[choice.codec] == min(times.values())


@given(st.floats(1e6, 1e10), st.integers(2, 32))
def test_once_compression_pays_it_pays_for_larger_buckets_too(rate, ranks):
    plan = Plan(profile_of(rate, 1e-4, ranks), ("onebit",))
    chosen = [plan.choose(2**e, CODECS).codec == "onebit" for e in range(8, 28)]
    assert chosen == sorted(chosen)


def test_a_term_fits_its_ends_and_keeps_its_floor():
    term = Term.fit({1000: 0.001, 101_000: 0.011, 201_000: 0.021})
    assert term(101_000) == pytest.approx(0.011)
    assert term(0) == 0.001
    assert Term.fit({8: 0.5})(1e9) == 0.5
    disturbed = Term.fit({1000: 0.5, 101_000: 0.001, 201_000: 0.021})
    assert disturbed(1000) == pytest.approx(0.001)
    with pytest.raises(PlanError, match="at least one"):
        Term.fit({})


def with_hop(profile: Profile, hop: Term) -> Profile:
    return replace(profile, collectives={**profile.collectives, "hop": hop})


def test_a_ring_is_chosen_where_its_hops_are_cheaper_than_all_to_all():
    profile = profile_of(12.5e6)
    cheap = with_hop(profile, Term(1e-5, 1e-5, 1e-10))
    plan = Plan(cheap, ("onebit", "fp16"))
    choice = plan.choose(10_000_000, CODECS)
    assert choice.ring
    assert choice.label == "onebit (ring)"
    assert choice.seconds < plan.compressed(10_000_000, CODECS["onebit"], choice.part_elements)
    # Alike in cost by byte, the hops' latencies and merges one by one decide for the servers.
    dear = with_hop(profile, profile.collectives["all_to_all"])
    assert not Plan(dear, ("onebit", "fp16")).choose(10_000_000, CODECS).ring
    assert not Plan(profile, ("onebit",)).choose(10_000_000, CODECS).ring


@pytest.mark.parametrize("strategy", ["ps", "ring"])
def test_a_plan_keeps_to_the_strategy_it_was_given(strategy):
    for hop in (Term(1e-5, 1e-5, 1e-12), Term(1.0, 1.0, 1e-3)):
        profile = with_hop(profile_of(12.5e6), hop)
        plan = Plan(profile, ("onebit",), strategies=(strategy,))
        compressed = [c for c in plan.options(10_000_000, CODECS) if c.codec != "none"]
        assert {c.ring for c in compressed} == {strategy == "ring"}
    with pytest.raises(PlanError, match="strategies must be"):
        Plan(profile_of(1e9), ("onebit",), strategies=("tree",))


def test_all_buckets_go_by_ring_where_that_is_shorter():
    cheap = with_hop(profile_of(12.5e6), Term(1e-5, 1e-5, 1e-10))
    backward = tuple((i, 4_000_000, 0.001) for i in range(3))
    made = Plan(cheap, ("onebit", "fp16"), backward).choose_all(CODECS)
    assert all(c.ring and c.codec == "onebit" for c in made)


def test_a_gain_that_is_lost_in_a_step_is_not_taken():
    backward = ((0, 1_000_000, 0.0),)
    plan = Plan(profile_of(1e9), ("onebit",), backward)
    (gained,) = plan.choose_all(CODECS)
    assert gained.codec == "onebit"
    seconds = dict(gained.candidates)
    gain = seconds["none"] - seconds["onebit"]
    assert gain > 0
    for share, codec in ((0.04, "none"), (0.06, "onebit")):
        (choice,) = replace(plan, step_s=gain / share).choose_all(CODECS)
        assert choice.codec == codec


@pytest.mark.parametrize(
    ("windows", "told"),
    [
        ([1.0, 1.2, 0.85, 1.24], [False] * 4),
        ([1.0, 1.3, 1.0, 0.7, 1.0], [False] * 5),
        ([1.0, 1.3, 1.3], [False, False, True]),
        ([1.0, 0.7, 0.7], [False, False, True]),
        ([1.0, 1.3, 0.7], [False, False, True]),
        ([0.0, 2.0, 2.0, 2.0], [False] * 4),
    ],
)
def test_a_drift_is_two_windows_in_a_row(windows, told):
    watch = Watch()
    assert [watch.judge(seconds) for seconds in windows] == told
    watch.forget()
    assert not watch.judge(5.0)
    assert not watch.judge(5.0)


def test_a_profile_survives_its_file(tmp_path):
    profile = profile_of(1e9)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is no profile"),
        ("{}", "calibrate again"),
        ("[]", "calibrate again"),
        (json.dumps({"version": 9}), "this release reads 1"),
        (json.dumps({"version": 1, "ranks": 2, "collectives": {"a": {}}, "codecs": {}}), "again"),
        (json.dumps({"version": 1, "ranks": 2, "collectives": {}, "codecs": {}}), "all_reduce"),
        (json.dumps({**profile_of(1e9).to_dict(), "ranks": "a"}), "ranks must be 1 or more"),
        (json.dumps(profile_of(1e9).to_dict()).replace("1e-09", '"x"'), "are no times"),
    ],
)
def test_a_wrong_file_is_told(text, told, tmp_path, capsys):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=told):
        Profile.load(path)
    assert main(["explain", str(path)]) == 2
    assert told in capsys.readouterr().err


def test_explain_prints_the_plan(tmp_path, capsys):
    profile_of(12.5e6).save(tmp_path / "p.json")
    assert main(["explain", str(tmp_path / "p.json"), "100", "10000000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:2] == ["100", "none"]
    assert lines[3].split()[:2] == ["10000000", "onebit"]
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "missing.json")]) == 2
    assert "`hipress calibrate` writes one" in capsys.readouterr().err


def test_explain_refuses_sizes_below_one(tmp_path, capsys):
    profile_of(12.5e6).save(tmp_path / "p.json")
    assert main(["explain", str(tmp_path / "p.json"), "0"]) == 2
    assert "1 element or more, got 0" in capsys.readouterr().err


@pytest.mark.cluster
def test_calibrate_measures_and_writes(tmp_path, capsys):
    path = tmp_path / "p.json"
    assert main(["calibrate", str(path), "--codecs", "onebit,nbit"]) == 0
    profile = Profile.load(path)
    assert profile.ranks == 2
    assert set(profile.codecs) == {"onebit", "nbit"}
    assert all(t.floor_s > 0 for t in profile.collectives.values())
    assert "all_reduce" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"plan": "sometimes"}, "plan must be a Plan or one of auto, always, never"),
        ({"strategy": "tree"}, "strategy must be one of auto, ps, ring"),
        ({"strategy": "allreduce"}, "needs codec='none'"),
        ({"min_elements": -1}, "min_elements must be a whole number"),
        ({"timeout_s": 0}, "timeout_s must be more than 0"),
    ],
)
def test_wrong_arguments_are_told(arguments, told):
    with pytest.raises(PlanError, match=told):
        HiPressState("onebit", **arguments)
