"""What to minimise and which limit to keep, exploration included."""

import datetime
from dataclasses import dataclass
from typing import Literal

from ._check import positive
from ._errors import InvalidInput

Objective = Literal["time", "cost"]


@dataclass(frozen=True)
class Scenario:
    """An objective and the limits that exploration plus the final run must keep together.

    Attributes:
        objective: ``"time"`` (hours) or ``"cost"`` (dollars); None only with one limit, whose
            opposite it then is (a budget buys time, a deadline saves money).
        budget: most dollars for exploration and the final run together.
        deadline: most hours for exploration and the final run together.

    Raises:
        InvalidInput: a limit that is not above zero, or no objective where none follows.

    Example:
        >>> Scenario.cheapest_by(deadline=12.0)
        Scenario(objective='cost', budget=None, deadline=12.0)
    """

    objective: Objective | None = None
    budget: float | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            budget = positive("budget", self.budget, unit=" (dollars)")
            object.__setattr__(self, "budget", budget)
        if self.deadline is not None:
            deadline = positive("deadline", self.deadline, unit=" (hours)")
            object.__setattr__(self, "deadline", deadline)
        if self.objective is None:
            if self.budget is not None and self.deadline is not None:
                raise InvalidInput(
                    "budget and deadline are both given without an objective; say "
                    "objective='time' for the fastest run within both, or objective='cost' "
                    "for the cheapest"
                )
            implied: Objective = "time" if self.deadline is None else "cost"
            object.__setattr__(self, "objective", implied)
        elif self.objective not in ("time", "cost"):
            raise InvalidInput(f"objective must be 'time' or 'cost', got {self.objective!r}")

    @classmethod
    def fastest(cls) -> "Scenario":
        """Returns the scenario without a limit: least hours, exploration included."""
        return cls("time")

    @classmethod
    def fastest_within(cls, budget: float) -> "Scenario":
        """Returns the scenario of least hours with at most `budget` dollars in all.

        Raises:
            InvalidInput: `budget` is not above zero, or None: that would be `fastest`.
        """
        return cls("time", budget=positive("budget", budget, unit=" (dollars)"))

    @classmethod
    def cheapest_by(cls, deadline: "float | datetime.timedelta") -> "Scenario":
        """Returns the scenario of least dollars within `deadline` (hours or timedelta) in all.

        Raises:
            InvalidInput: `deadline` is not above zero, or None: ``Scenario("cost")`` has none.
        """
        if isinstance(deadline, datetime.timedelta):
            deadline = deadline.total_seconds() / 3600
        return cls("cost", deadline=positive("deadline", deadline, unit=" (hours)"))

    def check_allows(self, dollars: float, hours: float) -> None:
        """Refuses a limit that does not even allow one trial.

        Args:
            dollars: of the cheapest possible trial.
            hours: of the shortest.

        Raises:
            InvalidInput: a limit is below that.
        """
        if self.budget is not None and self.budget < dollars:
            raise InvalidInput(
                f"budget of ${self.budget:.4g} is below the cheapest possible trial, "
                f"${dollars:.4g}; raise it or allow shorter trials"
            )
        if self.deadline is not None and self.deadline < hours:
            raise InvalidInput(
                f"deadline of {self.deadline:.4g} h is below the shortest possible trial, "
                f"{hours:.4g} h; raise it or allow shorter trials"
            )

    def describe(self) -> str:
        """Returns the scenario in a few words."""
        words = "fastest" if self.objective == "time" else "cheapest"
        limits = []
        if self.budget is not None:
            limits.append(f"within ${self.budget:,.4g}")
        if self.deadline is not None:
            limits.append(f"by {self.deadline:,.4g} h")
        return " ".join([words, *limits])
