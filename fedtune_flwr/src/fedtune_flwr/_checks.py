"""Checks of arguments, so that a mistake is named where it is made."""

import math
from typing import Any

import numpy as np

from ._errors import ConfigError, FedTuneError


def check_whole(
    name: str, value: Any, low: int, error: type[FedTuneError] = ConfigError, advice: str = ""
) -> None:
    """Refuses what is not a whole number of `low` or more.

    Raises:
        FedTuneError: of the type `error`.
    """
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < low:
        raise error(f"{name}={value!r} must be a whole number of at least {low}{advice}")


def check_number(name: str, value: Any) -> None:
    """Refuses what is not a number, or is NaN.

    Raises:
        ConfigError: it is.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.number)
        or math.isnan(value)
    ):
        raise ConfigError(f"{name}={value!r} must be a number")


def check_bool(name: str, value: Any) -> None:
    """Refuses what is not True or False.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name}={value!r} must be True or False")
