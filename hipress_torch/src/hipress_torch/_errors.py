"""The errors this package raises, as a tree.

::

    HiPressError
    |-- CodecError (ValueError)            a codec's definition or options are wrong
    |   `-- UnknownCodecError              no codec of that name is installed
    |-- RegistrationError (ValueError)     the module or the state cannot take the hook
    |-- UnsupportedError (ValueError)      this dtype, device or backend is not handled
    |-- ConformanceError (AssertionError)  a codec fails a check of the conformance suite
    |-- PlanError (ValueError)             a plan, profile or strategy is wrong
    |-- StateError (ValueError)            a state dict does not fit
    |-- FileError (OSError)                a file cannot be written
    |-- MismatchError (RuntimeError)       ranks were started with different settings
    |-- WireError (RuntimeError)           a received message is not the one expected
    `-- PeerError (RuntimeError)           another rank could not be reached
        `-- PeerTimeoutError (TimeoutError)  another rank did not answer in time
"""


class HiPressError(Exception):
    """Base of every error raised on purpose by this package."""


class CodecError(HiPressError, ValueError):
    """A codec's definition or its options are wrong."""


class UnknownCodecError(CodecError):
    """No codec of that name is installed."""


class RegistrationError(HiPressError, ValueError):
    """The module or the state cannot take the hook."""


class UnsupportedError(HiPressError, ValueError):
    """This dtype, device or communication backend is not handled."""


class ConformanceError(HiPressError, AssertionError):
    """A codec fails a check of the conformance suite."""


class PlanError(HiPressError, ValueError):
    """A plan, profile or strategy is wrong."""


class StateError(HiPressError, ValueError):
    """A state dict does not fit this model or this codec."""


class FileError(HiPressError, OSError):
    """A file cannot be written."""


class MismatchError(HiPressError, RuntimeError):
    """Ranks were started with settings that differ."""


class WireError(HiPressError, RuntimeError):
    """A received message is not the one that was expected."""


class PeerError(HiPressError, RuntimeError):
    """Another rank failed or could not be reached."""


class PeerTimeoutError(PeerError, TimeoutError):
    """Another rank did not answer within the timeout."""
