"""Every error this package raises on purpose, in one tree.

BiFeatError
├── SpecError            a quantizer's argument is not allowed, or its name is unknown  (ValueError)
├── FeatureError         the features cannot be quantized as they are                   (ValueError)
│   └── NonFiniteError   they hold NaN or infinity
├── RowIndexError        a row index outside the table, or of a wrong kind              (IndexError)
├── UnknownAttrError     no such node type or attribute                                 (KeyError)
├── LoaderError          a loader or graph cannot be used this way                      (ValueError)
│   └── NotAGraphError   a loader asked a feature store for its graph               (AttributeError)
├── StorageError         a file could not be written or must not be overwritten         (OSError)
└── FormatError          what lies on disk is not a store of ours                       (ValueError)
    ├── ChecksumError    its bytes differ from what was written
    └── VersionError     it was written by another version of the format

Each is also the builtin in brackets, so that callers who never heard of this package still catch
it.
"""


class BiFeatError(Exception):
    """Base of all errors raised by this package."""


class SpecError(BiFeatError, ValueError):
    """A quantizer's argument is not allowed, or no quantizer has this name."""


class FeatureError(BiFeatError, ValueError):
    """Features cannot be quantized as they are: kind, shape or range."""


class NonFiniteError(FeatureError):
    """Features hold NaN or infinite values.

    Attributes:
        count: how many values are not finite.
        row: row of the first one.
        column: column of the first one.
    """

    def __init__(self, count: int, row: int, column: int, name: str = "x") -> None:
        super().__init__(
            f"{name} holds {count} value(s) that are NaN or infinite (as float32), the first in "
            f"row {row}, column {column}. Clean the features, or pass nan='zero' to store zeros "
            f"there."
        )
        self.count = count
        self.row = row
        self.column = column


class RowIndexError(BiFeatError, IndexError):
    """A row index is outside the table or not of an allowed kind."""


class UnknownAttrError(BiFeatError, KeyError):
    """There is no such node type or attribute."""

    def __str__(self) -> str:
        # KeyError would print the message as a quoted literal.
        return str(self.args[0]) if self.args else ""


class LoaderError(BiFeatError, ValueError):
    """A loader, batch or graph cannot be used this way."""


class NotAGraphError(LoaderError, AttributeError):
    """A loader that takes a graph was given a feature store."""


class StorageError(BiFeatError, OSError):
    """A file could not be written, or must not be overwritten."""


class FormatError(BiFeatError, ValueError):
    """What lies on disk is not a store of this package, or is incomplete."""


class ChecksumError(FormatError):
    """Bytes on disk differ from what was written."""


class VersionError(FormatError):
    """The store was written by another version of the format."""
