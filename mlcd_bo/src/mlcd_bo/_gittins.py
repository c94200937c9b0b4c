"""The default strategy: Pandora's-box Gittins index with a reserve, and its cost-matched stop."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ._index import gittins_index
from ._price import prices, with_misses
from ._prior import Array
from ._situation import LIMIT_MARGIN, Situation

# An untried deployment may be recommended only if it is this much better.
_BLIND = 1.03
# While nothing measured keeps the limit, beliefs are taken to be this much less certain: memory
# cliffs and the like make surprises more frequent than a Gaussian process expects.
_DOUBT = 1.6
_TINY = 1e-9


@dataclass(frozen=True)
class Proposal:
    """What to do next.

    Attributes:
        row: the deployment to try, or None to stop.
        index: its Gittins index (or the strategy's own score), NaN when stopping.
        best: value of the best deployment in hand, NaN if there is none.
        why: in words.
    """

    row: int | None
    index: float
    best: float
    why: str


class Gittins:
    """Tries the deployment of least Gittins index; stops when none is below the value in hand."""

    model: ClassVar[Literal["scaling", "plain"]] = "scaling"

    def propose(self, s: Situation) -> Proposal:
        """Returns the next trial, or the decision to stop."""
        allowed = s.allowed()
        if not allowed.any():
            return stop("no trial fits in what is left beside the final run", self._best(s))
        if not s.observed.any():
            row = self._first(s, allowed)
            return Proposal(row, np.nan, np.nan, "first trial: " + self._first_why(s))
        chasing = self._chase(s, allowed)
        if chasing is not None:
            return Proposal(
                chasing,
                np.nan,
                np.nan,
                "the likeliest to keep the limit; none so far does",
            )
        worth = self.worth(s)
        best = self._best(s, worth)
        cost = prices(s, worth, _BLIND)
        sd = s.sd * _DOUBT if s.limited and not s.incumbents().any() else s.sd
        longest = s.most_hours(s.trial_hours, s.trial_dollars) * math.exp(-LIMIT_MARGIN)
        most = longest if s.objective == "time" else longest * s.rate
        index, least = (
            np.where(allowed, gittins_index(s.log_objective, sd, price, most), np.inf)
            for price in (cost.ranking, cost.stopping)
        )
        if not least.min() < best:
            return stop("no trial is expected to save more than it costs", best)
        row = int(np.argmin(index))
        return Proposal(row, float(index[row]), best, "the trial is expected to save its cost")

    def choose(self, s: Situation) -> int:
        """Returns the deployment to recommend, given at least one measured."""
        worth = self.worth(s)
        incumbents = s.incumbents()
        if s.limited and incumbents.any():
            # The promise: with a measured deployment inside the limit, never leave it.
            return int(np.argmin(np.where(incumbents, worth, np.inf)))
        worth = np.where(s.observed, worth, worth * _BLIND)
        return int(np.argmin(np.where(s.failed, np.inf, worth)))

    def worth(self, s: Situation) -> Array:
        """Returns what recommending each deployment now is expected to cost, misses priced in."""
        if not s.limited:
            return s.expected_objective
        return with_misses(s, s.feasible(s.most_hours()))

    def _best(self, s: Situation, worth: Array | None = None) -> float:
        if not s.observed.any():
            return float("nan")
        worth = self.worth(s) if worth is None else worth
        best = float(np.min(worth[s.observed]))
        if s.limited and s.incumbents().any():
            return best
        blind = worth[~s.observed & ~s.failed]
        return min(best, float(_BLIND * blind.min())) if blind.size else best

    def _first(self, s: Situation, allowed: NDArray[np.bool_]) -> int:
        candidates = allowed & ~_beside_failures(s)
        if not candidates.any():
            candidates = allowed
        order = s.trial_dollars
        if len(s.tried) == 0:
            if not s.limited:
                order = s.expected_objective * np.sqrt(s.rate)
            elif s.objective == "time":
                middle = _middle(s, candidates)
                if s.trial_dollars[middle] <= 0.04 * s.ledger.budget:
                    return middle
        return int(np.argmin(np.where(candidates, order, np.inf)))

    def _first_why(self, s: Situation) -> str:
        if len(s.tried):
            return "the cheapest trial away from what failed"
        if not s.limited:
            return "expected to be fast for its price"
        return "cheap, and tells about the rest"

    def _chase(self, s: Situation, allowed: NDArray[np.bool_]) -> int | None:
        """Returns the trial that may save a tight deadline, while nothing measured keeps it."""
        if s.objective != "cost" or not np.isfinite(s.ledger.deadline):
            return None
        if (s.feasible(s.most_hours())[s.observed] >= 0.5).any():
            return None
        own = s.feasible(s.most_hours(s.trial_hours, s.trial_dollars))
        own = np.where(allowed, own, 0.0)
        slack = s.ledger.hours_left - float(np.exp(s.mean.min()))
        if own.max() <= 0.02 or slack >= 8.0 * float(np.median(s.trial_hours)):
            return None
        slack = max(slack, _TINY)
        with np.errstate(divide="ignore"):
            score = np.log(own) - np.log(s.trial_hours / slack + 0.1)
        score = score - 1.5 * (s.log_objective - s.log_objective.min())
        return int(np.argmax(np.where(allowed, score, -np.inf)))


def _beside_failures(s: Situation) -> NDArray[np.bool_]:
    """Returns what is of a failed type with no more machines than failed."""
    beside = np.zeros(len(s.kind), dtype=bool)
    for row in s.tried:
        if s.failed[row]:
            beside |= (s.kind == s.kind[row]) & (s.count <= s.count[row])
    return beside


def _middle(s: Situation, candidates: NDArray[np.bool_]) -> int:
    """Returns the candidate of middle price and middle count."""
    price = s.rate / s.count
    kinds = sorted({int(k) for k in s.kind[candidates]}, key=lambda k: price[s.kind == k].min())
    kind = kinds[len(kinds) // 2]
    rows = np.flatnonzero(candidates & (s.kind == kind))
    rows = rows[np.argsort(s.count[rows], kind="stable")]
    return int(rows[len(rows) // 2])


def stop(why: str, best: float = float("nan")) -> Proposal:
    """Returns the decision to stop."""
    return Proposal(None, float("nan"), best, why)
