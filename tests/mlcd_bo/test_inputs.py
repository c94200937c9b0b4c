import datetime
import math
from pathlib import Path

import numpy as np
import pytest

import mlcd_bo as mlcd

GOOD = mlcd.InstanceType("a", 1.0)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"price": 0}, "price"),
        ({"price": -1.0}, "price"),
        ({"price": math.nan}, "price"),
        ({"price": math.inf}, "price"),
        ({"price": "1"}, "price"),
        ({"price": 10**400}, "price must be finite"),
        ({"price": True}, "price"),
        ({"name": ""}, "name"),
        ({"vcpus": 0}, "vcpus"),
        ({"mem_gib": math.nan}, "mem_gib"),
        ({"gpus": -1}, "gpus"),
        ({"spot_price": 0}, "spot_price"),
        ({"max_count": 0}, "max_count"),
        ({"quota": 1.5}, "quota"),
        ({"gpus": "two"}, "gpus"),
        ({"gpu_name": 5}, "gpu_name"),
    ],
)
def test_instance_type_refuses(fields, says):
    with pytest.raises(mlcd.CatalogError, match=says):
        mlcd.InstanceType(**{"name": "a", "price": 1.0, **fields})


def test_memory_is_that_of_the_accelerators_if_there_are_any():
    assert mlcd.InstanceType("c", 1, mem_gib=8).memory_gib == 8
    assert mlcd.InstanceType("g", 1, mem_gib=8, gpus=4, gpu_mem_gib=16).memory_gib == 64
    assert mlcd.InstanceType("g", 1, mem_gib=8, gpus=4).memory_gib is None


@pytest.mark.parametrize(
    ("types", "says"),
    [
        ([], "empty"),
        ([GOOD, mlcd.InstanceType("a", 2.0)], "twice"),
        (["a"], "InstanceType"),
        (None, "list"),
    ],
)
def test_catalog_refuses(types, says):
    with pytest.raises(mlcd.CatalogError, match=says):
        mlcd.Catalog(types)


@pytest.mark.parametrize("counts", [[0], [-1, 2], [1.5], [], ["1"], 3, "12", {"b": [1]}, {"a": []}])
def test_counts_refused(counts):
    with pytest.raises(mlcd.CatalogError, match="counts"):
        mlcd.SearchSpace(mlcd.Catalog([GOOD]), counts)


def test_counts_may_come_from_the_catalog_and_differ_by_type():
    catalog = mlcd.Catalog([GOOD, mlcd.InstanceType("b", 2.0)], counts={"a": [4, 1, 4], "b": [2]})
    assert [d.key for d in mlcd.SearchSpace(catalog)] == ["a x1", "a x4", "b x2"]
    with pytest.raises(mlcd.CatalogError, match="counts is missing"):
        mlcd.SearchSpace(mlcd.Catalog([GOOD]))


def test_quota_and_max_count_cut_the_space():
    kinds = [mlcd.InstanceType("q", 1, quota=2), mlcd.InstanceType("m", 1.5, max_count=4, quota=9)]
    space = mlcd.SearchSpace(mlcd.Catalog(kinds), [1, 2, 4, 8])
    assert [d.key for d in space] == ["q x1", "q x2", "m x1", "m x2", "m x4"]
    with pytest.raises(mlcd.CatalogError, match="no deployment is left"):
        mlcd.SearchSpace(mlcd.Catalog(kinds), [16])


def test_spot_and_knobs_widen_the_space():
    kinds = [mlcd.InstanceType("s", 1.0, spot_price=0.3), mlcd.InstanceType("o", 2.0)]
    space = mlcd.SearchSpace(mlcd.Catalog(kinds), [2], spot=True, knobs={"batch": [32, 64]})
    assert len(space) == 6
    spot = [d for d in space if d.spot]
    assert {d.price_per_hour for d in spot} == {0.6}
    assert spot[0].key == "s x2 spot batch=32"
    with pytest.raises(mlcd.InvalidInput, match="spot_price"):
        mlcd.Deployment(kinds[1], 1, spot=True)
    with pytest.raises(mlcd.InvalidInput, match="twice"):
        mlcd.SearchSpace(mlcd.Catalog(kinds), [2], knobs={"batch": [32, 32]})
    with pytest.raises(mlcd.InvalidInput, match="knobs"):
        mlcd.SearchSpace(mlcd.Catalog(kinds), [2], knobs={"batch": []})


