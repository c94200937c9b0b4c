"""The scaling prior as a mean function for GPyTorch and BoTorch models."""

import math
from collections.abc import Sequence

import torch
from gpytorch.means import Mean
from gpytorch.priors import NormalPrior
from torch import Tensor

from ._check import positive, whole
from ._errors import InvalidInput
from ._prior import COUNT_BEND, COUNT_SLOPE, PRICE_SLOPE

# How far the slopes of one job are from the usual ones (standard deviations over jobs).
_COUNT_SLOPE_SD = 0.24
_PRICE_SLOPE_SD = 0.22


class ScalingMean(Mean):  # type: ignore[misc]
    """Mean of log time that falls with machines and with the price of one, slopes uncertain.

    ``constant + count_slope * l + 0.016 * l**2 + price_slope * q`` with l the log of the number
    of machines and q the log price, both taken from columns of the input. BoTorch wants inputs
    in the unit cube: with ranges given, 0 stands for the log of the range's low end and 1 for
    that of its high end. The constant and the slopes are parameters; the slopes have normal
    priors. It is for models of one output that are no batch of several: all share the parameters.

    Args:
        count_dim: column of the input that holds the log number of machines.
        price_dim: column that holds the log price of one machine, or None.
        count_range: fewest and most machines, which columns of 0 and 1 stand for; None: the
            column is the plain log.
        price_range: the same for the price.

    Raises:
        InvalidInput: the columns are not whole numbers or are the same, or a range does not
            rise from above zero.

    Example:
        >>> scaling = ScalingMean(count_range=(1, 8), price_range=(0.1, 3.2))
        >>> with botorch.settings.validate_input_scaling(False):  # log time stays unscaled
        ...     model = SingleTaskGP(
        ...         train_X, train_Y, mean_module=scaling, outcome_transform=None
        ...     )  # doctest: +SKIP
    """

    def __init__(
        self,
        count_dim: int = 0,
        price_dim: int | None = 1,
        count_range: tuple[float, float] | None = None,
        price_range: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        self._count_span = _log_span("count_range", count_range)
        self._price_span = _log_span("price_range", price_range)
        count_dim = whole("count_dim", count_dim)
        price_dim = None if price_dim is None else whole("price_dim", price_dim)
        if count_dim == price_dim:
            raise InvalidInput(f"count_dim and price_dim are both {count_dim}; give two columns")
        self.count_dim = count_dim
        self.price_dim = price_dim
        for name, start in (("constant", 0.0), ("count_slope", COUNT_SLOPE)):
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(start).double()))
        self.register_prior(
            "count_slope_prior", NormalPrior(COUNT_SLOPE, _COUNT_SLOPE_SD), "count_slope"
        )
        if price_dim is not None:
            self.register_parameter(
                "price_slope", torch.nn.Parameter(torch.tensor(PRICE_SLOPE).double())
            )
            self.register_prior(
                "price_slope_prior", NormalPrior(PRICE_SLOPE, _PRICE_SLOPE_SD), "price_slope"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mean at ``... x n x d`` inputs, shape ``... x n``."""
        count = x[..., self.count_dim] * self._count_span
        mean: Tensor = self.constant + self.count_slope * count + COUNT_BEND * count**2
        if self.price_dim is not None:
            mean = mean + self.price_slope * self._price_span * x[..., self.price_dim]
        return mean.to(x) if x.is_floating_point() else mean


def _log_span(name: str, ends: tuple[float, float] | None) -> float:
    if ends is None:
        return 1.0
    if not isinstance(ends, Sequence) or len(ends) != 2:
        raise InvalidInput(f"{name} must be the two ends of a range, got {ends!r}")
    low, high = positive(name, ends[0]), positive(name, ends[1])
    if high <= low:
        raise InvalidInput(f"{name} must rise, got {ends!r}")
    return math.log(high / low)
