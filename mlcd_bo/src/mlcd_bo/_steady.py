"""When a measured speed is steady: warm-up cut off, then a confidence interval from batch means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._errors import InvalidInput

_BATCHES = 10
_FEWEST = 5
# Beyond this correlation of neighbouring batches the window is too short to say anything.
_MOST_CORRELATION = 0.8


@dataclass(frozen=True)
class Speed:
    """A speed with its uncertainty.

    Attributes:
        value: work per second over the window.
        sem: standard error of `value`.
        half_width: half of the 95 % confidence interval, as a part of `value`; infinite while
            there are too few steps.
        steps: steps in the window.
        discarded: steps cut off before it as warm-up.
    """

    value: float
    sem: float
    half_width: float
    steps: int
    discarded: int


def steady_speed(
    times: Sequence[float] | NDArray[np.float64],
    work: Sequence[float] | NDArray[np.float64],
    warmup_steps: int = 2,
) -> Speed | None:
    """Returns the steady speed of a run from its step times, or None while there are too few.

    The first `warmup_steps` steps are dropped, then as many more (at most half) as make the
    standard error of what is left smallest (the MSER rule of simulation output analysis,
    K. P. White 1997). Steps that follow each other are correlated, so the error comes from the
    means of ten batches of consecutive steps. A speed that drifts leaves the batches correlated,
    too: the error is widened by their own correlation r, by ``sqrt((1 + r) / (1 - r))``, which is
    exact for a first-order autoregression, and Student's t counts that many fewer batches.

    Args:
        times: end of each step in seconds, rising.
        work: work of each step (samples, or ones), same length.
        warmup_steps: steps that are never counted; the first step's end only starts the clock.

    Raises:
        InvalidInput: lengths differ, a value is not finite, work is negative, or time runs
            backwards.
    """
    t = np.asarray(times, dtype=np.float64)
    w = np.asarray(work, dtype=np.float64)
    if t.ndim != 1 or t.shape != w.shape:
        raise InvalidInput(
            f"times and work must be of one length, got shapes {t.shape} and {w.shape}"
        )
    if not (np.isfinite(t).all() and np.isfinite(w).all()):
        raise InvalidInput("times and work must be finite; a step reported NaN or infinity")
    if (w < 0).any():
        raise InvalidInput(f"work must not be negative, got {w.min():g} samples in a step")
    gaps = np.diff(t)
    if (gaps < 0).any():
        at = int(np.argmax(gaps < 0)) + 1
        raise InvalidInput(
            f"times run backwards at step {at + 1} (by {-gaps[at - 1]:.3g} s); report times of a "
            "monotonic clock"
        )
    skip = max(int(warmup_steps), 1)
    gaps, w = gaps[skip - 1 :], w[skip:]
    if len(gaps) < _FEWEST:
        return None
    cut = _warmup(gaps, w)
    kept_gaps, kept_work = gaps[cut:], w[cut:]
    seconds, total = float(kept_gaps.sum()), float(kept_work.sum())
    if seconds <= 0 or total <= 0:
        return None
    value = total / seconds
    sem, freedom = _batch_error(kept_gaps, kept_work, value)
    # Here: a training script that only reports its steps need not load SciPy.
    from scipy.special import stdtrit

    quantile = float(stdtrit(freedom, 0.975))
    return Speed(value, sem, quantile * sem / value, len(kept_gaps), skip + cut)


def _batch_error(
    gaps: NDArray[np.float64], work: NDArray[np.float64], value: float
) -> tuple[float, float]:
    """Returns the standard error of total work / total time and its degrees of freedom."""
    batches = min(_BATCHES, len(gaps))
    edges = np.linspace(0, len(gaps), batches + 1).astype(int)[:-1]
    seconds = np.add.reduceat(gaps, edges)
    done = np.add.reduceat(work, edges)
    # Ratio estimator: residuals of work against what the mean speed would have done.
    residual = done - value * seconds
    spread = math.sqrt(float((residual**2).sum()) / (batches - 1))
    correlation = _correlation(residual)
    widening = (1 + correlation) / (1 - correlation)
    error = spread * math.sqrt(batches * widening) / float(seconds.sum())
    return error, max((batches - 1) / widening, 1.0)


def _correlation(residual: NDArray[np.float64]) -> float:
    """Returns the correlation of neighbouring batches, zero at least, its bias taken out."""
    total = float((residual**2).sum())
    if total <= 0:
        return 0.0
    raw = float((residual[1:] * residual[:-1]).sum()) / total
    # M. G. Kendall 1954: with n values the estimate is too low by about (1 + 3 r) / n.
    unbiased = raw + (1 + 3 * raw) / len(residual)
    return min(max(unbiased, 0.0), _MOST_CORRELATION)


def _warmup(gaps: NDArray[np.float64], work: NDArray[np.float64]) -> int:
    """Returns how many further steps to drop: the cut of least standard error (MSER)."""
    pace = gaps / np.maximum(work, 1e-300) if (work > 0).all() else gaps
    n = len(pace)
    most = n // 2
    # Tail means and variances for every cut at once.
    tail = np.cumsum(pace[::-1])[::-1]
    square = np.cumsum((pace**2)[::-1])[::-1]
    left = np.arange(n, 0, -1)
    variance = np.maximum(square / left - (tail / left) ** 2, 0.0)
    score = variance[: most + 1] / left[: most + 1]
    return int(np.argmin(score))
