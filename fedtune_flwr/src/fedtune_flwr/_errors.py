"""The errors of the plugin, as a tree.

```
FedTuneError
├── SpaceError          (ValueError)    a search space or a value outside it
├── MetricsError        (ValueError)    a profile that cannot be computed or read
├── ProxyError          (ValueError)    proxy data or functions that cannot emulate anything
├── ConfigError         (ValueError)    an argument of the wrapper or of the client
├── TunerError          (RuntimeError)  a tuner that failed or broke its contract
├── UnknownTunerError   (LookupError)   no tuner of that name is installed
└── StateError          (RuntimeError)  a state folder that cannot be used for this run
```
"""


class FedTuneError(Exception):
    """Base of every error that the plugin raises."""


class SpaceError(FedTuneError, ValueError):
    """A search space, or a value given for one, is not valid."""


class MetricsError(FedTuneError, ValueError):
    """Heterogeneity metrics cannot be computed from, or read out of, what was given."""


class ProxyError(FedTuneError, ValueError):
    """The proxy task cannot stand in for the federation."""


class ConfigError(FedTuneError, ValueError):
    """An argument of the strategy wrapper or of a client helper is not valid."""


class TunerError(FedTuneError, RuntimeError):
    """A tuner raised, or returned points that are not in the unit cube."""


class UnknownTunerError(FedTuneError, LookupError):
    """No installed tuner has that name."""

    def __init__(self, name: str, available: tuple[str, ...]) -> None:
        self.name = name
        self.available = available
        super().__init__(
            f"tuner={name!r} is not installed; available: {', '.join(available)}. "
            "A distribution adds one through the entry-point group 'fedtune_flwr.tuners'."
        )


class StateError(FedTuneError, RuntimeError):
    """A state folder is damaged, or was written for another search space."""
