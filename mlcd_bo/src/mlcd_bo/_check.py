"""Checks of single arguments, each with a message that says what to give instead."""

import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from os import PathLike
from pathlib import Path

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
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise error(f"{name} must be finite and above 0{unit}, got {value!r}")
    return number


def real(name: str, value: object) -> float:
    """Returns `value` as a float: of NumPy and one-element tensors too, which JSON cannot hold.

    Raises:
        InvalidInput: `value` is no number.
    """
    if not isinstance(value, bool | str | bytes):
        try:
            return float(value)  # type: ignore[arg-type]  # what is no number raises
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise InvalidInput(f"{name} must be a number, got {value!r}")


def at_least_zero(name: str, value: object) -> float:
    """Returns `value` as a finite float of zero or more.

    Raises:
        InvalidInput: `value` is no number, not finite, or below zero.
    """
    number = real(name, value)
    if not math.isfinite(number) or number < 0:
        raise InvalidInput(f"{name} must be finite and at least 0, got {value!r}")
    return number


def whole(name: str, value: object) -> int:
    """Returns `value` as an int of zero or more.

    Raises:
        InvalidInput: `value` is not a whole number, or is below zero.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
        raise InvalidInput(f"{name} must be a whole number of at least 0, got {value!r}")
    return int(value)


def words(name: str, value: object) -> tuple[str, ...]:
    """Returns command-line arguments as strings.

    Raises:
        InvalidInput: `value` is one string, which is no list of arguments, or holds what is
            neither text, a path nor a number.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidInput(
            f"{name} must be a list of arguments, got {value!r}; give ['--lr', '0.1'], or "
            "shlex.split(text)"
        )
    found = []
    for word in value:
        if isinstance(word, bool) or not isinstance(word, str | PathLike | Real):
            raise InvalidInput(f"{name} must hold strings, got {word!r}; write it as a string")
        found.append(os.fsdecode(word) if isinstance(word, PathLike) else str(word))
    return tuple(found)


def script_of(value: object) -> Path:
    """Returns the path of a script that is there.

    Raises:
        InvalidInput: `value` is no path, or no file is there.
    """
    if not isinstance(value, str | PathLike) or not Path(value).is_file():
        raise InvalidInput(f"script {value!r} is not a file; give the path of a script")
    return Path(value)


def variables(value: object) -> dict[str, str]:
    """Returns environment variables, numbers as strings.

    Raises:
        InvalidInput: `value` is no mapping of strings to strings or numbers.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidInput(f"env must map names to values, got {value!r}")
    return dict(zip(words("env", value.keys()), words("env", value.values()), strict=True))


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
