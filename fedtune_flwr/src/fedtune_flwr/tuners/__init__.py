"""Tuners: what proposes the next settings to try, found by name.

Built in: `bayes`, `random`, `sobol`. A distribution adds one with an entry point in the group
`fedtune_flwr.tuners` whose object is called as `factory(dimensions, seed)` and returns a `Tuner`.
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

import numpy as np

from .._errors import UnknownTunerError

GROUP = "fedtune_flwr.tuners"


@runtime_checkable
class Tuner(Protocol):
    """Proposes points of the unit cube and learns from their scores."""

    def ask(self, count: int, fixed: Mapping[int, float] | None = None) -> np.ndarray:
        """Points to try, float64 of shape (count, dimensions), each in [0, 1].

        Args:
            count: how many.
            fixed: columns that must hold the given value.
        """
        ...

    def tell(self, points: np.ndarray, scores: np.ndarray, fidelity: np.ndarray) -> None:
        """Takes the scores of points that were tried.

        Args:
            points: shape (n, dimensions).
            scores: shape (n,), higher is better, finite.
            fidelity: shape (n,), share of the rounds that were run, in (0, 1].
        """
        ...


TunerFactory = Callable[[int, int], Tuner]


def available() -> tuple[str, ...]:
    """Names of the installed tuners, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def get(name: str) -> TunerFactory:
    """The factory of a tuner.

    Raises:
        UnknownTunerError: no installed tuner has that name.
    """
    for point in entry_points(group=GROUP):
        if point.name == name:
            factory: TunerFactory = point.load()
            return factory
    raise UnknownTunerError(name, available())


__all__ = ["Tuner", "TunerFactory", "available", "get"]
