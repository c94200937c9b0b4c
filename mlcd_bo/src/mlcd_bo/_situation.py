"""What a strategy sees when it decides: beliefs, prices, and what is left of the limits.

Legend: N deployments. `f` is the objective of a final run (hours or dollars), `T` its hours.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ._ledger import Ledger
from ._normal import normal_cdf
from ._prior import Array
from ._scenario import Objective

# Log margin under a limit when its chance of being kept is judged.
LIMIT_MARGIN = 0.03


@dataclass(frozen=True)
class Situation:
    """One moment of a search; all arrays have length N unless said otherwise.

    Attributes:
        objective: what is minimised.
        ledger: spent and left, committed spend of running trials included.
        rate: dollars per hour.
        mean: mean of log T, T in hours for the work that is left.
        sd: standard deviation of log T.
        measured: hours by the measurement alone; NaN where nothing was measured.
        measured_sd: standard error of log `measured`; NaN where nothing was measured.
        open: may be tried: neither tried, nor running, nor ruled out by a failure.
        failed: tried without a speed, or ruled out by such a failure.
        trial_hours: most hours a trial lasts.
        trial_dollars: most dollars a trial costs.
        expected: the part of those that trials have really taken so far, at most 1.
        kept_part: the part of their duration in which trials have trained what is carried on.
        kind: index of the instance type.
        count: machines.
        tried: rows in the order tried, failures included.
        running: how many trials are under way, committed but not told.
        rng: for choices by chance, the same after a resume.
    """

    objective: Objective
    ledger: Ledger
    rate: Array
    mean: Array
    sd: Array
    measured: Array
    measured_sd: Array
    open: NDArray[np.bool_]
    failed: NDArray[np.bool_]
    trial_hours: Array
    trial_dollars: Array
    expected: float
    kept_part: float
    kind: NDArray[np.int64]
    count: NDArray[np.int64]
    tried: NDArray[np.int64]
    running: int
    rng: np.random.Generator = field(compare=False)

    @property
    def observed(self) -> NDArray[np.bool_]:
        """Whose speed has been measured."""
        return np.isfinite(self.measured)

    @property
    def limited(self) -> bool:
        """Whether there is any limit to keep."""
        return bool(np.isfinite(self.ledger.budget) or np.isfinite(self.ledger.deadline))

    @property
    def log_objective(self) -> Array:
        """Mean of log f; its standard deviation is `sd`."""
        return self.mean if self.objective == "time" else self.mean + np.log(self.rate)

    @property
    def trial_objective(self) -> Array:
        """What a trial most likely costs, in the unit of the objective."""
        most = self.trial_hours if self.objective == "time" else self.trial_dollars
        # Beside a longer trial that is under way a shorter one takes no time of its own.
        return np.maximum(most * self.expected, 1e-12)

    @property
    def expected_objective(self) -> Array:
        """Mean of f."""
        return np.exp(self.log_objective + 0.5 * self.sd**2)

    def most_hours(self, hours: Array | float = 0.0, dollars: Array | float = 0.0) -> Array:
        """Returns the longest final run that keeps every limit after a further spend.

        Args:
            hours: hours spent further, one number or shape N (or any that broadcasts).
            dollars: dollars spent further.

        Returns:
            Hours, zero or below where a limit is already gone.
        """
        by_money = (self.ledger.dollars_left - np.asarray(dollars)) / self.rate
        by_time = self.ledger.hours_left - np.asarray(hours) + np.zeros_like(self.rate)
        return np.minimum(by_money, by_time)

    def feasible(self, longest: Array, row: int | None = None) -> Array:
        """Returns the chance that a final run lasts at most `longest` hours.

        Args:
            longest: hours, shape N.
            row: judge this one deployment at every entry of `longest`; None: each its own.
        """
        which = slice(None) if row is None else row
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (np.log(longest) - LIMIT_MARGIN - self.mean[which]) / self.sd[which]
        return np.where(longest > 0, normal_cdf(z), 0.0)

    @property
    def careful(self) -> Array:
        """Measured hours and one standard error, by which limits are judged; NaN if unmeasured."""
        return np.asarray(self.measured * np.exp(self.measured_sd))

    def incumbents(self) -> NDArray[np.bool_]:
        """Returns which measured deployments keep every limit, by their measurement."""
        with np.errstate(invalid="ignore"):
            return self.observed & (self.careful <= self.most_hours())

    def allowed(self) -> NDArray[np.bool_]:
        """Returns which open trials leave enough for a final run: the protected reserve.

        Without an incumbent that keeps the limits, a trial must only fit in them. With one, at
        least one incumbent must still keep them after the trial's largest cost.
        """
        fits = (self.trial_hours <= self.ledger.hours_left) & (
            self.trial_dollars <= self.ledger.dollars_left
        )
        allowed = self.open & fits
        rows = np.flatnonzero(self.incumbents())
        if self.limited and len(rows):
            by_money = (self.ledger.dollars_left - self.trial_dollars[:, None]) / self.rate[rows]
            by_time = self.ledger.hours_left - self.trial_hours[:, None]
            still = self.careful[rows] <= np.minimum(by_money, by_time)
            allowed &= still.any(axis=1)
        return allowed
