"""Checks of single arguments, each with a message that says what to give instead."""

import math
from numbers import Integral, Real

from ._errors import InvalidInput


def positive(
    name: str, value: object, error: type[InvalidInput] = InvalidInput, unit: str = ""
) -> float:
    """Returns `value` as a finite float above zero.

    Raises:
        InvalidInput: `value` is no number, not finite, or not above zero (or the `error` given).
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(f"{name} must be a number above 0{unit}, got {value!r}")
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise error(f"{name} must be finite and above 0{unit}, got {value!r}")
    return number


def positive_int(name: str, value: object, error: type[InvalidInput] = InvalidInput) -> int:
    """Returns `value` as an int of at least one.

    Raises:
        InvalidInput: `value` is not a whole number or is below one (or the `error` given).
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{name} must be a whole number of at least 1, got {value!r}")
    if int(value) < 1:
        raise error(f"{name} must be at least 1, got {value!r}")
    return int(value)
