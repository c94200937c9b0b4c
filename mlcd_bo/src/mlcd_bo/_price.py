"""What a trial costs: its bill less the training it keeps, and what it takes from the limit.

Money or time that a trial takes of a limit is lost to the final run. That is charged twice over,
for two reasons: the best deployment in hand becomes less likely to keep the limit (`harm`), and
whatever is better may no longer fit (`crowding`). Without either, a search under a tight limit
spends its slack on trials that each look cheap, down to its slowest feasible deployment.

Legend: N deployments, each as a trial; K final runs that remain possible.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._normal import normal_cdf
from ._prior import Array
from ._situation import LIMIT_MARGIN, Situation

# A run that breaks the limit is worth this many times the objective on top of what it is.
MISS = 2.0
# Value of all the slack under a limit, as a part of the final run's: while a measured deployment
# keeps the limit, and before (there it only ranks trials; it is no reason to give up).
_CROWDING = 0.5
_CROWDING_BEFORE = 0.1
# Final runs considered when the harm of a trial is judged, at most.
_RUNS = 64
_TINY = 1e-9


@dataclass(frozen=True)
class Prices:
    """Costs of trials in the unit of the objective, each shape N.

    Attributes:
        ranking: for choosing the next trial.
        stopping: for the decision whether any trial is worth its cost.
    """

    ranking: Array
    stopping: Array


def prices(s: Situation, worth: Array, blind: float) -> Prices:
    """Returns what each trial costs.

    Args:
        s: the moment.
        worth: what recommending each deployment now is expected to cost, shape N.
        blind: factor by which an unmeasured deployment must be better to be recommended.
    """
    hours, dollars = net_spend(s, worth, blind)
    bill = hours if s.objective == "time" else dollars
    if not s.limited:
        bill = np.maximum(bill, _TINY)
        return Prices(bill, bill)
    cost = bill + harm(s, hours, dollars, blind)
    held = int(np.argmin(np.where(s.observed, worth, np.inf)))
    if s.feasible(s.most_hours())[held] >= 0.5:
        run = float(np.exp(s.mean[held] + 0.5 * s.sd[held] ** 2))
        eaten = _eaten(s, hours, dollars, run, run * float(s.rate[held]))
        cost = np.maximum(cost + _CROWDING * float(worth[held]) * eaten, _TINY)
        return Prices(cost, cost)
    # Nothing keeps the limit yet: what is left over the least run that is believed possible.
    least_hours = min(float(np.exp(s.mean).min()), 0.95 * s.ledger.hours_left)
    least_dollars = min(float((np.exp(s.mean) * s.rate).min()), 0.95 * s.ledger.dollars_left)
    eaten = _eaten(s, hours, dollars, least_hours, least_dollars)
    kept = s.feasible(s.most_hours())
    likeliest = int(np.argmax(kept / np.maximum(s.expected_objective, _TINY)))
    before = _CROWDING_BEFORE * float(s.expected_objective[likeliest]) * eaten
    return Prices(np.maximum(cost + before, _TINY), np.maximum(cost, _TINY))


def net_spend(s: Situation, worth: Array, blind: float) -> tuple[Array, Array]:
    """Returns hours and dollars that each trial takes beyond what its training saves later.

    Training that a trial keeps shortens the final run, wherever that will be: on the deployment
    that would be recommended now.
    """
    hours, dollars = s.trial_hours * s.expected, s.trial_dollars * s.expected
    if s.kept_part == 0.0:
        return hours, dollars
    final = int(np.argmin(np.where(s.failed, np.inf, np.where(s.observed, 1.0, blind) * worth)))
    share = np.minimum(s.kept_part * hours * np.exp(-s.mean), 1.0)
    saved = share * float(np.exp(s.mean[final]))
    return (
        np.maximum(hours - saved, 0.0),
        np.maximum(dollars - saved * float(s.rate[final]), 0.0),
    )


def with_misses(s: Situation, kept: Array, rows: NDArray[np.intp] | slice = slice(None)) -> Array:
    """Returns the expected objective with the price of missing the limit.

    Args:
        s: the moment.
        kept: chance that the limit is kept, of those rows (any shape before the last axis).
        rows: which deployments; all by default.
    """
    value = s.expected_objective
    safest = float(value[int(np.argmax(s.feasible(s.most_hours())))])
    fallback = np.maximum(value, np.minimum(safest, 30.0 * value))
    return np.asarray(value[rows] + MISS * (1.0 - kept) * fallback[rows])


def harm(s: Situation, hours: Array, dollars: Array, blind: float) -> Array:
    """Returns by how much the best final run gets worse once a trial is paid, shape N.

    Args:
        s: the moment.
        hours: of each trial, shape N.
        dollars: of each trial, shape N.
        blind: factor on the worth of what was not measured.
    """
    possible = s.observed if s.incumbents().any() else ~s.failed
    rows = np.flatnonzero(possible)
    now = s.feasible(s.most_hours())
    factor = np.where(s.observed, 1.0, blind)
    worth = factor[rows] * with_misses(s, now[rows], rows)
    if len(rows) > _RUNS:
        # The best now, and the safest: one of them is the best after any spend.
        best, safest = np.argsort(worth)[: _RUNS // 2], np.argsort(-now[rows])[: _RUNS // 2]
        few = np.unique(np.concatenate([best, safest]))
        rows, worth = rows[few], worth[few]
    left = np.minimum(
        (s.ledger.dollars_left - dollars)[:, None] / s.rate[rows],
        (s.ledger.hours_left - hours)[:, None],
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        z = (np.log(left) - LIMIT_MARGIN - s.mean[rows]) / s.sd[rows]
    later = np.where(left > 0, normal_cdf(z), 0.0)
    after = (factor[rows] * with_misses(s, later, rows)).min(axis=1)
    return np.asarray(np.maximum(after - worth.min(), 0.0))


def _eaten(
    s: Situation, hours: Array, dollars: Array, run_hours: float, run_dollars: float
) -> Array:
    """Returns the part of the slack above a final run that each trial takes, at most 1."""
    slack_hours = max(s.ledger.hours_left - run_hours, _TINY)
    slack_dollars = max(s.ledger.dollars_left - run_dollars, _TINY)
    return np.asarray(np.minimum(np.maximum(hours / slack_hours, dollars / slack_dollars), 1.0))
