import pytest

import mlcd_bo as mlcd
from mlcd_bo import _plots
from tests.mlcd_bo.worlds import World, two_types

JOB = mlcd.Job(total_samples=1000 * 3600 * 8)


@pytest.mark.parametrize(
    "scenario",
    [
        mlcd.Scenario.fastest(),
        mlcd.Scenario.fastest_within(40.0),
        mlcd.Scenario("cost", budget=60.0, deadline=20.0),
    ],
)
def test_report_shows_the_search(tmp_path, scenario):
    world = World(two_types(), failures={"small x1": "oom"})
    search = mlcd.DeploymentOptimizer(world.space, scenario, JOB)
    best = search.run(world)
    page = search.report(tmp_path / "new" / "folder").read_text()
    assert str(best.deployment) in page
    assert best.reason in page
    assert page.count("<tr>") >= len(search.trials) + 2
    assert ("limit is kept" in page) == search.situation().limited
    # Self-contained: nothing is fetched.
    assert 'src="data:image/png;base64,' in page
    assert "http" not in page


@pytest.mark.parametrize("scaling", [0.05, 0.8])
def test_curves_can_be_read(scaling):
    world = World(two_types(), scaling=scaling)
    search = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.fastest(), JOB)
    for row in (0, 5):
        chosen = world.space[row]
        search.tell(mlcd.Trial(chosen, world.profile(chosen, mlcd.Limits())))
    figure = _plots.curves(search, 0)
    figure.canvas.draw()
    for axes in figure.axes:
        low, high = axes.get_ylim()
        shown = [t for t in axes.get_yticks() if low <= t <= high]
        assert len(shown) >= 3
        assert "$" not in "".join(label.get_text() for label in axes.get_yticklabels())
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "95 % band of the belief" in legend
    assert "trial" in legend


def test_names_are_escaped(tmp_path):
    kinds = [mlcd.InstanceType("<b>", 1.0), mlcd.InstanceType("c", 2.0)]
    world = World(mlcd.SearchSpace(mlcd.Catalog(kinds), [1]))
    search = mlcd.DeploymentOptimizer(world.space, mlcd.Scenario.fastest(), JOB)
    for deployment in world.space:
        search.tell(mlcd.Trial(deployment, world.profile(deployment, mlcd.Limits())))
    page = search.report(tmp_path).read_text()
    assert "&lt;b&gt; x1" in page
    assert "<b> x1" not in page


def test_refuses(tmp_path):
    search = mlcd.DeploymentOptimizer(two_types(), mlcd.Scenario.fastest(), JOB)
    with pytest.raises(mlcd.NothingObserved):
        search.report(tmp_path)
    search.tell(mlcd.Trial(search.space[0], mlcd.Observation(5.0, 0.1, 1.0, 1.0)))
    (tmp_path / "file").write_text("")
    with pytest.raises(mlcd.StoreError, match="cannot be written"):
        search.report(tmp_path / "file")