@pytest.mark.parametrize(
    "knobs",
    [
        {5: [1]},
        {"two words": [1]},
        {"batch": "32"},
        {"batch": 32},
        {"mesh": [(1, 2)]},
        {"mesh": [[1, 2]]},
        {"rate": [None]},
        {"rate": [math.nan]},
        {"rate": [1j]},
        [("batch", [32])],
    ],
)
def test_knobs_refused(knobs):
    with pytest.raises(mlcd.InvalidInput, match="knobs"):
        mlcd.SearchSpace(mlcd.Catalog([GOOD]), [1], knobs=knobs)


def test_a_space_of_numpy_figures_is_a_plain_one():
    kind = mlcd.InstanceType("a", np.float32(1), vcpus=np.int64(4), quota=np.int32(8))
    knobs = {"batch": np.array([32, 64]), "rate": np.array([0.5], np.float32), "fused": [True]}
    space = mlcd.SearchSpace(mlcd.Catalog([kind]), np.array([1, 2]), knobs=knobs)
    plain = mlcd.SearchSpace(
        mlcd.Catalog([mlcd.InstanceType("a", 1.0, vcpus=4, quota=8)]),
        [1, 2],
        knobs={"batch": [32, 64], "rate": [0.5], "fused": [True]},
    )
    assert list(space) == list(plain)
    assert repr(list(space)) == repr(list(plain))
    with pytest.raises(mlcd.InvalidInput, match="instance_type"):
        mlcd.Deployment("a", 1)


def test_position_refuses_a_stranger():
    space = mlcd.SearchSpace(mlcd.Catalog([GOOD]), [1, 2])
    assert space.position(space[1]) == 1
    with pytest.raises(mlcd.InvalidInput, match="not in the search space"):
        space.position(mlcd.Deployment(GOOD, 3))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "exactly one"),
        ({"total_steps": 1, "total_samples": 1}, "exactly one"),
        ({"total_steps": 0}, "total_steps"),
        ({"total_samples": math.nan}, "total_samples"),
        ({"total_steps": 5, "batch_policy": "local"}, "give total_samples"),
        ({"total_samples": 5, "batch_policy": "weak"}, "batch_policy"),
        ({"total_samples": 5, "args": "--x 1"}, "args must be a list"),
        ({"total_samples": 5, "args": 1}, "args must be a list"),
        ({"total_samples": 5, "args": [None]}, "args must hold strings"),
        ({"total_samples": 5, "script": 7}, "script"),
    ],
)
def test_job_refuses(fields, says):
    with pytest.raises(mlcd.InvalidInput, match=says):
        mlcd.Job(**fields)


def test_scenarios():
    assert mlcd.Scenario.fastest().objective == "time"
    assert mlcd.Scenario.fastest_within(budget=3).budget == 3
    day = mlcd.Scenario.cheapest_by(deadline=datetime.timedelta(days=1))
    assert (day.objective, day.deadline) == ("cost", 24)
    assert mlcd.Scenario(budget=2.0).objective == "time"
    assert mlcd.Scenario("cost", budget=2, deadline=3).describe() == "cheapest within $2 by 3 h"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"budget": 1, "deadline": 1}, "without an objective"),
        ({"budget": 0}, "budget"),
        ({"deadline": -1}, "deadline"),
        ({"deadline": math.nan}, "deadline"),
        ({"objective": "speed"}, "objective"),
    ],
)
def test_scenario_refuses(fields, says):
    with pytest.raises(mlcd.InvalidInput, match=says):
        mlcd.Scenario(**fields)


@pytest.mark.parametrize("limit", [None, 0, math.inf, "3"])
def test_a_limit_left_out_is_not_no_limit(limit):
    with pytest.raises(mlcd.InvalidInput, match="budget must be"):
        mlcd.Scenario.fastest_within(limit)
    with pytest.raises(mlcd.InvalidInput, match="deadline must be"):
        mlcd.Scenario.cheapest_by(limit)


