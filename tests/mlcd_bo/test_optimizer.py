import os
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlcd_bo as mlcd
from mlcd_bo._trace import Cell, Trace
from tests.mlcd_bo.worlds import World, two_types

HOUR = mlcd.Job(total_samples=1000 * 3600 * 8)


def shut(search):
    """What may not be tried any more."""
    return [d for d, o in zip(search.space, search._situation().open, strict=True) if not o]


def final_hours(world, deployment, job=HOUR):
    return job.work / world.speed(deployment) / 3600


def test_finds_the_cheapest_by_a_deadline():
    world = World(two_types(), bumps={"big x2": 0.5})
    search = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.cheapest_by(20.0), HOUR)
    best = search.run(world)
    costs = {d: final_hours(world, d) * d.price_per_hour for d in world.space}
    assert costs[best.deployment] <= 1.25 * min(costs.values())
    assert best.measured
    assert best.total_hours <= 20.0
    assert best.trials == len(world.seen) < len(world.space)
    assert best.reason.count(". ") == 1
    assert best.reason.endswith(".")


def test_fastest_without_a_limit_goes_large():
    world = World(two_types())
    best = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.fastest(), HOUR).run(world)
    assert best.deployment.key == "big x8"
    assert best.within_limit == 1.0
    assert best.alternatives[0].deployment != best.deployment


def test_the_answer_has_one_unit_of_time_and_counts_in_grammar():
    space = mlcd.SearchSpace(mlcd.Catalog([mlcd.InstanceType("only", 1.0)]), [1])
    search = mlcd.DeploymentOptimizer(space, mlcd.Scenario.fastest(), mlcd.Job(3600.0))
    search.tell(mlcd.Trial(space[0], mlcd.Observation(100.0, 0.0, 9.0, 0.1)))
    said = str(search.recommend())
    assert "0.01 h (" in said
    assert "measured at 0.01 h for" in said
    assert "with 1 trial $" in said
    search.tell(mlcd.Trial(space[0], mlcd.Observation(100.0, 0.0, 9.0, 0.1)))
    assert "with 2 trials $" in str(search.recommend())


def test_every_trial_is_charged_in_hours_and_dollars():
    # The first trials too: a search that gets them free looks better than it is.
    world = World(two_types())
    search = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.fastest_within(100.0), HOUR)
    search.run(world)
    assert world.seen
    seconds = [world.trial_seconds(d) for d in world.seen]
    dollars = [s / 3600 * d.price_per_hour for s, d in zip(seconds, world.seen, strict=True)]
    assert search.ledger.hours == pytest.approx(sum(seconds) / 3600)
    assert search.ledger.dollars == pytest.approx(sum(dollars))
    assert search.ledger.dollars_left == pytest.approx(100.0 - sum(dollars))


class Fragile(World):
    """Loses its connection for clusters of two machines, after the others have ended."""

    def profile(self, deployment, limits):
        if deployment.count == 2:
            time.sleep(0.05)
            raise ConnectionError("lost connection")
        return super().profile(deployment, limits)


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_raising_trial_is_charged_and_loses_none_beside_it(tmp_path, parallel):
    world = Fragile(two_types((1, 2)))
    store = tmp_path / "search.db"
    search = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.fastest(), HOUR, store=store)
    told = []
    with pytest.raises(ConnectionError, match="lost connection"):
        search.run(world, parallel=parallel, on_trial=told.append)
    assert told == search.trials
    if parallel > 1:
        assert {t.deployment for t in search.trials} == {d for d in world.space if d.count == 1}
    # Each raising trial ran for at least 0.05 s; beside others, its hours count with theirs.
    paid = search.ledger.dollars - sum(t.observation.dollars for t in search.trials)
    raised = [d for d in world.space if d.count == 2][: None if parallel > 1 else 1]
    cheapest = min(d.price_per_hour for d in raised) * len(raised)
    assert 0.05 / 3600 * cheapest <= paid < 5.0 / 3600 * cheapest * 4
    longest = max((t.observation.seconds for t in search.trials), default=0.0)
    assert search.ledger.hours * 3600 == pytest.approx(longest or 0.05, abs=5.0)
    assert mlcd.DeploymentOptimizer.look(store).trials == search.trials
    assert mlcd.DeploymentOptimizer.resume(store).ledger == search.ledger


