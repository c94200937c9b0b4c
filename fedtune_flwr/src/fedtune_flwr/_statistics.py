"""Whether a difference is real."""

import math

import numpy as np

from ._report import Gain


def judge(difference_E: np.ndarray, least: float, confidence: float) -> Gain:
    """What a paired difference says: kept if it is probably above `least`.

    Args:
        difference_E: score with customization less score without, one a pair; two at least.
        least: what must be gained.
        confidence: with at least this probability.
    """
    mean = float(difference_E.mean())
    error = float(difference_E.std(ddof=1) / math.sqrt(len(difference_E)))
    probability = student_above(mean - least, error, len(difference_E) - 1)
    kept = mean > least and probability >= confidence
    return Gain(mean, error, probability, len(difference_E), kept)


def student_above(mean: float, error: float, freedom: int) -> float:
    """The probability that a mean is above 0, by Student's t with `freedom` degrees."""
    if error <= 0:
        return 1.0 if mean > 0 else 0.0
    t = mean / error
    # Simpson's rule on the density: no need for a statistics library for one number.
    x = np.linspace(0.0, abs(t), 2001)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    density = scale / math.sqrt(freedom * math.pi) * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    weights = np.ones_like(x)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    area = float((weights * density).sum() * (x[1] - x[0]) / 3)
    return min(1.0, max(0.0, 0.5 + math.copysign(area, t)))
