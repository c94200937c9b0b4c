"""Puts a decision into figures and into two sentences."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ._ledger import Ledger
from ._recommendation import Estimate
from ._situation import Situation
from ._space import Deployment

Z95 = 1.959964


def estimate_of(s: Situation, row: int, deployment: Deployment) -> Estimate:
    """Returns what the final run on one deployment is expected to take."""
    mean, sd, rate = float(s.mean[row]), float(s.sd[row]), float(s.rate[row])
    hours = float(np.exp(mean + 0.5 * sd**2))
    low, high = float(np.exp(mean - Z95 * sd)), float(np.exp(mean + Z95 * sd))
    chance = float(s.feasible(s.most_hours())[row]) if s.limited else 1.0
    return Estimate(
        deployment=deployment,
        hours=hours,
        hours_interval=(low, high),
        dollars=hours * rate,
        dollars_interval=(low * rate, high * rate),
        within_limit=chance,
        measured=bool(s.observed[row]),
    )


def nothing_left(estimate: Estimate, ledger: Ledger) -> Estimate:
    """Returns the estimate of a final run of which the trials have done everything."""
    kept = ledger.hours_left >= 0 and ledger.dollars_left >= 0
    none = (0.0, 0.0)
    return replace(
        estimate,
        hours=0.0,
        hours_interval=none,
        dollars=0.0,
        dollars_interval=none,
        within_limit=float(kept),
    )


def reason_for(
    s: Situation, chosen: Estimate, alternatives: Sequence[Estimate], stopped: str
) -> str:
    """Returns two sentences: why this deployment, and why the search stops."""
    known = "measured" if chosen.measured else "predicted, not measured"
    if chosen.hours == 0.0:
        return (
            f"Nothing is left to run: {stopped or 'the trials have trained the whole job'}. "
            f"{chosen.deployment} would be the one to train more."
        )
    amount = _amount(s, chosen)
    first = f"{chosen.deployment} is {known} at {amount}"
    if alternatives:
        other = alternatives[0]
        how = "measured" if other.measured else "predicted"
        first += f"; the next best, {other.deployment}, is {how} at {_amount(s, other)}"
        if s.limited and other.within_limit < 0.5 <= chosen.within_limit:
            first += " and would break the limit"
    second = f"The search stops because {stopped}" if stopped else "The search may still go on"
    return f"{first}. {second}."


def _amount(s: Situation, estimate: Estimate) -> str:
    if s.objective == "time":
        return f"{estimate.hours:.3g} h for ${estimate.dollars:.3g}"
    return f"${estimate.dollars:.3g} in {estimate.hours:.3g} h"