def test_an_interrupt_is_charged(tmp_path):
    world = World(two_types())

    def interrupted(deployment, limits):
        time.sleep(0.05)
        raise KeyboardInterrupt

    world.profile = interrupted
    search = mlcd.DeploymentOptimizer(
        world.space, mlcd.Scenario.fastest(), HOUR, store=tmp_path / "s.db"
    )
    with pytest.raises(KeyboardInterrupt):
        search.run(world)
    assert 0.05 <= search.ledger.hours * 3600 < 5.0
    assert search.ledger.dollars > 0
    assert mlcd.DeploymentOptimizer.resume(tmp_path / "s.db").ledger == search.ledger


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_profiler_must_return_an_observation(parallel):
    world = World(two_types())
    world.profile = lambda deployment, limits: 5.0
    search = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.fastest(), HOUR)
    with pytest.raises(mlcd.InvalidInput, match="must return an Observation, got 5"):
        search.run(world, parallel=parallel)


def test_parallel_trials_count_their_longest_hours_and_all_their_dollars():
    world = World(two_types())
    search = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.fastest(), HOUR)
    search.run(world, parallel=3)
    by_batch = {}
    for trial in search.trials:
        by_batch.setdefault(trial.batch, []).append(trial.observation.seconds)
    assert max(map(len, by_batch.values())) > 1
    assert search.ledger.hours == pytest.approx(sum(map(max, by_batch.values())) / 3600)
    assert search.ledger.dollars == pytest.approx(sum(t.observation.dollars for t in search.trials))


def test_ask_changes_nothing_and_gives_distinct_deployments():
    world = World(two_types())
    search = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.fastest(), HOUR)
    assert search.ask(4) == search.ask(4)
    assert len(set(search.ask(4))) == len(search.ask(4))
    assert search.ask() == search.ask(4)[:1]


def test_one_candidate_is_run_once():
    space = mlcd.SearchSpace(mlcd.Catalog([mlcd.InstanceType("a", 1.0)]), [2])
    world = World(space)
    best = mlcd.DeploymentOptimizer(space, mlcd.Scenario.fastest(), HOUR).run(world)
    assert best.deployment == space[0]
    assert best.trials == 1
    assert best.alternatives == ()


def test_all_infeasible_names_the_nearest_miss():
    world = World(two_types())
    search = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.cheapest_by(0.9), HOUR)
    with pytest.raises(mlcd.NoFeasibleDeployment, match="nearest miss") as caught:
        search.run(world)
    nearest = caught.value.nearest
    assert nearest.measured
    hours = {d: final_hours(world, d) for d in world.seen}
    assert hours[nearest.deployment] == min(hours.values())
    assert nearest.total_hours > 0.9


def test_out_of_memory_rules_out_fewer_machines_or_the_type():
    for policy, closed in (
        ("global", {"small x1", "small x2"}),
        ("local", {"small x1", "small x2", "small x4", "small x8"}),
    ):
        job = mlcd.Job(total_samples=1e7, batch_policy=policy)
        search = mlcd.DeploymentOptimizer(two_types(), mlcd.Scenario.fastest(), job)
        lost = mlcd.Observation.failed("oom", 10.0, 0.1)
        search.tell(mlcd.Trial(search.space[1], lost))
        assert {
            d.key for d, o in zip(search.space, search._situation().open, strict=True) if not o
        } == closed


