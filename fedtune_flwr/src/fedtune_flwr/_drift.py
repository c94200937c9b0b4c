"""Noticing that clients are no longer what they reported, from what they send anyway."""

from collections.abc import Mapping, Sequence

import numpy as np

from ._metrics import NAMES, as_matrix

# A client whose number of examples changes by this factor is asked anew.
SIZE_FACTOR = 2.0
# Two-sample Kolmogorov-Smirnov test at a level of about 1 %.
_KS_LEVEL = 1.63


def grown_or_shrunk(before: float, now: float) -> bool:
    """Whether a client has at least twice or at most half the examples it had."""
    if before <= 0 or now <= 0:
        return before != now
    return not 1 / SIZE_FACTOR < now / before < SIZE_FACTOR


def moved(before: Sequence[Mapping[str, float]], now: Sequence[Mapping[str, float]]) -> list[str]:
    """The metrics whose distribution over the clients has changed (Kolmogorov-Smirnov).

    Args:
        before: what clients had reported when the policy was tuned.
        now: what they report.
    """
    names = []
    pairs = zip(NAMES, as_matrix(before).T, as_matrix(now).T, strict=True)
    for name, old, new in pairs:
        old, new = np.sort(old[np.isfinite(old)]), np.sort(new[np.isfinite(new)])
        if not len(old) or not len(new):
            continue
        at = np.concatenate([old, new])
        below = [np.searchsorted(part, at, side="right") / len(part) for part in (old, new)]
        distance = float(np.abs(below[0] - below[1]).max())
        if distance > _KS_LEVEL * np.sqrt((len(old) + len(new)) / (len(old) * len(new))):
            names.append(name)
    return names
