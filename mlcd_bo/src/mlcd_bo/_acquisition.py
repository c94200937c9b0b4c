"""BoTorch acquisition functions whose trials cost: Gittins index, log EI per cost, reserve.

They take any single-outcome BoTorch model with a Gaussian posterior and are maximised, as BoTorch
does. Shapes: X is ``batch_shape x 1 x d``, values are ``batch_shape``.
"""

import math
from collections.abc import Callable

import torch
from botorch.acquisition.analytic import AnalyticAcquisitionFunction, LogExpectedImprovement
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.model import Model
from botorch.utils.transforms import (
    average_over_ensemble_models,
    is_ensemble,
    t_batch_mode_transform,
)
from torch import Tensor

from ._check import at_least_zero, real
from ._errors import InvalidInput

Cost = Callable[[Tensor], Tensor]

_BISECTIONS = 60
_SQRT_HALF = math.sqrt(0.5)
_LOG_SQRT_TAU = 0.5 * math.log(2 * math.pi)


class PandoraGittinsIndex(AnalyticAcquisitionFunction):
    r"""Gittins index of Pandora's box: the outcome at which a trial is just worth its cost.

    Minimising, the index g of a point solves ``E[(g - f)+] = cost``; trials are made by rising
    index until the best outcome in hand is below every index (`should_stop`). The returned value
    is ``-g``, so that maximising it picks the least index. Maximising, g solves
    ``E[(f - g)+] = cost`` and is returned as it is. Outcome and cost must be in one unit.

    Gradients are exact: they follow from the equation, not from the steps that solve it.

    Args:
        model: a fitted single-outcome model.
        cost: maps ``batch_shape x d`` points to ``batch_shape`` costs above zero; infinity where a
            point may not be tried.
        maximize: whether larger outcomes are better.
        log_outcome: the model is one of log f, f the outcome in the unit of the cost; only for
            minimising.
        posterior_transform: as in BoTorch.

    Source: arXiv 2406.20062 (the index), arXiv 2507.12453 (stopping).

    Raises:
        InvalidInput: `log_outcome` together with `maximize`.

    Example:
        >>> model = SingleTaskGP(train_X, train_Y)  # doctest: +SKIP
        >>> acquisition = PandoraGittinsIndex(model, cost=lambda x: x[..., 0])  # doctest: +SKIP
        >>> point, value = optimize_acqf_discrete(acquisition, 1, choices)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Model,
        cost: Cost,
        maximize: bool = False,
        log_outcome: bool = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> None:
        super().__init__(model=model, posterior_transform=posterior_transform)
        _callable("cost", cost)
        if log_outcome and maximize:
            raise InvalidInput("log_outcome=True is for minimising; give maximize=False")
        self.cost = cost
        self.maximize = maximize
        self.log_outcome = log_outcome

    @t_batch_mode_transform(expected_q=1)
    @average_over_ensemble_models  # type: ignore[arg-type]  # typed for the base class alone
    def forward(self, X: Tensor) -> Tensor:
        """Returns the index (negated when minimising), shape ``batch_shape``."""
        mean, sigma = self._mean_and_sigma(X)
        assert sigma is not None
        mean, sd = mean.squeeze(-1), sigma.squeeze(-1)
        cost = _checked_cost(self.cost, X)
        if is_ensemble(self.model):
            # One mean for each member of it, over which the caller averages.
            cost = cost.unsqueeze(-1)
        if self.log_outcome:
            return -lognormal_index(mean, sd, cost)
        if self.maximize:
            return -normal_index(-mean, sd, cost)
        return -normal_index(mean, sd, cost)

    def should_stop(self, choices: Tensor, best_f: float) -> bool:
        """Returns whether no choice is worth its cost any more.

        Args:
            choices: the points that may still be tried, ``n x d``.
            best_f: the best outcome in hand (in the outcome's own unit, also for a log model).

        Raises:
            InvalidInput: `best_f` is NaN, or the model is a batch of several.
        """
        if math.isnan(best_f):
            raise InvalidInput("best_f must be a number, got NaN; give an outcome that was seen")
        if self.model.batch_shape and not is_ensemble(self.model):
            raise InvalidInput(
                f"should_stop decides for one model, got a batch of {tuple(self.model.batch_shape)}"
            )
        if not len(choices):
            return True
        with torch.no_grad():
            index = self(choices.unsqueeze(-2))
        # Values are negated indices when minimising.
        return bool(index.max() <= (best_f if self.maximize else -best_f))


class LogEIPerCost(LogExpectedImprovement):
    r"""Log expected improvement minus the log of the cost.

    Logs are subtracted, never an improvement divided: dividing a log would favour dear points.

    Args:
        model: a fitted single-outcome model.
        best_f: best outcome so far, scalar or ``batch_shape``.
        cost: maps ``batch_shape x d`` points to ``batch_shape`` costs above zero; infinity where a
            point may not be tried.
        exponent: power of the cost; less than one cools it (arXiv 2003.10870).
        posterior_transform: as in BoTorch.
        maximize: whether larger outcomes are better.
    """

    def __init__(
        self,
        model: Model,
        best_f: float | Tensor,
        cost: Cost,
        exponent: float = 1.0,
        posterior_transform: PosteriorTransform | None = None,
        maximize: bool = True,
    ) -> None:
        super().__init__(model, best_f, posterior_transform, maximize)
        _callable("cost", cost)
        self.cost = cost
        self.exponent = float(exponent)

    @t_batch_mode_transform(expected_q=1)  # type: ignore[arg-type]  # typed for the base class alone
    def forward(self, X: Tensor) -> Tensor:
        """Returns ``log EI(x) - exponent * log cost(x)``, shape ``batch_shape``."""
        improvement: Tensor = super().forward(X)
        return improvement - self.exponent * _checked_cost(self.cost, X).log()


class ReserveConstraint:
    """Which trials leave enough of a limit for the final run.

    As a callable it gives the slack, feasible where at least zero, the convention of BoTorch's
    nonlinear inequality constraints.

    Args:
        spend: maps ``... x d`` points to the most that a trial there takes of the limit.
        left: what is left of the limit.
        reserve: what the final run on the best deployment in hand needs; 0 without one.

    Raises:
        InvalidInput: `left` or `reserve` is not finite, or `reserve` is negative.

    Example:
        >>> reserve = ReserveConstraint(lambda x: x[..., 0], left=10.0, reserve=4.0)
        >>> reserve.filter(torch.tensor([[1.0], [7.0]]))
        tensor([[1.]])
    """

    def __init__(self, spend: Cost, left: float, reserve: float = 0.0) -> None:
        left, reserve = real("left", left), at_least_zero("reserve", reserve)
        if not math.isfinite(left):
            raise InvalidInput(f"left must be finite, got {left!r}")
        _callable("spend", spend)
        self.spend = spend
        self.left = left
        self.reserve = reserve

    def __call__(self, X: Tensor) -> Tensor:
        """Returns what would be left above the reserve, shape of X without its last dimension."""
        return self.left - self.reserve - _one_a_point("spend", self.spend(X), X.shape[:-1], X)

    def filter(self, choices: Tensor) -> Tensor:
        """Returns the rows of ``n x d`` choices whose trial keeps the reserve."""
        return choices[self(choices) >= 0]

    def as_botorch(self) -> list[tuple[Callable[[Tensor], Tensor], bool]]:
        """Returns the value of `optimize_acqf`'s ``nonlinear_inequality_constraints``."""
        return [(self, True)]


def normal_index(mean: Tensor, sd: Tensor, cost: Tensor) -> Tensor:
    """Returns the g with ``E[(g - f)+] = cost`` for ``f ~ N(mean, sd**2)``, elementwise."""
    mean, sd, cost = torch.broadcast_tensors(mean, sd, cost)  # type: ignore[no-untyped-call]
    banned = cost.isinf()
    cost = cost.masked_fill(banned, 1.0)
    with torch.no_grad():
        # In units of sd around the mean: E[(z - Z)+] = z Phi(z) + phi(z) = cost / sd. Far below,
        # it is about phi(z) / z**2; above, it exceeds z.
        scaled = (cost / sd).double()
        high = scaled.clamp_min(0) + 0.5
        low = torch.full_like(high, -38.0)
        log_scaled = scaled.log()
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            below = _log_shortfall(middle) < log_scaled
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        z = (0.5 * (low + high)).to(mean)
        chance = _phi_cdf(z).clamp_min(torch.finfo(mean.dtype).tiny)
        ratio = torch.exp(-0.5 * z**2 - _LOG_SQRT_TAU) / chance
    # The equation's own derivatives: dg = d mean - (phi / Phi) d sd + d cost / Phi.
    tangent = (mean - mean.detach()) - ratio * (sd - sd.detach())
    tangent = tangent + (cost - cost.detach()) / chance
    return ((mean + z * sd).detach() + tangent).masked_fill(banned, math.inf)


def lognormal_index(mean: Tensor, sd: Tensor, cost: Tensor) -> Tensor:
    """Returns the g with ``E[(g - f)+] = cost`` for ``log f ~ N(mean, sd**2)``, elementwise."""
    mean, sd, cost = torch.broadcast_tensors(mean, sd, cost)  # type: ignore[no-untyped-call]
    banned = cost.isinf()
    cost = cost.masked_fill(banned, 1.0)
    with torch.no_grad():
        m, s, c = mean.double(), sd.double(), cost.double()
        scaled = c / m.exp()
        high = (scaled + (0.5 * s**2).exp()).log()
        low = torch.maximum(scaled.log(), -40.0 * s)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            z = middle / s
            worth = middle.exp() * _phi_cdf(z) - (0.5 * s**2).exp() * _phi_cdf(z - s)
            below = worth < scaled
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        log_level = 0.5 * (low + high)
        z = log_level / s
        chance = _phi_cdf(z).clamp_min(torch.finfo(torch.float64).tiny)
        level = (m + log_level).exp()
        partial = (m + 0.5 * s**2).exp() * _phi_cdf(z - s)  # E[f; f < g]
        d_mean = partial / chance
        density = torch.exp(-0.5 * z**2 - _LOG_SQRT_TAU)
        d_sd = (partial * s - level * density) / chance
    tangent = d_mean.to(mean) * (mean - mean.detach()) + d_sd.to(mean) * (sd - sd.detach())
    tangent = tangent + (cost - cost.detach()) / chance.to(mean)
    return (level.to(mean) + tangent).masked_fill(banned, math.inf)


def _phi_cdf(z: Tensor) -> Tensor:
    # erfc keeps its relative precision in the lower tail, which 1 + erf does not.
    value: Tensor = 0.5 * torch.special.erfc(-z * _SQRT_HALF)
    return value


def _log_shortfall(z: Tensor) -> Tensor:
    """Returns ``log(z Phi(z) + phi(z))``, also where it is as small as phi(-38)."""
    log_density = -0.5 * z**2 - _LOG_SQRT_TAU
    # phi(z) * (1 + z * Phi(z) / phi(z)), the ratio by the scaled erfcx, which does not underflow.
    mills = math.sqrt(math.pi / 2) * torch.special.erfcx(-z.clamp(max=5.0) * _SQRT_HALF)
    factor = (1 + z * mills).clamp_min(1e-30)
    # Far below, 1 + z * mills cancels: its expansion is 1 / z**2 - 3 / z**4.
    tail = 1 / z.clamp(max=-1.0) ** 2 - 3 / z.clamp(max=-1.0) ** 4
    near = log_density + torch.where(z < -100.0, tail, factor).log()
    far = (z * _phi_cdf(z) + log_density.exp()).clamp_min(1e-300).log()
    return torch.where(z > 5.0, far, near)


def _checked_cost(cost: Cost, X: Tensor) -> Tensor:
    value = _one_a_point("cost", cost(X.squeeze(-2)), X.shape[:-2], X)
    if bool(value.isnan().any()):
        raise InvalidInput("cost returned NaN; give infinity where a point may not be tried")
    if not bool((value > 0).all()):
        raise InvalidInput("cost must be above 0 everywhere; a free trial needs no decision")
    return value


def _one_a_point(name: str, value: object, shape: torch.Size, like: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        raise InvalidInput(f"{name} must return a tensor, got {type(value).__name__}")
    if value.shape != shape:
        raise InvalidInput(
            f"{name} must return one value a point, shape {tuple(shape)}, got {tuple(value.shape)}"
        )
    # Counts and flags, too.
    return value if value.is_floating_point() else value.to(like)


def _callable(name: str, value: object) -> None:
    if not callable(value):
        raise InvalidInput(f"{name} must be a function of points, got {value!r}")
