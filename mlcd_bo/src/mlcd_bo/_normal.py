"""The standard normal distribution function, without loading SciPy before it is needed."""

from ._prior import Array


def normal_cdf(z: Array) -> Array:
    """Returns the probability that a standard normal variable is at most `z`, elementwise."""
    # A rank of a training script imports this package for `step` alone: SciPy would cost it
    # 0.2 s of start-up, which every trial pays.
    from scipy.special import ndtr

    return ndtr(z)  # type: ignore[no-any-return]
