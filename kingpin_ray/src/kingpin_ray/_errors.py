"""Every error this package raises on purpose: what it got, what is allowed, what to do."""


class KingpinError(Exception):
    """Base of every error of this package."""


class InputError(KingpinError, ValueError):
    """The data cannot be used as it is."""


class MissingColumnError(InputError):
    """A column that `by`, `target` or `features` names is not in the data."""


class UnsupportedColumnError(InputError):
    """A column has a type that cannot be a key, a target or a numeric feature."""


class MixedTypesError(InputError):
    """A column holds values of several types, in one file or across files."""


class EmptyDataError(InputError):
    """There is no row left to train on."""


class ParameterError(KingpinError, ValueError):
    """A parameter has a value that is not allowed."""


class UnknownModelError(ParameterError):
    """No model of that name is installed."""


class UnknownScoringError(ParameterError):
    """No scoring of that name exists for this kind of model."""


class BadGroupError(KingpinError, ValueError):
    """A group could not be trained, and `on_bad="raise"` was asked for."""


class UnknownGroupError(KingpinError, LookupError):
    """Rows to predict belong to groups that have no model and no fallback."""


class ResourceError(KingpinError, RuntimeError):
    """The cluster is too small for what was asked, or a part of it stays away."""


class StoreError(KingpinError, RuntimeError):
    """A store of models cannot be written, read or resumed."""


class MissingDependencyError(KingpinError, ImportError):
    """An optional library that this feature needs is not installed."""