def test_arguments_become_strings():
    job = mlcd.Job(np.int64(5), args=["--lr", 0.1, Path("data")])
    assert job.args == ("--lr", "0.1", "data")
    assert type(job.total_steps) is float
    for profiler in (mlcd.LocalTorchrun, mlcd.SkyProfiler):
        with pytest.raises(mlcd.InvalidInput, match="args must be a list"):
            profiler(__file__, "a b")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"earlier": 5}, "earlier must be a list"),
        ({"earlier": "other.db"}, "earlier must be a list"),
        ({"trial_cost": 5}, "trial_cost must be a function"),
        ({"trial_cost": lambda d: "long"}, "trial_cost.*must be a number"),
        ({"trial_cost": lambda d: -1}, "trial_cost"),
        ({"strategy": ["gittins"]}, "strategy"),
    ],
)
def test_search_refuses(option, says):
    space = mlcd.SearchSpace(mlcd.Catalog([GOOD]), [1, 2])
    with pytest.raises(mlcd.InvalidInput, match=says):
        mlcd.DeploymentOptimizer(space, mlcd.Scenario.fastest(), mlcd.Job(5), **option)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"speed": math.nan}, "speed"),
        ({"speed": 0.0}, "speed"),
        ({"speed": math.inf}, "speed"),
        ({"speed_sem": math.nan}, "speed_sem"),
        ({"speed_sem": -1.0}, "speed_sem"),
        ({"seconds": -1.0}, "seconds"),
        ({"dollars": math.nan}, "dollars"),
        ({"status": "fine"}, "status"),
        ({"status": "oom"}, "not a slow run"),
        ({"work_done": -2.0}, "work_done"),
        ({"speed": "a"}, "speed must be a number"),
        ({"speed": None}, "speed must be a number"),
        ({"seconds": True}, "seconds must be a number"),
        ({"dollars": [1.0]}, "dollars must be a number"),
    ],
)
def test_observation_refuses(fields, says):
    good = {"speed": 1.0, "speed_sem": 0.1, "seconds": 2.0, "dollars": 3.0}
    with pytest.raises(mlcd.InvalidInput, match=says):
        mlcd.Observation(**{**good, **fields})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"deployment": "a x1"}, "deployment must be of type Deployment"),
        ({"observation": None}, "observation must be of type Observation"),
        ({"batch": -1}, "batch"),
        ({"batch": "a"}, "batch"),
        ({"price_per_hour": math.nan}, "price_per_hour"),
        ({"price_per_hour": -5}, "price_per_hour"),
        ({"price_per_hour": "1"}, "price_per_hour"),
        ({"began": math.inf}, "began"),
    ],
)
def test_trial_refuses(fields, says):
    good = {
        "deployment": mlcd.Deployment(GOOD, 1),
        "observation": mlcd.Observation(1.0, 0.1, 2.0, 3.0),
    }
    with pytest.raises(mlcd.InvalidInput, match=says):
        mlcd.Trial(**{**good, **fields})


def test_a_trial_holds_plain_values():
    seen = mlcd.Observation(np.float32(2), np.float16(0.5), np.int64(3), np.float32(4), work_done=1)
    trial = mlcd.Trial(mlcd.Deployment(GOOD, 1), seen, np.int32(0), np.float32(2), np.int64(9))
    for field in ("speed", "speed_sem", "seconds", "dollars", "work_done"):
        assert type(getattr(seen, field)) is float
    assert type(trial.batch) is int
    assert type(trial.price_per_hour) is type(trial.began) is float
    assert (seen.speed, trial.price_per_hour) == (2.0, 2.0)
    failed = mlcd.Observation(math.nan, math.inf, 1, 1, "error", OSError("no disk"))
    assert math.isnan(failed.speed_sem)
    assert failed.detail == "no disk"


def test_errors_are_also_the_usual_ones():
    assert issubclass(mlcd.CatalogError, ValueError)
    assert issubclass(mlcd.UnknownName, LookupError)
    assert issubclass(mlcd.NoFeasibleDeployment, RuntimeError)
    assert issubclass(mlcd.MissingExtra, ImportError)


