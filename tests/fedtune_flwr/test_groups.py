import json

import numpy as np
import pytest

from fedtune_flwr import ConfigError, Emulator, FedTune, Int, Log, Policy, SearchSpace, tune
from fedtune_flwr._cluster import centroids, nearest
from fedtune_flwr._compare import compare
from fedtune_flwr._cube import PolicyCube
from fedtune_flwr._metrics import Scaler, as_matrix
from fedtune_flwr._options import TuneOptions
from fedtune_flwr._policy import WEIGHT
from tests.fedtune_flwr import apps

SPACE = SearchSpace(lr=Log(0.1, 1.0), **{"local-epochs": Int(1, 4)})


def blobs(counts, spread=0.1, seed=0):
    rng = np.random.default_rng(seed)
    centres = np.eye(5) * 4
    return np.concatenate(
        [centres[i] + rng.normal(0, spread, (n, 5)) for i, n in enumerate(counts)]
    )


@pytest.mark.parametrize("counts", [(9, 5), (12, 7, 4), (20, 10, 6, 3)])
def test_clear_groups_are_found_largest_first(counts):
    z = blobs(counts)
    found = centroids(z)
    assert len(found) == len(counts)
    label = nearest(z, found)
    assert label.tolist() == np.repeat(np.arange(len(counts)), counts).tolist()
    assert centroids(z) == found


def test_no_groups_where_there_are_none():
    assert centroids(np.random.default_rng(0).normal(size=(60, 5))) == ()
    assert centroids(np.zeros((10, 5))) == ()
    assert centroids(np.zeros((1, 5))) == ()
    assert len(centroids(blobs((900, 300)))) == 2


@pytest.fixture(scope="module")
def setting():
    emulator = Emulator(apps.proxy(240), bank=120, seed=0)
    metrics = [emulator.measure(*apps.blobs(i, 60, 0.95 * (i % 2))) for i in range(8)]
    return emulator, metrics


def test_grouped_policies_give_each_group_its_values(setting, tmp_path):
    _, metrics = setting
    matrix = as_matrix(metrics)
    scaler = Scaler.fit(matrix)
    centres = centroids(scaler.transform(matrix))
    assert len(centres) == 2
    cube = PolicyCube(SPACE, scaler, weight=True, centroids=centres)
    assert set(cube.pairs) == {
        ("lr", "group-1"), ("local-epochs", "group-1"), (WEIGHT, "group-1"),
    }  # fmt: skip
    base = np.full(cube.dimensions, 0.5)
    policy = cube.policy(cube.point(base, {("lr", "group-1"): -1.0, (WEIGHT, "group-1"): 2.0}))
    groups = np.asarray([policy.group_of(m) for m in metrics])
    assert len(set(groups[::2])) == 1
    assert set(groups) == {0, 1}
    lr = np.asarray([policy.assign(m).values["lr"] for m in metrics])
    weight = np.asarray([policy.assign(m).weight_factor for m in metrics])
    np.testing.assert_allclose(lr[groups == 1], lr[groups == 0][0] * np.exp(-1))
    np.testing.assert_allclose(weight, np.where(groups == 1, np.exp(2), 1))
    # The noisy group's prior weight is lower.
    noisy = int(groups[1])
    assert (cube.prior[WEIGHT, "group-1"] < 0) == (noisy == 1)
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    assert "in group-1" in policy.explain()


def test_tuning_by_groups(setting):
    emulator, metrics = setting
    options = TuneOptions(budget=14, rounds=4, mode="groups")
    report = tune(SPACE, emulator, metrics, tuner="sobol", options=options)
    assert any(t.customizes for t in report.trials)
    alike = tune(SPACE, emulator, [metrics[0]] * 5, tuner="sobol", options=options)
    assert "no clear groups" in alike.summary()
    assert not alike.policy.customizes
    with pytest.raises(ConfigError, match="mode"):
        TuneOptions(mode="clusters")


def test_the_wrapper_takes_the_mode(setting):
    from flwr.serverapp.strategy import FedAvg

    from tests.fedtune_flwr.runs import NODES, run

    strategy = FedTune(
        FedAvg(**NODES), SPACE, apps.proxy(rounds=2), tuner="random", mode="groups", budget=12
    )
    result, _ = run(strategy, rounds=1)
    assert strategy.options.mode == "groups"
    assert len(result.train_metrics_clientapp) == 1


def test_compare_pairs_the_policy_with_simple_rivals(setting):
    emulator, metrics = setting
    scaler = Scaler.fit(as_matrix(metrics))
    policy = Policy(
        SPACE,
        SPACE.coordinates({"lr": 0.5, "local-epochs": 3}),
        scaler,
        {(WEIGHT, "reference-loss"): -3.0},
    )
    arms = compare(policy, emulator, metrics, emulations=4, rounds=6)
    assert arms[0].difference == 0
    by_name = {arm.name: arm for arm in arms}
    assert len(arms) == 5
    plain = by_name["for all, equal weights"]
    gap = np.asarray(arms[0].scores) - np.asarray(plain.scores)
    assert plain.difference == pytest.approx(gap.mean())
    assert plain.standard_error == pytest.approx(gap.std(ddof=1) / 2)
