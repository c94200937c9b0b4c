"""The default strategy: Pandora's-box Gittins index with a reserve, and its cost-matched stop."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ._index import gittins_index
from ._prior import Array
from ._situation import Situation

# A run that breaks the limit is worth this many times the objective on top of what it is.
_MISS = 3.0
# Weight of limit eaten by a trial, as a part of the incumbent's value.
_SLACK_PRICE = 0.3
# An untried deployment may be recommended only if it is this much better.
_BLIND = 1.03
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
        index = np.where(
            allowed, gittins_index(s.log_objective, s.sd, self._cost(s, worth)), np.inf
        )
        row = int(np.argmin(index))
        if not index[row] < best:
            return stop("no trial is expected to save more than it costs", best)
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
        value = s.expected_objective
        if not s.limited:
            return value
        kept = s.feasible(s.most_hours())
        safest = min(float(value[int(np.argmax(kept))]), np.inf)
        fallback = np.maximum(value, np.minimum(safest, 30.0 * value))
        return np.asarray(value + _MISS * (1.0 - kept) * fallback)

    def _best(self, s: Situation, worth: Array | None = None) -> float:
        if not s.observed.any():
            return float("nan")
        worth = self.worth(s) if worth is None else worth
        best = float(np.min(worth[s.observed]))
        if s.limited and s.incumbents().any():
            return best
        blind = worth[~s.observed & ~s.failed]
        return min(best, float(_BLIND * blind.min())) if blind.size else best

    def _cost(self, s: Situation, worth: Array) -> Array:
        """Returns what each trial costs: its own price, and the harm of eating into the limit."""
        cost = s.trial_objective
        if not s.limited:
            return np.maximum(cost, _TINY)
        held = int(np.argmin(np.where(s.observed, worth, np.inf)))
        hours, dollars = s.trial_hours * s.expected, s.trial_dollars * s.expected
        now = float(s.feasible(s.most_hours())[held])
        # What the incumbent's chance becomes once the trial is paid, for each trial.
        left_money = (s.ledger.dollars_left - dollars) / s.rate[held]
        later = s.feasible(np.minimum(left_money, s.ledger.hours_left - hours), held)
        own = s.feasible(s.most_hours(hours, dollars))
        run = float(np.exp(s.mean[held] + 0.5 * s.sd[held] ** 2))
        slack_h = max(s.ledger.hours_left - run, _TINY)
        slack_d = max(s.ledger.dollars_left - run * s.rate[held], _TINY)
        eaten = np.minimum(np.maximum(hours / slack_h, dollars / slack_d), 1.0)
        value = float(s.expected_objective[held])
        cost = cost + _SLACK_PRICE * float(worth[held]) * now * eaten
        cost = cost + _MISS * value * np.maximum(now - later, 0.0) * (1.0 - own)
        # Opening a box that cannot be kept reveals nothing of use: its cost is per chance.
        with np.errstate(divide="ignore", over="ignore"):
            return np.asarray(np.maximum(cost, _TINY) / own)

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
