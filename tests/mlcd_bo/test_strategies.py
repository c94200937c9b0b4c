import numpy as np
import pytest

import mlcd_bo as mlcd
from tests.mlcd_bo.worlds import World, two_types

JOB = mlcd.Job(total_samples=1000 * 3600 * 8)
SCENARIOS = {
    "fastest": mlcd.Scenario.fastest(),
    "budget": mlcd.Scenario.fastest_within(budget=30.0),
    "deadline": mlcd.Scenario.cheapest_by(deadline=15.0),
    "both": mlcd.Scenario("cost", budget=60.0, deadline=15.0),
    "cheapest": mlcd.Scenario("cost"),
}


def test_the_six_and_the_pruned_one_are_there():
    assert set(mlcd.strategies()) == {
        "gittins", "heterbo", "heterbo-pruned", "cherrypick", "convbo", "ei_per_cost", "random"
    }  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("strategy", mlcd.strategies())
def test_every_strategy_ends_with_a_measured_pick_it_can_explain(strategy, scenario):
    world = World(two_types(), bumps={"big x2": 0.2, "small x8": -0.3})
    search = mlcd.DeploymentOptimizer(world.space, SCENARIOS[scenario], JOB, strategy, seed=1)
    best = search.run(world)
    assert 1 <= best.trials <= len(world.space)
    assert len(set(world.seen)) == len(world.seen)
    assert "stops because" in best.reason
    hours = JOB.work / world.speed(best.deployment) / 3600
    assert best.hours == pytest.approx(hours, rel=0.3)


@pytest.mark.parametrize("strategy", mlcd.strategies())
def test_same_seed_same_search(strategy):
    runs = []
    for seed in (0, 0, 1):
        world = World(two_types())
        mlcd.DeploymentOptimizer(world.space, SCENARIOS["fastest"], JOB, strategy, seed=seed).run(
            world
        )
        runs.append([d.key for d in world.seen])
    assert runs[0] == runs[1]
    if strategy == "random":
        assert runs[0] != runs[2]


@pytest.mark.parametrize("strategy", ["gittins", "heterbo", "heterbo-pruned"])
@pytest.mark.parametrize("factor", [1.1, 1.5, 3.0])
def test_reserve_is_kept_by_those_that_promise_it(strategy, factor):
    world = World(two_types(counts=(1, 2, 4, 8, 16)), scaling=0.6, seconds=600)
    hours = {d: JOB.work / world.speed(d) / 3600 for d in world.space}
    search = mlcd.DeploymentOptimizer(
        world.space, mlcd.Scenario.cheapest_by(factor * min(hours.values())), JOB, strategy
    )
    held = False
    while chosen := search.ask():
        search.tell(mlcd.Trial(chosen[0], world.profile(chosen[0], mlcd.Limits())))
        seen = [hours[t.deployment] for t in search.trials]
        kept = search.ledger.hours + min(seen) <= search.ledger.deadline
        assert kept or not held
        held = kept
    if held:
        pick = search.recommend().deployment
        assert search.ledger.hours + hours[pick] <= search.ledger.deadline


def test_heterbo_starts_with_the_smallest_of_each_type():
    world = World(two_types())
    mlcd.DeploymentOptimizer(world.space, SCENARIOS["fastest"], JOB, "heterbo").run(world)
    assert {d.key for d in world.seen[:2]} == {"small x1", "big x1"}


def test_pruning_drops_counts_past_a_decline():
    world = World(two_types(), bumps={"big x4": -2.0, "small x4": -2.0})
    search = mlcd.DeploymentOptimizer(world.space, SCENARIOS["fastest"], JOB, "heterbo-pruned")
    for key in ("big x1", "big x2", "big x4", "small x1", "small x2", "small x4"):
        (deployment,) = (d for d in world.space if d.key == key)
        search.tell(mlcd.Trial(deployment, world.profile(deployment, mlcd.Limits())))
    assert search.ask() == []
    soft = mlcd.DeploymentOptimizer(world.space, SCENARIOS["fastest"], JOB, "heterbo")
    for trial in search.trials:
        soft.tell(trial)
    assert np.isfinite(soft.recommend().hours)


def test_cherrypick_makes_at_least_six_runs():
    world = World(two_types())
    mlcd.DeploymentOptimizer(world.space, SCENARIOS["fastest"], JOB, "cherrypick").run(world)
    assert len(world.seen) >= 6


@pytest.mark.parametrize("strategy", mlcd.strategies())
def test_trials_side_by_side_that_take_no_time_of_their_own(strategy):
    # Warnings are errors: a second trial of the same length adds no hours, and no 0 / 0.
    world = World(two_types(), seconds=180.0)
    world.trial_seconds = lambda deployment: 180.0
    job = mlcd.Job(total_samples=1000 * 3600)
    search = mlcd.DeploymentOptimizer(two_types(), mlcd.Scenario.fastest(), job, strategy)
    assert search.run(world, parallel=3).measured