def test_quota_rules_out_more_machines_of_the_type():
    search = mlcd.DeploymentOptimizer(two_types(), mlcd.Scenario.fastest(), HOUR)
    search.tell(mlcd.Trial(search.space[2], mlcd.Observation.failed("quota", 10.0, 0.0)))
    assert [d.key for d in shut(search)] == ["small x4", "small x8"]


def test_preempted_may_be_tried_once_more():
    search = mlcd.DeploymentOptimizer(two_types(), mlcd.Scenario.fastest(), HOUR)
    gone = mlcd.Trial(search.space[0], mlcd.Observation.failed("preempted", 5.0, 0.1))
    search.tell(gone)
    assert search._situation().open[0]
    search.tell(gone)
    assert not search._situation().open[0]
    assert search.ledger.dollars == pytest.approx(0.2)


def test_two_broken_trials_end_the_search_with_the_log():
    world = World(two_types(), failures={d.key: "error" for d in two_types()})
    search = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.fastest(), HOUR)
    with pytest.raises(mlcd.ProfilingFailed, match="as told") as caught:
        search.run(world)
    assert len(caught.value.trials) == 2
    with pytest.raises(mlcd.NothingObserved):
        search.recommend()


def test_failures_lead_away_and_are_charged():
    world = World(two_types(), failures={d.key: "oom" for d in two_types() if d.count < 4})
    search = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.cheapest_by(12.0), HOUR)
    best = search.run(world)
    assert best.deployment.count >= 4
    lost = [t for t in search.trials if t.observation.status == "oom"]
    assert lost
    assert search.ledger.dollars >= sum(t.observation.dollars for t in lost)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"strategy": "best"}, mlcd.UnknownName, "gittins"),
        ({"scenario": mlcd.Scenario.fastest_within(1e-6)}, mlcd.InvalidInput, "cheapest possible"),
        ({"scenario": mlcd.Scenario.cheapest_by(1e-6)}, mlcd.InvalidInput, "shortest possible"),
        ({"scenario": "fast"}, mlcd.InvalidInput, "scenario"),
        ({"space": [1]}, mlcd.InvalidInput, "space"),
        ({"job": None}, mlcd.InvalidInput, "job"),
        ({"trial_cost": lambda d: float("nan")}, mlcd.InvalidInput, "trial_cost"),
    ],
)
def test_refuses(change, error, says):
    good = {"space": two_types(), "scenario": mlcd.Scenario.fastest(), "job": HOUR}
    with pytest.raises(error, match=says):
        mlcd.DeploymentOptimizer(**{**good, **change}).ask()


def test_a_limit_is_judged_by_the_profiler_s_own_trials():
    world = World(two_types(), seconds=1.0)
    world.trial_seconds = lambda deployment: 1.0
    scenario = mlcd.Scenario.cheapest_by(deadline=0.02)
    search = mlcd.DeploymentOptimizer(world.space, scenario, mlcd.Job(total_samples=1e4))
    with pytest.raises(mlcd.InvalidInput, match="shortest possible"):
        search.ask()
    assert search.run(world).total_hours <= 0.02


def test_refuses_strangers():
    search = mlcd.DeploymentOptimizer(two_types(), mlcd.Scenario.fastest(), HOUR)
    stranger = mlcd.Deployment(mlcd.InstanceType("x", 1.0), 1)
    with pytest.raises(mlcd.InvalidInput, match="not in the search space"):
        search.tell(mlcd.Trial(stranger, mlcd.Observation(1.0, 0.0, 1.0, 1.0)))
    with pytest.raises(mlcd.InvalidInput, match="Trial"):
        search.tell("trial")
    with pytest.raises(mlcd.InvalidInput, match="profiler"):
        search.run(object())
    with pytest.raises(mlcd.InvalidInput, match="parallel"):
        search.run(World(two_types()), parallel=0)


