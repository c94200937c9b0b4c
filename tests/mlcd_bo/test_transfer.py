import numpy as np
import pytest

import mlcd_bo as mlcd
from mlcd_bo._model import ScalingModel
from mlcd_bo._transfer import TransferModel
from tests.mlcd_bo.worlds import World, two_types

JOB = mlcd.Job(total_samples=1000 * 3600 * 8)
# A job whose big type stops scaling at two machines, and one that is its opposite.
LIKE = {"big x4": -1.2, "big x8": -2.0}
UNLIKE = {"small x4": -1.2, "small x8": -2.0, "big x8": 0.8}


def job_of(bumps, space=None):
    world = World(space or two_types(), bumps=bumps)
    trials = [mlcd.Trial(d, world.profile(d, mlcd.Limits())) for d in world.space]
    return mlcd.EarlierJob.of(trials)


def observe(model, world, rows):
    rows = np.array(rows)
    values = -np.log([world.speed(world.space[r]) for r in rows])
    return model.posterior(rows, values, np.full(len(rows), 1e-3))


def test_a_job_that_fits_gets_the_weight():
    world = World(two_types(), bumps=LIKE)
    model = TransferModel(world.space, [job_of(UNLIKE), job_of(LIKE)])
    observe(model, world, [0, 2, 4, 6])
    assert model.weights.sum() == pytest.approx(1.0)
    assert model.weights[2] > 0.5 > model.weights[1]


def test_it_predicts_what_this_job_has_not_shown_yet():
    world = World(two_types(), bumps=LIKE)
    truth = -np.log([world.speed(d) for d in world.space])
    alone = observe(ScalingModel(world.space), world, [0, 3, 4])
    helped = observe(TransferModel(world.space, [job_of(LIKE)]), world, [0, 3, 4])
    assert np.abs(helped.mean - truth)[6:].max() < 0.5 * np.abs(alone.mean - truth)[6:].max()


def test_levels_of_jobs_do_not_matter_and_measurements_win():
    world = World(two_types())
    like = job_of({})
    slower = mlcd.EarlierJob(like.deployments, tuple(s / 1e3 for s in like.speeds), like.sems)
    one = observe(TransferModel(world.space, [like]), world, [0, 5])
    other = observe(TransferModel(world.space, [slower]), world, [0, 5])
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-6)
    misled = observe(TransferModel(world.space, [job_of(UNLIKE)]), world, range(8))
    truth = -np.log([world.speed(d) for d in world.space])
    np.testing.assert_allclose(misled.mean, truth, atol=0.1)


def test_other_types_and_prices_are_welcome():
    kinds = [mlcd.InstanceType("big", 2.2, vcpus=16), mlcd.InstanceType("huge", 5.0, vcpus=64)]
    other = mlcd.SearchSpace(mlcd.Catalog(kinds), [1, 3])
    world = World(two_types())
    model = TransferModel(world.space, [job_of({}, other)])
    assert np.isfinite(observe(model, world, [0, 1, 4]).mean).all()


def test_a_search_takes_searches_and_stores_and_resumes_the_same(tmp_path):
    first = mlcd.DeploymentOptimizer(
        two_types(), mlcd.Scenario.fastest(), JOB, store=tmp_path / "first.db"
    )
    first.run(World(two_types(), bumps=LIKE))
    world = World(two_types(), bumps=LIKE)
    search = mlcd.DeploymentOptimizer(
        world.space,
        mlcd.Scenario.fastest(),
        JOB,
        store=tmp_path / "second.db",
        earlier=[first, tmp_path / "first.db"],
    )
    (asked,) = search.ask()
    search.tell(mlcd.Trial(asked, world.profile(asked, mlcd.Limits())))
    again = mlcd.DeploymentOptimizer.resume(tmp_path / "second.db")
    assert again.ask(2) == search.ask(2)
    np.testing.assert_array_equal(again.situation().mean, search.situation().mean)


def test_refuses():
    lost = mlcd.Trial(two_types()[0], mlcd.Observation.failed("oom", 1.0, 1.0))
    with pytest.raises(mlcd.InvalidInput, match="no trial gave a speed"):
        mlcd.EarlierJob.of([lost])
    kind = mlcd.InstanceType("small", 0.5, vcpus=4)
    knobbed = mlcd.Deployment(kind, 1, knobs=(("batch", 3),))
    with pytest.raises(mlcd.InvalidInput, match="knobs"):
        TransferModel(two_types(), [mlcd.EarlierJob((knobbed,), (1.0,), (0.0,))])