def test_every_public_name_is_there_and_documented():
    for name in dir(mlcd):
        if not name.startswith("_"):
            assert getattr(mlcd, name).__doc__, name


SCRIPT = Path(__file__)
SPACE = mlcd.SearchSpace(mlcd.Catalog([GOOD, mlcd.InstanceType("b", 2.0)]), [1, 2])


def search_of(scenario=None, **options):
    job = mlcd.Job(total_samples=1e6)
    return mlcd.DeploymentOptimizer(SPACE, scenario or mlcd.Scenario.fastest(), job, **options)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: mlcd.Job(total_samples=10**400), "total_samples must be finite"),
        (lambda: mlcd.Limits(useful_speed="x"), "useful_speed"),
        (lambda: mlcd.LocalTorchrun(None), "script None is not a file"),
        (lambda: mlcd.LocalTorchrun(SCRIPT, env={"A": object()}), "env must hold strings"),
        (lambda: mlcd.LocalTorchrun(SCRIPT, env="A=1"), "env must map"),
        (lambda: mlcd.LocalTorchrun(SCRIPT, python="/no/python"), "'/no/python' cannot be started"),
        (lambda: mlcd.LocalTorchrun(SCRIPT, python=5), "python 5 cannot be started"),
        (lambda: mlcd.LocalTorchrun(SCRIPT, pattern=5), "regular expression"),
        (lambda: mlcd.LocalTorchrun(SCRIPT, warmup_steps="x"), "warmup_steps"),
        (lambda: mlcd.LocalTorchrun(SCRIPT, warmup_steps=-3), "warmup_steps"),
        (lambda: search_of().run(mlcd.LocalTorchrun), "profiler must have"),
        (
            lambda: search_of().run(mlcd.LocalTorchrun(SCRIPT), on_trial=5),
            "on_trial must be a function",
        ),
        (lambda: mlcd.SearchSpace(mlcd.Catalog([GOOD]), {}), "counts is empty"),
        (
            lambda: mlcd.SearchSpace(mlcd.Catalog([GOOD]), [1], knobs={"b": [1], "B": [2]}),
            "'b' and 'B' would both reach the script as MLCD_KNOB_B",
        ),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_at_once(call, says):
    with pytest.raises(mlcd.InvalidInput, match=says):
        call()


def test_numbers_in_an_environment_are_written_as_text():
    assert mlcd.LocalTorchrun(SCRIPT, env={"A": 1}).env == {"A": "1"}


@pytest.mark.parametrize("scenario", [None, mlcd.Scenario.cheapest_by(deadline=1.0)])
def test_a_job_that_the_trials_have_done_needs_no_final_run(scenario, tmp_path):
    search = search_of(scenario)
    search.tell(mlcd.Trial(SPACE[0], mlcd.Observation(1e3, 10.0, 60.0, 0.05, work_done=1e6)))
    assert search.ask() == []
    best = search.recommend()
    assert (best.hours, best.dollars, best.within_limit) == (0.0, 0.0, 1.0)
    assert best.total_dollars == 0.05
    assert "Nothing is left to run: the trials have already trained the whole job" in best.reason
    # Warnings are errors: that the curves can be drawn is part of it.
    assert search.report(tmp_path).is_file()


def test_a_search_that_has_tried_everything_says_so():
    search = search_of()
    for deployment in SPACE:
        search.tell(mlcd.Trial(deployment, mlcd.Observation(1.0, 0.1, 60.0, 0.05)))
    assert search.ask() == []
    assert "every deployment was tried or ruled out" in search.recommend().reason


def test_names_that_look_like_mathematics_are_drawn_as_they_are(tmp_path):
    kinds = [mlcd.InstanceType("$\\frac$", 1.0), mlcd.InstanceType("n" * 400, 2.0)]
    space = mlcd.SearchSpace(mlcd.Catalog(kinds), [1, 2], knobs={"p": ["$x_$"]})
    search = mlcd.DeploymentOptimizer(space, mlcd.Scenario.fastest(), mlcd.Job(total_samples=1e6))
    search.tell(mlcd.Trial(space[0], mlcd.Observation(1.0, 0.1, 60.0, 0.05)))
    assert search.report(tmp_path).is_file()