@st.composite
def jobs(draw):
    """A trace with any speeds at all, some cells failed, and a limit somewhere in its range."""
    counts = sorted(draw(st.sets(st.integers(1, 12), min_size=2, max_size=4)))
    prices = draw(st.lists(st.floats(0.05, 5.0), min_size=1, max_size=3, unique=True))
    space = mlcd.SearchSpace(
        mlcd.Catalog([mlcd.InstanceType(f"t{i}", p) for i, p in enumerate(prices)]), counts
    )
    cells = {}
    for d in space:
        fails = draw(st.integers(0, 9)) == 0
        speed = float("nan") if fails else float(np.exp(draw(st.floats(-2.5, 2.5))))
        cells[d] = Cell(d, speed, "oom" if fails else "ok")
    limit = draw(st.floats(1.01, 4.0)), draw(st.sampled_from(["budget", "deadline", "both"]))
    return Trace("made up", cells, space), *limit, draw(st.integers(1, 3))


@given(jobs())
@settings(max_examples=400)
def test_the_limit_is_kept_once_an_incumbent_keeps_it(case):
    trace, factor, limit, side_by_side = case
    good = [c for c in trace.cells.values() if c.status == "ok"]
    if not good:
        return
    profiler = mlcd.TraceProfiler(trace, trial_cost=mlcd.TrialCost(0, 20, 120))
    job = profiler.job_of(hours=3)
    hours = {c.deployment: job.work / c.speed / 3600 for c in good}
    budget = factor * min(h * d.price_per_hour for d, h in hours.items())
    deadline = factor * min(hours.values())
    scenario = mlcd.Scenario(
        "cost" if limit == "deadline" else "time",
        None if limit == "deadline" else budget,
        None if limit == "budget" else deadline,
    )
    try:
        search = mlcd.DeploymentOptimizer(
            trace.space, scenario, job, trial_cost=profiler.trial_seconds
        )
    except mlcd.InvalidInput:
        return

    def bill(deployment):
        ledger = search.ledger
        run = hours[deployment]
        return ledger.hours + run, ledger.dollars + run * deployment.price_per_hour

    def keeps(deployment):
        total_hours, total_dollars = bill(deployment)
        tolerance = 1 + 1e-9
        return (
            total_hours <= search.ledger.deadline * tolerance
            and total_dollars <= search.ledger.budget * tolerance
        )

    held = False
    while chosen := search.ask(side_by_side):
        batch = len(search.trials)
        for deployment in chosen:
            outcome = profiler.profile(deployment, mlcd.Limits())
            search.tell(mlcd.Trial(deployment, outcome, batch))
        seen = [t.deployment for t in search.trials if t.observation.status == "ok"]
        kept = any(keeps(d) for d in seen)
        assert kept or not held, "a trial ate the reserve of the last feasible deployment"
        held = kept
    if held:
        assert keeps(search.recommend().deployment)


@pytest.mark.parametrize("seed", [-1, 1.5, "a", None, float("nan"), True])
def test_seed_refused(seed):
    space = two_types()
    trace = Trace("one", {space[0]: Cell(space[0], 1.0, "ok")}, space)
    with pytest.raises(mlcd.InvalidInput, match="seed must be a whole number"):
        mlcd.DeploymentOptimizer(two_types(), mlcd.Scenario.fastest(), HOUR, seed=seed)
    with pytest.raises(mlcd.InvalidInput, match="seed must be a whole number"):
        mlcd.TraceProfiler(trace, seed=seed)


def test_an_interrupt_gives_up_the_trials_that_run_side_by_side():
    given_up, running = threading.Event(), []

    class Patient(World):
        def profile(self, deployment, limits):
            running.append(deployment)
            if len(running) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            # Nobody who does not interrupt it sees its end.
            assert given_up.wait(120)
            raise KeyboardInterrupt

        def interrupt(self):
            given_up.set()

    search = mlcd.DeploymentOptimizer(two_types(), mlcd.Scenario.fastest(), HOUR)
    with pytest.raises(KeyboardInterrupt):
        search.run(Patient(two_types()), parallel=2)
    assert len(running) == 2
    assert search.ledger.dollars > 0
