import importlib
import textwrap

import numpy as np
import pytest

from fedtune_flwr import UnknownTunerError, tuners
from fedtune_flwr.tuners._bayes import without_depths


def test_the_built_in_tuners_are_listed():
    assert set(tuners.available()) >= {"bayes", "random", "sobol"}


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(UnknownTunerError, match="bayes"):
        tuners.get("annealing")


@pytest.mark.parametrize("name", ["bayes", "random", "sobol"])
def test_tuners_ask_inside_the_cube_respect_fixed_columns_and_repeat(name):
    def script():
        tuner = tuners.get(name)(3, 5)
        asked = []
        for fixed in ({}, {1: 0.25}, {1: 0.25}, {}):
            points = tuner.ask(4, fixed)
            asked.append(points)
            scores = -((points - 0.3) ** 2).sum(axis=1)
            tuner.tell(points, scores, np.full(4, 1.0))
        return asked

    first, second = script(), script()
    for a, b, fixed in zip(first, second, (False, True, True, False), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.shape == (4, 3)
        assert ((a >= 0) & (a <= 1)).all()
        assert (a[:, 1] == 0.25).all() == fixed


def test_bayes_finds_a_hidden_optimum_that_random_misses():
    target = np.array([0.83, 0.17, 0.61])

    def best(name, seed):
        tuner = tuners.get(name)(3, seed)
        found = -np.inf
        for _ in range(5):
            points = tuner.ask(4)
            scores = -((points - target) ** 2).sum(axis=1)
            tuner.tell(points, scores, np.ones(4))
            found = max(found, scores.max())
        return found

    bayes = np.mean([best("bayes", s) for s in range(2)])
    random = np.mean([best("random", s) for s in range(2)])
    assert bayes > random
    assert bayes > -0.05


def test_bayes_predicts_what_it_was_told():
    tuner = tuners.get("bayes")(1, 0)
    points = np.linspace(0, 1, 8)[:, None]
    tuner.tell(points, np.sin(3 * points[:, 0]), np.ones(8))
    mean, deviation = tuner.predict(points)
    np.testing.assert_allclose(mean, np.sin(3 * points[:, 0]), atol=0.1)
    assert (deviation >= 0).all()


def test_a_few_diverged_runs_do_not_set_the_scale():
    scores = np.array([0.90, 0.91, 0.92, 0.90, 0.93, 0.91, 0.1])
    clipped = without_depths(scores)
    assert clipped[:-1].tolist() == scores[:-1].tolist()
    assert 0.8 < clipped[-1] < 0.9
    np.testing.assert_array_equal(without_depths(np.zeros(3)), np.zeros(3))


def test_bayes_with_everything_fixed_and_with_equal_scores():
    tuner = tuners.get("bayes")(2, 0)
    tuner.tell(np.random.default_rng(0).random((6, 2)), np.zeros(6), np.full(6, 0.3))
    np.testing.assert_array_equal(tuner.ask(2, {0: 0.1, 1: 0.2}), [[0.1, 0.2]] * 2)
    assert tuner.ask(2).shape == (2, 2)


def test_a_second_distribution_adds_a_tuner(tmp_path, monkeypatch):
    package = tmp_path / "fedtune_flwr" / "tuners" / "halton"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        textwrap.dedent("""
        from fedtune_flwr.tuners._plain import RandomTuner
        class HaltonTuner(RandomTuner):
            pass
        """)
    )
    info = tmp_path / "halton-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halton\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedtune_flwr.tuners]\nhalton = fedtune_flwr.tuners.halton:HaltonTuner\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    # An installed copy is on the path before Python starts; here the path is extended by hand.
    monkeypatch.setattr(
        tuners, "__path__", [*tuners.__path__, str(tmp_path / "fedtune_flwr" / "tuners")]
    )
    assert "halton" in tuners.available()
    assert tuners.get("halton")(2, 0).ask(3).shape == (3, 2)
