from dataclasses import replace

import numpy as np
import pytest

import mlcd_bo as mlcd
from mlcd_bo import _price
from tests.mlcd_bo.worlds import World, two_types

JOB = mlcd.Job(total_samples=1000 * 3600 * 8)


def search_of(scenario, tried=(0, 5, 6), **options):
    world = World(two_types(), **options)
    search = mlcd.DeploymentOptimizer(world.space, scenario, JOB, trial_cost=world.trial_seconds)
    for row in tried:
        chosen = world.space[row]
        search.tell(mlcd.Trial(chosen, world.profile(chosen, mlcd.Limits())))
    return search


def harm_one_by_one(s, blind):
    """The definition: the best final run after each trial is paid, less the best now."""
    possible = s.observed if s.incumbents().any() else ~s.failed
    factor = np.where(s.observed, 1.0, blind)

    def best(hours, dollars):
        kept = s.feasible(s.most_hours(hours, dollars))
        return (factor * _price.with_misses(s, kept))[possible].min()

    costs = zip(s.trial_hours * s.expected, s.trial_dollars * s.expected, strict=True)
    return np.array([max(best(*cost) - best(0.0, 0.0), 0.0) for cost in costs])


@pytest.mark.parametrize(
    "scenario",
    [
        mlcd.Scenario.cheapest_by(9.0),
        mlcd.Scenario.cheapest_by(3.0),
        mlcd.Scenario.fastest_within(9.0),
        mlcd.Scenario("time", budget=12.0, deadline=5.0),
    ],
)
@pytest.mark.parametrize("runs", [64, 6])
def test_harm_is_what_the_best_final_run_loses(scenario, runs, monkeypatch):
    monkeypatch.setattr(_price, "_RUNS", runs)
    s = search_of(scenario, seconds=1200.0).situation()
    hours, dollars = s.trial_hours * s.expected, s.trial_dollars * s.expected
    harm = _price.harm(s, hours, dollars, 1.03)
    # A few runs only, the best and the safest, must do as well as all.
    np.testing.assert_allclose(harm, harm_one_by_one(s, 1.03), rtol=1e-9, atol=1e-12)
    assert (harm >= 0).all()


def test_without_a_limit_a_trial_costs_its_bill():
    s = search_of(mlcd.Scenario.fastest()).situation()
    cost = _price.prices(s, s.expected_objective, 1.03)
    np.testing.assert_allclose(cost.ranking, s.trial_hours * s.expected)
    np.testing.assert_allclose(cost.stopping, cost.ranking)


def test_training_that_is_carried_on_is_taken_off_the_bill():
    s = search_of(mlcd.Scenario("cost")).situation()
    plain = _price.prices(s, s.expected_objective, 1.03).stopping
    kept = replace(s, kept_part=0.5)
    cost = _price.prices(kept, s.expected_objective, 1.03).stopping
    final = int(np.argmin(np.where(s.observed, 1.0, 1.03) * s.expected_objective))
    share = 0.5 * s.trial_hours * s.expected / np.exp(s.mean)
    saved = share * np.exp(s.mean[final]) * s.rate[final]
    np.testing.assert_allclose(cost, np.maximum(plain - saved, 1e-9))
    # On the deployment of the final run itself, half of the trial is training one would pay anyway.
    assert cost[final] == pytest.approx(0.5 * plain[final], rel=1e-6)


def test_the_part_that_is_kept_is_learned_from_trials():
    search = search_of(mlcd.Scenario("cost"), tried=(0,))
    assert search.situation().kept_part == 0.0
    seen = mlcd.Observation(100.0, 1.0, 60.0, 0.1, work_done=3000.0)
    search.tell(mlcd.Trial(search.space[1], seen))
    assert search.situation().kept_part == pytest.approx(0.25)


def test_a_search_that_keeps_its_training_tries_more():
    spent = {}
    for kept_s in (0.0, 590.0):
        world = World(two_types((1, 2, 3, 4, 6, 8)), bumps={"big x3": 0.3, "small x6": 0.3})
        cells = {d: mlcd._trace.Cell(d, world.speed(d), "ok") for d in world.space}
        trace = mlcd._trace.Trace("made up", cells, world.space)
        profiler = mlcd.TraceProfiler(trace, trial_cost=mlcd.TrialCost(0, 20, 600), kept_s=kept_s)
        search = mlcd.DeploymentOptimizer(
            trace.space, mlcd.Scenario("cost"), profiler.job_of(hours=3)
        )
        best = search.run(profiler)
        spent[kept_s] = (len(search.trials), search.work_left / search.job.work)
        assert best.deployment in trace.space
    assert spent[590.0][0] > spent[0.0][0]
    assert spent[590.0][1] < 1.0 == spent[0.0][1]
