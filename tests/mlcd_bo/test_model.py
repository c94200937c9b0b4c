import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from mlcd_bo import Catalog, InstanceType, SearchSpace
from mlcd_bo._index import expected_shortfall, gittins_index
from mlcd_bo._model import PlainModel, ScalingModel, reference_posterior
from tests.mlcd_bo.worlds import two_types

SPACES = {
    "no sizes": lambda: SearchSpace(Catalog([InstanceType("a", 1), InstanceType("b", 3)]), [1, 3]),
    "sizes": lambda: SearchSpace(
        Catalog(
            [
                InstanceType("a", 1, vcpus=2, mem_gib=4),
                InstanceType("b", 3, vcpus=2, mem_gib=16),
                InstanceType("c", 3, vcpus=8, mem_gib=16, gpus=1, gpu_mem_gib=24),
            ]
        ),
        [1, 2, 8],
    ),
    "spot and knobs": lambda: SearchSpace(
        Catalog([InstanceType("a", 1, spot_price=0.2), InstanceType("b", 3)]),
        [2, 4],
        spot=True,
        knobs={"batch": [16, 64], "amp": [True, False]},
    ),
    "one": lambda: SearchSpace(Catalog([InstanceType("a", 1)]), [4]),
}


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("n", [1, 2, 5, 12])
@pytest.mark.parametrize("kind", [ScalingModel, PlainModel])
def test_fast_posterior_equals_the_reference(name, n, kind):
    space = SPACES[name]()
    model = kind(space)
    rng = np.random.default_rng(n)
    rows = rng.integers(0, len(space), n)
    values = rng.normal(3.0, 0.7, n)
    noise = rng.uniform(1e-4, 1e-2, n)
    fast = model.posterior(rows, values, noise)
    slow = reference_posterior(model, rows, values, noise)
    np.testing.assert_allclose(fast.mean, slow.mean, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(fast.sd, slow.sd, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("kind", [ScalingModel, PlainModel])
def test_kernel_is_a_covariance(name, kind):
    model = kind(SPACES[name]())
    parts = model.parts(model.features, model.features)
    for part in parts:
        np.testing.assert_allclose(part, part.T, atol=1e-12)
        assert np.linalg.eigvalsh(part).min() > -1e-9
    np.testing.assert_allclose(model._variances(), np.diagonal(parts, axis1=1, axis2=2), atol=1e-12)


def test_without_observations_the_prior_is_returned():
    model = ScalingModel(two_types())
    none = np.array([], dtype=np.int64)
    prior = model.posterior(none, np.array([]), np.array([]))
    np.testing.assert_allclose(prior.mean, model.prior_mean)
    assert (prior.sd > 2.5).all()


def test_level_of_the_job_does_not_matter():
    model = ScalingModel(two_types())
    rows, noise = np.array([0, 3, 5]), np.full(3, 1e-3)
    values = np.array([0.3, -1.0, -0.2])
    low = model.posterior(rows, values - 20.0, noise)
    high = model.posterior(rows, values + 20.0, noise)
    np.testing.assert_allclose(low.mean + 40.0, high.mean, atol=1e-8)
    np.testing.assert_allclose(low.sd, high.sd, atol=1e-8)


def test_one_observation_already_ranks_the_rest():
    space = two_types()
    model = ScalingModel(space)
    one = model.posterior(np.array([0]), np.array([0.0]), np.array([1e-3]))
    # More machines are believed faster, dearer ones too; far ones are less certain.
    assert one.mean[3] < one.mean[2] < one.mean[1] < one.mean[0]
    assert one.mean[4] < one.mean[0]
    assert one.sd[0] < one.sd[1] < one.sd[3]


@given(
    st.floats(-6, 6), st.floats(1e-3, 3.0), st.floats(-6, 4).map(lambda e: 10.0**e)
)  # fmt: skip
@settings(max_examples=200)
def test_index_solves_its_equation(mean, sd, cost):
    arrays = np.array([mean]), np.array([sd])
    index = gittins_index(*arrays, np.array([cost]))
    shortfall = expected_shortfall(index, *arrays)
    # Where the shortfall is a difference of nearly equal numbers, only their size bounds it.
    assert shortfall[0] == pytest.approx(cost, rel=1e-6, abs=1e-12 * np.exp(mean))


@pytest.mark.parametrize("mean", [-2.0, 0.0, 1.5])
@pytest.mark.parametrize("sd", [0.05, 0.4, 1.2])
@pytest.mark.parametrize("level", [0.2, 1.0, 6.0])
def test_shortfall_equals_quadrature(mean, sd, level):
    def integrand(z):
        return max(level - np.exp(mean + sd * z), 0.0) * stats.norm.pdf(z)

    kink = (np.log(level) - mean) / sd
    low, high = -12.0, min(max(kink, -12.0), 12.0)
    expected, _ = integrate.quad(integrand, low, high, epsabs=1e-13, limit=200)
    got = expected_shortfall(np.array([level]), np.array([mean]), np.array([sd]))[0]
    assert got == pytest.approx(expected, rel=1e-7, abs=1e-11)


def test_index_grows_with_cost_and_is_infinite_for_the_impossible():
    mean, sd = np.zeros(4), np.full(4, 0.5)
    index = gittins_index(mean, sd, np.array([0.001, 0.01, 1.0, np.inf]))
    assert (np.diff(index[:3]) > 0).all()
    assert np.isinf(index[3])
