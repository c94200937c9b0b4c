"""The strategies that the default is measured against; each is usable, too.

`HeterBO` is a reading of its published abstract and of descriptions of it: the body of the paper
was not at hand. Read from there: heterogeneous exploration cost (expected improvement per cost of
the trial), start with one machine of each type, an improvement that counts only while limit and
reserve hold, and knowledge of scaling. Ours: the threshold of 5 % at which it stops, what it does
while nothing keeps the limit, and the soft prior on scaling, which replaces dropping every count
past a first decline (``heterbo-pruned`` does that, with a model that knows nothing of scaling).
"""

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ._gittins import Gittins, Proposal, stop
from ._index import expected_shortfall
from ._prior import Array
from ._situation import Situation

ModelName = Literal["scaling", "plain"]
_INITIAL = 3


class _Classic:
    """Shared by all: recommend the best measured deployment that keeps the limits."""

    model: ClassVar[ModelName] = "plain"

    def choose(self, s: Situation) -> int:
        """Returns the best measured deployment; the nearest miss if none keeps the limits."""
        incumbents = s.incumbents() if s.limited else s.observed
        if incumbents.any():
            return int(np.argmin(np.where(incumbents, self._measured_objective(s), np.inf)))
        short = np.where(s.observed, s.measured - s.most_hours(), np.inf)
        return int(np.argmin(short))

    def worth(self, s: Situation) -> Array:
        """Returns the expected objective, misses priced in."""
        return Gittins().worth(s)

    @staticmethod
    def _measured_objective(s: Situation) -> Array:
        return s.measured if s.objective == "time" else s.measured * s.rate

    @staticmethod
    def _affordable(s: Situation) -> NDArray[np.bool_]:
        """Returns the open trials that what is left of the limits can pay, with no reserve."""
        return (
            s.open
            & (s.trial_hours <= s.ledger.hours_left)
            & (s.trial_dollars <= s.ledger.dollars_left)
        )

    def _improvement(self, s: Situation) -> tuple[Array, float]:
        """Returns expected improvement by deployment and the value it is measured from.

        Exploration is ignored in the limit, as these methods do: a run is feasible if it alone
        keeps it. Without a feasible run in hand the improvement is the chance of one.
        """
        alone = np.minimum(s.ledger.budget / s.rate, s.ledger.deadline + 0.0 * s.rate)
        feasible = s.feasible(alone)
        with np.errstate(invalid="ignore"):
            held = s.observed & (s.measured <= alone)
        if not held.any():
            return feasible, float("inf")
        best = float(np.min(self._measured_objective(s)[held]))
        level = np.full_like(s.mean, best)
        return expected_shortfall(level, s.log_objective, s.sd) * feasible, best


class Random(_Classic):
    """Six deployments drawn by chance."""

    trials = 6

    def propose(self, s: Situation) -> Proposal:
        """Returns the next draw."""
        rows = np.flatnonzero(self._affordable(s))
        if len(s.tried) + s.running >= self.trials or not len(rows):
            return stop(f"{self.trials} deployments were drawn, or no trial is left to pay")
        row = int(s.rng.choice(rows))
        return Proposal(row, float("nan"), float("nan"), "drawn by chance")


class ConvBO(_Classic):
    """Conventional Bayesian optimization: three random trials, then expected improvement.

    Costs of trials and what they eat of a limit are not considered; it stops once the expected
    improvement is below 1 % of the best value, or after ten trials.
    """

    threshold: ClassVar[float] = 0.01
    least: ClassVar[int] = 4
    most: ClassVar[int] = 10

    def propose(self, s: Situation) -> Proposal:
        """Returns the trial of largest score."""
        affordable = self._affordable(s)
        rows = np.flatnonzero(affordable)
        made = len(s.tried) + s.running
        if not len(rows):
            return stop("no trial is left to pay")
        if made < _INITIAL or not s.observed.any():
            row = int(s.rng.choice(rows))
            return Proposal(row, float("nan"), float("nan"), "initial trial")
        improvement, best = self._improvement(s)
        improvement = np.where(affordable, improvement, -np.inf)
        if made >= self.most:
            return stop(f"{self.most} trials were made", best)
        if made >= self.least and float(improvement.max()) < self.threshold * best < np.inf:
            return stop(f"the expected improvement is below {self.threshold:.0%} of the best", best)
        score = self._score(s, improvement)
        row = int(np.argmax(np.where(affordable, score, -np.inf)))
        return Proposal(row, float(score[row]), best, "the largest expected improvement")

    def _score(self, s: Situation, improvement: Array) -> Array:
        return improvement


