"""Which search strategies there are."""

from typing import ClassVar, Literal, Protocol

from ._classic import CherryPick, ConvBO, EIPerCost, HeterBO, HeterBOPruned, Random
from ._errors import UnknownName
from ._gittins import Gittins, Proposal
from ._prior import Array
from ._situation import Situation


class Strategy(Protocol):
    """Decides what to try, when to stop and what to recommend.

    Attributes:
        model: which beliefs it works with: ``"scaling"`` (the scaling-aware model) or
            ``"plain"`` (a constant mean and a Matern kernel).
    """

    model: ClassVar[Literal["scaling", "plain"]]

    def propose(self, s: Situation) -> Proposal:
        """Returns the next trial, or the decision to stop."""
        ...

    def choose(self, s: Situation) -> int:
        """Returns the deployment to recommend, given at least one measured."""
        ...

    def worth(self, s: Situation) -> Array:
        """Returns what recommending each deployment now is expected to cost."""
        ...


_STRATEGIES: dict[str, type[Strategy]] = {
    "gittins": Gittins,
    "heterbo": HeterBO,
    "heterbo-pruned": HeterBOPruned,
    "cherrypick": CherryPick,
    "convbo": ConvBO,
    "ei_per_cost": EIPerCost,
    "random": Random,
}


def strategies() -> tuple[str, ...]:
    """Returns the names that `DeploymentOptimizer` takes as `strategy`."""
    return tuple(_STRATEGIES)


def strategy_named(name: str) -> Strategy:
    """Returns a strategy by its name.

    Raises:
        UnknownName: there is none of that name.
    """
    try:
        return _STRATEGIES[name]()
    except (KeyError, TypeError):
        raise UnknownName(
            f"strategy {name!r} is unknown; available: {', '.join(strategies())}"
        ) from None
