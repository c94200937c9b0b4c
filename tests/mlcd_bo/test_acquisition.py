import math
import warnings

import numpy as np
import pytest
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.exceptions import UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf_discrete
from botorch.settings import validate_input_scaling
from botorch.utils.testing import MockModel, MockPosterior
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy import integrate, stats

import mlcd_bo as mlcd
from mlcd_bo._acquisition import lognormal_index, normal_index
from mlcd_bo._index import gittins_index
from mlcd_bo._scaling_mean import ScalingMean

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}


def believe(mean, variance, dtype=torch.float64):
    mean, variance = torch.as_tensor(mean).to(dtype), torch.as_tensor(variance).to(dtype)
    return MockModel(MockPosterior(mean=mean, variance=variance))


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    x = torch.rand(6, 2, dtype=torch.float64)
    y = torch.sin(3 * x).sum(-1, keepdim=True)
    return SingleTaskGP(x, (y - y.mean()) / y.std(), torch.full_like(y, 1e-2))


def cost_of(x):
    return 0.1 + x[..., 0]


@pytest.mark.parametrize("mean", [-1.0, 0.0, 3.0])
@pytest.mark.parametrize("sd", [0.1, 2.0])
@pytest.mark.parametrize("cost", [1e-8, 0.05, 4.0])
def test_normal_index_solves_its_equation_by_quadrature(mean, sd, cost):
    as_tensor = [torch.tensor(v, dtype=torch.float64) for v in (mean, sd, cost)]
    g = float(normal_index(*as_tensor))
    z = (g - mean) / sd
    worth, _ = integrate.quad(
        lambda t: (g - mean - sd * t) * stats.norm.pdf(t), min(z - 9, -9), min(z, 12), epsabs=0
    )
    assert worth == pytest.approx(cost, rel=1e-6)


def test_lognormal_index_equals_the_search_s_own():
    rng = np.random.default_rng(0)
    mean, sd = rng.normal(0, 2, 200), rng.uniform(0.02, 1.5, 200)
    cost = np.exp(rng.normal(-3, 2, 200))
    tensors = [torch.from_numpy(a) for a in (mean, sd, cost)]
    np.testing.assert_allclose(
        lognormal_index(*tensors).numpy(), gittins_index(mean, sd, cost), rtol=1e-9
    )


@pytest.mark.parametrize("most", [0.3, 1.0, 1.7, 40.0])
@pytest.mark.parametrize("cost", [1e-3, 0.1, 2.0])
def test_an_index_with_a_limit_solves_its_equation_by_quadrature(most, cost):
    mean, sd = 0.2, 0.6
    g = float(gittins_index(*map(np.array, ([mean], [sd], [cost], [most])))[0])
    end = (np.log(min(g, most)) - mean) / sd
    worth, _ = integrate.quad(
        lambda z: (g - np.exp(mean + sd * z)) * stats.norm.pdf(z), -12.0, end, epsabs=0, limit=200
    )
    assert worth == pytest.approx(cost, rel=1e-6)
    free = float(gittins_index(*map(np.array, ([mean], [sd], [cost])))[0])
    assert g >= free * (1 - 1e-12)
    assert g == pytest.approx(free) or g > most


def test_an_index_with_no_room_left_is_infinite():
    one = np.ones(3)
    index = gittins_index(0 * one, one, 0.1 * one, np.array([0.0, -1.0, 1e-40]))
    assert np.isinf(index).all()


