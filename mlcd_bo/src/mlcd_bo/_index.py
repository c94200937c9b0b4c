"""The Gittins index of a deployment whose outcome is lognormal.

Pandora's box (M. L. Weitzman 1979; as an acquisition function: arXiv 2406.20062): paying `cost`
reveals a value f, and the smallest revealed value may be kept. The index of a box is the g at
which opening it is just worth its cost, ``E[(g - f)+] = cost``. Opening boxes by rising index and
stopping once the best value in hand is no larger than every index is optimal for independent
boxes. Here f (the final run) and cost (the trial) are in one unit, so nothing is left to tune.
"""

import numpy as np

from ._normal import normal_cdf
from ._prior import Array


def expected_shortfall(level: Array, mean: Array, sd: Array) -> Array:
    """Returns ``E[(level - f)+]`` for ``log f ~ N(mean, sd**2)``, elementwise.

    Args:
        level: above zero.
        mean: mean of log f.
        sd: standard deviation of log f, above zero.
    """
    z = (np.log(level) - mean) / sd
    return np.asarray(level * normal_cdf(z) - np.exp(mean + 0.5 * sd**2) * normal_cdf(z - sd))


def gittins_index(mean: Array, sd: Array, cost: Array, most: Array | float = np.inf) -> Array:
    """Returns the g with ``E[(g - f)+; f <= most] = cost`` for ``log f ~ N(mean, sd**2)``.

    An outcome above `most` is of no use, as it breaks a limit; where the index is below `most`
    that makes no difference.

    Args:
        mean: mean of log f.
        sd: standard deviation of log f, above zero.
        cost: what revealing f costs, above zero, in the unit of f; infinity gives infinity.
        most: largest useful f; zero or less gives infinity.
    """
    mean, sd, cost, most = np.broadcast_arrays(mean, sd, cost, most)
    # In units of the median of f; E[(g - f)+] >= g - E f bounds g from above.
    cost_u = np.asarray(cost / np.exp(mean), dtype=np.float64)
    finite = np.isfinite(cost_u)
    safe = np.where(finite, cost_u, 1.0)
    high = np.log(safe + np.exp(0.5 * sd**2))
    # E[(g - f)+] <= g, and below exp(-40 sd) the probability of f < g is zero in double precision.
    low = np.maximum(np.log(safe), -40.0 * sd)
    zero = np.zeros_like(low)
    for _ in range(52):
        middle = 0.5 * (low + high)
        below = expected_shortfall(np.exp(middle), zero, sd) < safe
        low = np.where(below, middle, low)
        high = np.where(below, high, middle)
    level = np.exp(0.5 * (low + high))
    if not np.isinf(most).all():
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            z = (np.log(np.maximum(most, 0.0)) - mean) / sd
            useful = normal_cdf(z)
            # Above `most` the left side grows linearly: g P(f <= most) - E[f; f <= most].
            beyond = (safe + np.exp(0.5 * sd**2) * normal_cdf(z - sd)) / useful
        level = np.where(np.exp(mean) * level <= most, level, beyond)
        finite &= (most > 0) & (useful > 1e-12)
    return np.where(finite, np.exp(mean) * np.where(finite, level, 1.0), np.inf)
