"""Every error this package raises on purpose.

MLCDError
├── InvalidInput            an argument, a file or a cell is not allowed (also a ValueError)
│   ├── CatalogError        an instance type or a catalogue file
│   ├── TraceError          a table of measured runs
│   └── UnknownName         a strategy or a profiler nobody registered (also a LookupError)
├── NothingObserved         no trial has succeeded, so none can be recommended (RuntimeError)
├── NoFeasibleDeployment    no candidate keeps the limit; carries the nearest miss (RuntimeError)
├── ProfilingFailed         trials keep failing; carries them (RuntimeError)
├── StoreError              a store cannot be read or written (RuntimeError)
│   └── CatalogChanged      the catalogue is not the one the store was begun with
└── MissingExtra            an optional dependency is not installed (also an ImportError)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._recommendation import Recommendation
    from ._trial import Trial


class MLCDError(Exception):
    """Base of every error of this package."""


class InvalidInput(MLCDError, ValueError):
    """An argument is not allowed; the message names it, what it got and what to give."""


class CatalogError(InvalidInput):
    """An instance type or a catalogue file is not usable."""


class TraceError(InvalidInput):
    """A table of measured runs lacks a column or holds an unusable cell."""


class UnknownName(InvalidInput, LookupError):
    """No strategy or profiler of this name; the message lists those there are."""


class NothingObserved(MLCDError, RuntimeError):
    """No trial has given a speed yet, so nothing can be recommended."""


class NoFeasibleDeployment(MLCDError, RuntimeError):
    """No deployment is likely to keep the limit with what is left of it.

    Attributes:
        nearest: the recommendation that misses the limit by the least, or None if no trial
            gave a speed.
    """

    def __init__(self, message: str, nearest: "Recommendation | None" = None) -> None:
        super().__init__(message)
        self.nearest = nearest


class ProfilingFailed(MLCDError, RuntimeError):
    """Trials failed in a way that more trials will not cure.

    Attributes:
        trials: every trial told so far, failed ones included; what they cost is in them.
    """

    def __init__(self, message: str, trials: "Sequence[Trial]" = ()) -> None:
        super().__init__(message)
        self.trials = tuple(trials)


class StoreError(MLCDError, RuntimeError):
    """A store cannot be read or written, or belongs to another search."""


class CatalogChanged(StoreError):
    """The catalogue differs from the one the store was begun with."""


class MissingExtra(MLCDError, ImportError):
    """An optional dependency is not installed; the message says how to install it."""
