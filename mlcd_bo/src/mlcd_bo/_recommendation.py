"""The answer of a search, with its uncertainty and its nearest alternatives."""

from dataclasses import dataclass

from ._space import Deployment


@dataclass(frozen=True)
class Estimate:
    """What the final run on one deployment is expected to take.

    Attributes:
        deployment: where it runs.
        hours: expected hours of the work that is left.
        hours_interval: 95 % interval of `hours`.
        dollars: expected dollars.
        dollars_interval: 95 % interval of `dollars`.
        within_limit: chance that exploration plus this run keeps every limit; 1 without one.
        measured: whether it was profiled, not only predicted.
    """

    deployment: Deployment
    hours: float
    hours_interval: tuple[float, float]
    dollars: float
    dollars_interval: tuple[float, float]
    within_limit: float
    measured: bool


@dataclass(frozen=True)
class Recommendation(Estimate):
    """The deployment to run the job on, and the whole bill.

    Attributes:
        trials: number of trials behind it.
        spent_hours: hours that finding it took.
        spent_dollars: dollars that finding it took.
        reason: two sentences: why this deployment, and why the search stops here.
        alternatives: the next best deployments, best first.
    """

    trials: int
    spent_hours: float
    spent_dollars: float
    reason: str
    alternatives: tuple[Estimate, ...]

    @property
    def total_hours(self) -> float:
        """Expected hours of exploration and final run together."""
        return self.spent_hours + self.hours

    @property
    def total_dollars(self) -> float:
        """Expected dollars of exploration and final run together."""
        return self.spent_dollars + self.dollars

    def __str__(self) -> str:
        low, high = self.hours_interval
        return (
            f"{self.deployment}: {self.hours:.3g} h ({low:.3g} to {high:.3g}), "
            f"${self.dollars:.3g}; with {counted(self.trials)} ${self.total_dollars:.3g} and "
            f"{self.total_hours:.3g} h in all. {self.reason}"
        )


def counted(trials: int) -> str:
    """Returns the number of trials in words that fit it."""
    return f"{trials} trial" if trials == 1 else f"{trials} trials"