@pytest.mark.parametrize("index", [normal_index, lognormal_index])
def test_index_gradients_are_those_of_finite_differences(index):
    mean = torch.tensor([0.3, -1.0, 0.0], dtype=torch.float64, requires_grad=True)
    sd = torch.tensor([0.4, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    cost = torch.tensor([0.05, 0.7, 0.2], dtype=torch.float64, requires_grad=True)
    step = 1e-6
    for which in range(3):
        arguments = [mean, sd, cost]
        (gradient,) = torch.autograd.grad(index(*arguments).sum(), arguments[which])
        shifted = [a.detach().clone() for a in arguments]
        shifted[which] += step
        up = index(*shifted)
        shifted[which] -= 2 * step
        slope = (up - index(*shifted)) / (2 * step)
        torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch", [(), (3,), (2, 4)])
@pytest.mark.parametrize("maximize", [False, True])
def test_gittins_keeps_batch_shape_and_dtype(dtype, batch, maximize):
    shape = (*batch, 1, 1) if batch else (1, 1, 1)
    model = believe(torch.full(shape, 0.5), torch.full(shape, 0.25), dtype)
    x = torch.rand(*batch, 1, 2, dtype=dtype)
    value = mlcd.PandoraGittinsIndex(model, cost_of, maximize=maximize)(x)
    assert value.shape == (batch or (1,))
    assert value.dtype == dtype
    half = torch.tensor(0.5, dtype=torch.float64)
    expected = -normal_index(-half if maximize else half, half, cost_of(x.squeeze(-2)).double())
    torch.testing.assert_close(
        value, expected.reshape(value.shape).to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch", [(), (3,), (2, 4)])
def test_log_ei_per_cost_is_the_difference_of_logs(dtype, batch):
    shape = (*batch, 1, 1) if batch else (1, 1, 1)
    model = believe(torch.full(shape, 0.5), torch.full(shape, 0.25), dtype)
    x = torch.rand(*batch, 1, 2, dtype=dtype)
    value = mlcd.LogEIPerCost(model, best_f=0.2, cost=cost_of, exponent=0.5)(x)
    expected = LogExpectedImprovement(model, best_f=0.2)(x) - 0.5 * cost_of(x.squeeze(-2)).log()
    assert value.shape == (batch or (1,))
    assert value.dtype == dtype
    torch.testing.assert_close(value, expected.reshape(value.shape))


@pytest.mark.parametrize("make", [
    lambda model: mlcd.PandoraGittinsIndex(model, cost_of),
    lambda model: mlcd.PandoraGittinsIndex(model, cost_of, maximize=True),
    lambda model: mlcd.PandoraGittinsIndex(model, cost_of, log_outcome=True),
    lambda model: mlcd.LogEIPerCost(model, 0.3, cost_of),
    lambda model: mlcd.LogEIPerCost(model, 0.3, cost_of, maximize=False),
])  # fmt: skip
def test_gradient_through_a_gp_equals_finite_differences(make, fitted):
    acquisition = make(fitted)
    x = torch.tensor([[[0.4, 0.6]], [[0.1, 0.9]]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(acquisition(x).sum(), x)
    with torch.no_grad():
        for dim in range(2):
            step = torch.zeros_like(x)
            step[..., dim] = 1e-6
            slope = (acquisition(x + step) - acquisition(x - step)) / 2e-6
            torch.testing.assert_close(gradient[..., 0, dim], slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [
    lambda model: mlcd.PandoraGittinsIndex(model, cost_of),
    lambda model: mlcd.LogEIPerCost(model, 0.3, cost_of),
])  # fmt: skip
def test_botorch_s_usual_refusals(make, fitted):
    acquisition = make(fitted)
    with pytest.raises(AssertionError, match="q=1"):
        acquisition(torch.rand(3, 2, 2, dtype=torch.float64))
    with pytest.raises(UnsupportedError):
        acquisition.set_X_pending(torch.rand(1, 2))
    with pytest.raises(UnsupportedError, match="posterior transform"):
        make(MockModel(MockPosterior(mean=torch.zeros(1, 2), variance=torch.ones(1, 2))))


def test_optimize_acqf_discrete_picks_the_least_index(fitted):
    choices = torch.rand(20, 2, dtype=torch.float64)
    acquisition = mlcd.PandoraGittinsIndex(fitted, cost_of)
    chosen, value = optimize_acqf_discrete(acquisition, q=1, choices=choices)
    values = acquisition(choices.unsqueeze(1)).detach()
    assert torch.equal(chosen[0], choices[values.argmax()])
    assert float(value.detach()) == pytest.approx(float(values.max()))
    index = -float(values.max())
    assert acquisition.should_stop(choices, best_f=index - 0.01)
    assert not acquisition.should_stop(choices, best_f=index + 0.01)


@pytest.mark.parametrize(
    ("cost", "says"), [(lambda x: x, "one value a point"), (lambda x: 0 * x[..., 0], "above 0")]
)
def test_bad_costs_are_refused(cost, says, fitted):
    x = torch.rand(4, 1, 2, dtype=torch.float64)
    for acquisition in (
        mlcd.PandoraGittinsIndex(fitted, cost),
        mlcd.LogEIPerCost(fitted, 0.0, cost),
    ):
        with pytest.raises(mlcd.InvalidInput, match=says):
            acquisition(x)
    with pytest.raises(mlcd.InvalidInput, match="log_outcome"):
        mlcd.PandoraGittinsIndex(fitted, cost, maximize=True, log_outcome=True)


def test_reserve_filters_and_speaks_botorch_s_convention():
    reserve = mlcd.ReserveConstraint(lambda x: x[..., 0], left=10.0, reserve=4.0)
    choices = torch.tensor([[1.0, 0.0], [6.0, 0.0], [6.1, 0.0]])
    assert reserve.filter(choices).tolist() == choices[:2].tolist()
    ((constraint, within_point),) = reserve.as_botorch()
    assert within_point
    assert float(constraint(choices[0])) == 5.0
    for left, kept in ((math.inf, 0.0), (1.0, -1.0), (1.0, math.nan)):
        with pytest.raises(mlcd.InvalidInput):
            mlcd.ReserveConstraint(lambda x: x, left, kept)


def test_scaling_mean_fits_in_a_model_without_a_warning():
    count = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64).log()
    x = torch.stack([count / math.log(8.0), torch.zeros(4, dtype=torch.float64)], -1)
    y = (2.0 - 0.7 * count).unsqueeze(-1)
    noise, scaling = torch.full_like(y, 1e-3), ScalingMean(count_range=(1, 8))
    with warnings.catch_warnings(), validate_input_scaling(False):
        warnings.simplefilter("error")
        model = SingleTaskGP(x, y, noise, mean_module=scaling, outcome_transform=None)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    assert float(model.mean_module.count_slope.detach()) == pytest.approx(-0.7, abs=0.15)
    middle = torch.tensor([[0.5, 0.0]], dtype=torch.float64)
    assert float(model.posterior(middle).mean.detach()) == pytest.approx(
        2.0 - 0.7 * 0.5 * math.log(8.0), abs=0.1
    )


def test_scaling_mean_shapes_and_refusals():
    mean = ScalingMean(count_dim=2, price_dim=None)
    assert mean(torch.rand(5, 3, 4)).shape == (5, 3)
    assert mean(torch.rand(3, 4)).dtype == torch.float32
    with pytest.raises(mlcd.InvalidInput, match="both"):
        ScalingMean(1, 1)
    with pytest.raises(mlcd.InvalidInput, match="count_dim"):
        ScalingMean(-1)
    with pytest.raises(mlcd.InvalidInput, match="price_range"):
        ScalingMean(price_range=(2.0, 2.0))
    plain, ranged = ScalingMean(), ScalingMean(count_range=(2, 16), price_range=(1.0, math.e))
    x = torch.rand(4, 2, dtype=torch.float64)
    torch.testing.assert_close(
        ranged(x), plain(x * torch.tensor([math.log(8.0), 1.0], dtype=torch.float64))
    )


def test_index_policy_equals_the_dynamic_programme_on_small_boxes():
    """On independent boxes with few outcomes, opening by rising index is exactly optimal."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        boxes = [
            (np.sort(rng.uniform(0, 2, 3)), rng.dirichlet(np.ones(3)), rng.uniform(0.02, 0.3))
            for _ in range(3)
        ]
        index = []
        for values, chances, cost in boxes:
            low, high = values.min(), values.max() + 2.0
            for _ in range(80):
                middle = 0.5 * (low + high)
                worth = (chances * np.maximum(middle - values, 0)).sum()
                low, high = (middle, high) if worth < cost else (low, middle)
            index.append(low)
        start = 1.5  # an outcome already in hand

        def best_value(held, closed, boxes=boxes):
            options = [held]
            for i in closed:
                values, chances, cost = boxes[i]
                rest = tuple(j for j in closed if j != i)
                options.append(
                    cost
                    + sum(
                        p * best_value(min(held, v), rest)
                        for v, p in zip(values, chances, strict=True)
                    )
                )
            return min(options)

        def by_index(held, closed, boxes=boxes, index=index):
            if not closed:
                return held
            i = min(closed, key=lambda j: index[j])
            if index[i] >= held:
                return held
            values, chances, cost = boxes[i]
            rest = tuple(j for j in closed if j != i)
            return cost + sum(
                p * by_index(min(held, v), rest) for v, p in zip(values, chances, strict=True)
            )

        assert by_index(start, (0, 1, 2)) == pytest.approx(best_value(start, (0, 1, 2)), rel=1e-9)


class Ensemble(SingleTaskGP):
    """Averaged over its batch of models, as fully Bayesian models of BoTorch are."""

    _is_ensemble = True

    def posterior(self, X, *args, **options):
        return super().posterior(X.unsqueeze(-3), *args, **options)


@pytest.mark.parametrize("log_outcome", [False, True])
def test_an_ensemble_pays_each_point_s_own_cost(log_outcome):
    torch.manual_seed(0)
    x = torch.rand(6, 2, dtype=torch.float64)
    y = torch.sin(3 * x).sum(-1, keepdim=True)
    members = torch.stack([y, 1.1 * y, 0.9 * y, y + 0.1])
    with validate_input_scaling(False):
        model = Ensemble(
            x.expand(4, 6, 2), members, torch.full_like(members, 1e-2), outcome_transform=None
        )
    index = mlcd.PandoraGittinsIndex(model, cost_of, log_outcome=log_outcome)
    # As many points as members, which a cost of the wrong shape would be broadcast over.
    points = torch.rand(4, 1, 2, dtype=torch.float64)
    with torch.no_grad():
        together = index(points)
        alone = torch.cat([index(point.unsqueeze(0)) for point in points])
    torch.testing.assert_close(together, alone)
    assert not index.should_stop(points.squeeze(1), math.inf)


@pytest.mark.parametrize(
    "options", [{}, {"maximize": True}, {"log_outcome": True}], ids=lambda o: str(o)
)
def test_a_point_of_infinite_cost_is_never_the_best(fitted, options):
    def cost(x):
        return torch.where(x[..., 0] > 0.5, math.inf, 0.1)

    index = mlcd.PandoraGittinsIndex(fitted, cost, **options)
    x = torch.tensor([[0.9, 0.1], [0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    value = index(x.unsqueeze(-2))
    assert value[0] == -math.inf
    assert value[1].isfinite()
    value[1].backward()
    assert x.grad.isfinite().all()


def test_should_stop_without_choices_and_without_a_best(fitted):
    index = mlcd.PandoraGittinsIndex(fitted, cost_of)
    assert index.should_stop(torch.rand(0, 2, dtype=torch.float64), 1.0)
    with pytest.raises(mlcd.InvalidInput, match="best_f must be a number"):
        index.should_stop(torch.rand(3, 2, dtype=torch.float64), math.nan)
    x = torch.rand(3, 6, 2, dtype=torch.float64)
    batch = SingleTaskGP(x, x.sum(-1, keepdim=True), torch.full((3, 6, 1), 1e-2).double())
    with pytest.raises(mlcd.InvalidInput, match="one model, got a batch"):
        mlcd.PandoraGittinsIndex(batch, cost_of).should_stop(x[0], 1.0)


@pytest.mark.parametrize(
    ("cost", "says"),
    [
        (lambda x: 1.0, "must return a tensor, got float"),
        (lambda x: None, "must return a tensor, got NoneType"),
        (lambda x: x.new_full(x.shape[:-1], math.nan), "NaN"),
    ],
)
def test_a_cost_of_the_wrong_kind(cost, says, fitted):
    x = torch.rand(3, 1, 2, dtype=torch.float64)
    for acquisition in (
        mlcd.PandoraGittinsIndex(fitted, cost),
        mlcd.LogEIPerCost(fitted, 0.0, cost),
    ):
        with pytest.raises(mlcd.InvalidInput, match=says):
            acquisition(x)


def test_costs_that_cannot_be_called(fitted):
    for make in (
        lambda: mlcd.PandoraGittinsIndex(fitted, 1.0),
        lambda: mlcd.LogEIPerCost(fitted, 0.0, None),
        lambda: mlcd.ReserveConstraint(1.0, 1.0),
    ):
        with pytest.raises(mlcd.InvalidInput, match="must be a function"):
            make()
    with pytest.raises(mlcd.InvalidInput, match="left must be a number"):
        mlcd.ReserveConstraint(cost_of, "x")
    reserve = mlcd.ReserveConstraint(lambda x: x[..., :1], 1.0)
    with pytest.raises(mlcd.InvalidInput, match="one value a point"):
        reserve.filter(torch.rand(3, 2))
    counts = mlcd.PandoraGittinsIndex(fitted, lambda x: torch.ones(x.shape[:-1], dtype=torch.bool))
    assert counts(torch.rand(3, 1, 2, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {"count_dim": -1},
        {"count_dim": 1.5},
        {"price_dim": "x"},
        {"count_range": (1,)},
        {"count_range": 5},
        {"count_range": (1, 2, 3)},
    ],
)
def test_scaling_mean_refuses_in_words(options):
    with pytest.raises(mlcd.InvalidInput, match=next(iter(options))):
        mlcd.ScalingMean(**options)


def test_scaling_mean_of_whole_numbers_is_not_cut_to_one():
    mean = mlcd.ScalingMean()(torch.tensor([[1, 0]]))
    assert mean.item() == pytest.approx(-0.81 + 0.016)