class CherryPick(ConvBO):
    """As CherryPick (NSDI 2017) stops: expected improvement below 10 %, after at least six runs."""

    threshold = 0.10
    least = 6
    most = 20


class EIPerCost(CherryPick):
    """As CherryPick, with the improvement divided by what the trial costs."""

    def _score(self, s: Situation, improvement: Array) -> Array:
        return improvement / s.trial_objective


class HeterBO(_Classic):
    """Expected improvement per cost of the trial, with a protected reserve; see the module."""

    model: ClassVar[ModelName] = "scaling"
    prune: ClassVar[bool] = False
    threshold: ClassVar[float] = 0.05

    def propose(self, s: Situation) -> Proposal:
        """Returns the trial of largest improvement per cost that keeps the reserve."""
        allowed = s.allowed()
        if self.prune:
            allowed &= ~_past_a_decline(s)
        if not allowed.any():
            return stop("no trial fits in what is left beside the final run")
        first = allowed & self._first_of_a_new_type(s)
        cost = s.trial_objective
        if first.any():
            row = int(np.argmin(np.where(first, cost, np.inf)))
            return Proposal(row, float("nan"), float("nan"), "the smallest of a type not yet tried")
        if not s.observed.any():
            row = int(np.argmin(np.where(allowed, cost, np.inf)))
            return Proposal(row, float("nan"), float("nan"), "the cheapest trial; none succeeded")
        after = s.feasible(s.most_hours(s.trial_hours, s.trial_dollars))
        incumbents = s.incumbents() if s.limited else s.observed
        if not incumbents.any():
            row = int(np.argmax(np.where(allowed, after / cost, -np.inf)))
            if after[row] < 0.01:
                return stop("no trial is likely to keep the limit")
            return Proposal(row, float("nan"), float("nan"), "none keeps the limit yet")
        best = float(np.min(self._measured_objective(s)[incumbents]))
        level = np.full_like(s.mean, best)
        improvement = expected_shortfall(level, s.log_objective, s.sd) * after
        improvement = np.where(allowed, improvement, 0.0)
        if float(improvement.max()) < self.threshold * best:
            return stop(f"the expected improvement is below {self.threshold:.0%} of the best", best)
        score = improvement / cost
        row = int(np.argmax(score))
        return Proposal(row, float(score[row]), best, "the largest improvement per cost")

    @staticmethod
    def _first_of_a_new_type(s: Situation) -> NDArray[np.bool_]:
        """Returns the smallest deployment of each type of which none was tried."""
        first = np.zeros(len(s.kind), dtype=bool)
        tried = {int(k) for k in s.kind[s.tried]} | {int(k) for k in s.kind[~s.open]}
        for kind in np.unique(s.kind):
            if int(kind) not in tried:
                rows = np.flatnonzero(s.kind == kind)
                first[rows[np.argmin(s.count[rows])]] = True
        return first


class HeterBOPruned(HeterBO):
    """HeterBO with a constant mean, dropping every count past a type's first seen decline."""

    model: ClassVar[ModelName] = "plain"
    prune: ClassVar[bool] = True


def _past_a_decline(s: Situation) -> NDArray[np.bool_]:
    past = np.zeros(len(s.kind), dtype=bool)
    for kind in np.unique(s.kind):
        rows = np.flatnonzero((s.kind == kind) & s.observed)
        rows = rows[np.argsort(s.count[rows], kind="stable")]
        hours = s.measured[rows]
        slower = np.flatnonzero(np.diff(hours) > 0)
        if len(slower):
            past |= (s.kind == kind) & (s.count > s.count[rows[slower[0]]])
    return past
