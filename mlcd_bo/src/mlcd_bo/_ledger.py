"""What has been spent and what is left: every trial is charged in hours and in dollars."""

from collections.abc import Sequence
from dataclasses import dataclass

from ._scenario import Scenario
from ._trial import Trial


@dataclass(frozen=True)
class Lost:
    """A trial, or several side by side, that gave no observation and still cost.

    Attributes:
        batch: as `Trial.batch`; its hours count together with those of the batch's trials.
        hours: wall hours that it is known to have run.
        dollars: what that cost.
    """

    batch: int
    hours: float
    dollars: float


@dataclass(frozen=True)
class Ledger:
    """Spent and left of one search.

    Attributes:
        hours: wall hours spent on trials. Trials of one batch ran side by side: the longest
            of them counts.
        dollars: dollars spent on trials, the sum.
        budget: the scenario's dollars, or infinity.
        deadline: the scenario's hours, or infinity.
    """

    hours: float
    dollars: float
    budget: float
    deadline: float

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        trials: Sequence[Trial],
        lost: Sequence[Lost] = (),
    ) -> "Ledger":
        """Returns the ledger after `trials`.

        Args:
            scenario: the limits.
            trials: what was tried.
            lost: trials that raised, or were cut short with the search itself.
        """
        longest: dict[tuple[str, int], float] = {}
        for cut in lost:
            batch = ("batch", cut.batch)
            longest[batch] = max(longest.get(batch, 0.0), cut.hours * 3600)
        for index, trial in enumerate(trials):
            # A trial without a batch is alone in one.
            batch = ("alone", index) if trial.batch is None else ("batch", trial.batch)
            longest[batch] = max(longest.get(batch, 0.0), trial.observation.seconds)
        return cls(
            hours=sum(longest.values()) / 3600,
            dollars=sum(trial.observation.dollars for trial in trials)
            + sum(cut.dollars for cut in lost),
            budget=float("inf") if scenario.budget is None else scenario.budget,
            deadline=float("inf") if scenario.deadline is None else scenario.deadline,
        )

    @property
    def dollars_left(self) -> float:
        """Dollars left of the budget; below zero once overdrawn."""
        return self.budget - self.dollars

    @property
    def hours_left(self) -> float:
        """Hours left until the deadline; below zero once past it."""
        return self.deadline - self.hours
