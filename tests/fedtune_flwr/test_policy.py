import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtune_flwr import Choice, Int, Log, Policy, SearchSpace, SpaceError, StateError
from fedtune_flwr._cube import PolicyCube
from fedtune_flwr._metrics import NAMES, Scaler, as_matrix
from fedtune_flwr._policy import MAX_LOG_WEIGHT, WEIGHT, steerable

SPACE = SearchSpace(lr=Log(1e-3, 1.0), batch=Choice(8, 16), **{"local-epochs": Int(1, 8)})
SCALER = Scaler((4.0, 0.5, 1.0, 0.2, 0.0), (1.0, 0.2, 2.0, 0.1, 0.5))
POLICY = Policy(
    SPACE,
    {"lr": math.log(0.1), "local-epochs": math.log(3), "batch": 1.0},
    SCALER,
    {("lr", "reference-loss"): -1.0, (WEIGHT, "reference-loss"): -2.0},
    0.5,
    "tuned",
)
METRICS_OF_A_CLIENT = st.dictionaries(
    st.sampled_from(NAMES), st.floats(allow_nan=True, allow_infinity=True)
)


@given(METRICS_OF_A_CLIENT)
def test_no_report_moves_a_client_out_of_the_space(metrics):
    given_ = POLICY.assign(metrics)
    assert 1e-3 <= given_.values["lr"] <= 1.0
    assert given_.values["batch"] == 16
    assert given_.values["local-epochs"] == 3
    assert math.exp(-MAX_LOG_WEIGHT) <= given_.weight_factor <= math.exp(MAX_LOG_WEIGHT)


def test_slopes_act_on_the_scaled_metric():
    median = POLICY.assign(None)
    assert median.values["lr"] == pytest.approx(0.1)
    assert median.weight_factor == 1
    noisy = POLICY.assign({"reference-loss": 3.0})  # one spread above the median
    assert noisy.values["lr"] == pytest.approx(0.1 * math.exp(-1))
    assert noisy.weight_factor == pytest.approx(math.exp(-2))
    assert POLICY.scaled(0.5).assign({"reference-loss": 3.0}).weight_factor == pytest.approx(
        math.exp(-1)
    )
    assert not POLICY.scaled(0).customizes


def test_one_client_at_a_time_gives_what_many_at_once_give():
    rows = [{"reference-loss": float(v)} for v in np.linspace(0, 6, 7)]
    matrix = as_matrix(rows)
    lr = POLICY.coordinates_many(matrix)["lr"]
    weight = POLICY.log_weight_many(matrix)
    for i, row in enumerate(rows):
        single = POLICY.assign(row)
        assert single.values["lr"] == SPACE["lr"].value(float(lr[i]))
        assert single.weight_factor == pytest.approx(math.exp(weight[i]))


def test_a_policy_survives_its_file(tmp_path):
    path = tmp_path / "policy.json"
    POLICY.save(path)
    assert Policy.load(path) == POLICY
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("{}")
    with pytest.raises(StateError):
        Policy.load(path)
    path.write_text("{")
    with pytest.raises(StateError):
        Policy.load(path)
    with pytest.raises(StateError):
        Policy.load(tmp_path / "absent.json")


def test_explain_names_values_and_slopes():
    text = POLICY.explain([{"reference-loss": 0.0}, {"reference-loss": 6.0}])
    assert "lr = 0.1" in text
    assert "reference-loss" in text
    assert "over 2 clients" in text


def test_constant_policy_is_the_middle_or_what_is_given():
    assert Policy.constant(SearchSpace(lr=Log(0.01, 1))).assign(None).values == {
        "lr": pytest.approx(0.1)
    }
    assert Policy.constant(SearchSpace(lr=Log(0.01, 1)), {"lr": 0.5}).assign(None).values == {
        "lr": pytest.approx(0.5)
    }


def test_steering_follows_by():
    space = SearchSpace(lr=Log(0.1, 1, by=()), mu=Log(0.1, 1, by=("label-entropy",)))
    assert steerable(space, weight=False) == [("mu", "label-entropy")]
    with pytest.raises(SpaceError, match="no metric"):
        steerable(SearchSpace(lr=Log(0.1, 1, by=("mood",))), weight=False)


@given(st.lists(st.floats(0, 1), min_size=11, max_size=11))
def test_points_of_the_cube_are_policies_and_zero_slopes_customize_nothing(point):
    cube = PolicyCube(SPACE, SCALER, weight=True)
    full = np.asarray(point[: cube.dimensions])
    assert cube.dimensions <= 11
    policy = cube.policy(full)
    for name, dimension in SPACE.items():
        low, high = dimension.bounds
        assert low - 1e-9 <= policy.base[name] <= high + 1e-9
    for column, value in cube.no_slopes().items():
        full[column] = value
    assert not cube.policy(full).customizes
    back = cube.policy(cube.point(full, cube.prior))
    assert back.slopes == pytest.approx({p: s for p, s in cube.prior.items() if s})


def test_metrics_in_which_clients_are_alike_are_left_out():
    alike = Scaler.fit(np.ones((4, len(NAMES))))
    cube = PolicyCube(SPACE, alike, weight=True)
    assert cube.pairs == []
    assert cube.dimensions == len(SPACE) + 1


@given(st.lists(st.floats(0, 1), min_size=11, max_size=11), st.integers(0, 1000))
def test_slopes_never_raise_a_client_above_the_point(point, seed):
    rng = np.random.default_rng(seed)
    metrics = np.array([4.0, 0.5, 1.0, 0.2, 0.0]) + rng.normal(size=(7, 5))
    scaler = Scaler.fit(metrics)
    cube = PolicyCube(SPACE, scaler, weight=True, metrics_KM=metrics)
    full = np.asarray(point[: cube.dimensions])
    policy = cube.policy(full)
    for column, value in cube.no_slopes().items():
        full[column] = value
    plain = cube.policy(full)
    for name, coordinate in policy.coordinates_many(metrics).items():
        assert coordinate.max() == pytest.approx(max(plain.base[name], SPACE[name].bounds[0]))
