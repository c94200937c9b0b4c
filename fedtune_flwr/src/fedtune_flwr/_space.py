"""The hyperparameters that may vary, each with its range and the scale it is searched on.

A dimension maps a value to a *coordinate* (the natural logarithm for `Log` and for `Int` from 1
up, the value itself for `Linear`, the position for `Choice`). Policies are linear in coordinates,
so a slope on a `Log` dimension multiplies the value.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from ._errors import SpaceError
from ._metrics import NAMES

# What Flower itself, or this plugin, writes into the same ConfigRecord.
RESERVED = frozenset({"server-round", "fedtune", "fedtune-profile", "fedtune-reference"})

Scalar = bool | int | float | str


@runtime_checkable
class Dimension(Protocol):
    """One hyperparameter: its range, its coordinate and which metrics may steer it."""

    kind: ClassVar[str]

    @property
    def by(self) -> tuple[str, ...] | None:
        """Metrics that may move it per client; None takes the defaults of its name."""
        ...

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest coordinate."""
        ...

    def coordinate(self, value: Scalar) -> float:
        """The coordinate of a value of this dimension."""
        ...

    def value(self, coordinate: float) -> Scalar:
        """The value nearest to a coordinate, always inside the range."""
        ...


def _clip(coordinate: float, bounds: tuple[float, float]) -> float:
    return min(max(coordinate, bounds[0]), bounds[1])


def _number(name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            if math.isfinite(value):
                return float(value)
        except OverflowError:  # a whole number beyond any float
            raise SpaceError(f"{name} must be below 1.8e308") from None
    raise SpaceError(f"{name}={value!r} must be a finite number")


def _check_by(dimension: "Log | Linear | Int") -> None:
    by = dimension.by
    if by is None:
        return
    allowed = f"allowed: a tuple of {', '.join(NAMES)}"
    if isinstance(by, str) or not isinstance(by, Iterable):
        raise SpaceError(f"by={by!r} of {dimension.kind} must be a tuple; {allowed}")
    names = tuple(by)
    wrong = [name for name in names if name not in NAMES]
    if wrong:
        raise SpaceError(f"by={names!r}: {wrong[0]!r} is no metric; {allowed}")
    object.__setattr__(dimension, "by", names)


def _check_range(kind: str, low: Any, high: Any, lowest: float | None) -> None:
    low_number, high_number = _number(f"{kind}.low", low), _number(f"{kind}.high", high)
    if lowest is not None and low_number < lowest:
        raise SpaceError(f"{kind}.low={low!r} must be at least {lowest:g}")
    if low_number >= high_number:
        raise SpaceError(f"{kind}(low={low!r}, high={high!r}): low must be below high")


def _inside(dimension: "Log | Linear | Int", value: Scalar) -> float:
    number = _number(type(dimension).__name__, value)
    if not dimension.low <= number <= dimension.high:
        raise SpaceError(
            f"value {value!r} is outside [{dimension.low}, {dimension.high}] of {dimension}"
        )
    return number


@dataclass(frozen=True)
class Log:
    """A positive real number, searched on a logarithmic scale.

    Attributes:
        low: smallest value, above 0.
        high: largest value.
        by: names of the metrics that may move it per client; None takes the defaults for
            hyperparameters this plugin knows by name (`lr`), nothing for others.

    Raises:
        SpaceError: a bound is not finite, not above 0, low is not below high, or `by` names what
            is no metric.
    """

    low: float
    high: float
    by: tuple[str, ...] | None = None
    kind: ClassVar[str] = "log"

    def __post_init__(self) -> None:
        if _number("Log.low", self.low) <= 0:
            raise SpaceError(
                f"Log.low={self.low!r} must be above 0; Linear allows a range that includes 0"
            )
        _check_range("Log", self.low, self.high, None)
        _check_by(self)

    @property
    def bounds(self) -> tuple[float, float]:
        """Natural logarithms of `low` and `high`."""
        return math.log(self.low), math.log(self.high)

    def coordinate(self, value: Scalar) -> float:
        """The natural logarithm of `value`.

        Raises:
            SpaceError: the value is outside the range.
        """
        return math.log(_inside(self, value))

    def value(self, coordinate: float) -> float:
        """The number at a coordinate, clipped to the range."""
        low, high = self.bounds
        if coordinate <= low:
            return float(self.low)
        return float(self.high) if coordinate >= high else math.exp(coordinate)


@dataclass(frozen=True)
class Linear:
    """A real number, searched on a linear scale; may include 0.

    Attributes:
        low: smallest value.
        high: largest value.
        by: names of the metrics that may move it per client; None means none.

    Raises:
        SpaceError: a bound is not finite, low is not below high, or `by` names what is no metric.
    """

    low: float
    high: float
    by: tuple[str, ...] | None = None
    kind: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        _check_range("Linear", self.low, self.high, None)
        _check_by(self)

    @property
    def bounds(self) -> tuple[float, float]:
        """`low` and `high`."""
        return float(self.low), float(self.high)

    def coordinate(self, value: Scalar) -> float:
        """The value itself.

        Raises:
            SpaceError: the value is outside the range.
        """
        return _inside(self, value)

    def value(self, coordinate: float) -> float:
        """The number at a coordinate, clipped to the range."""
        return _clip(coordinate, self.bounds)


@dataclass(frozen=True)
class Int:
    """A whole number from `low` to `high`, both included.

    Searched on a logarithmic scale when `low` is at least 1, on a linear one from 0.

    Attributes:
        low: smallest value, 0 or more.
        high: largest value.
        by: names of the metrics that may move it per client; None takes the defaults for
            `local-epochs` and `local-steps`, nothing for others.

    Raises:
        SpaceError: a bound is not a whole number, is negative, low is not below high, or `by`
            names what is no metric.
    """

    low: int
    high: int
    by: tuple[str, ...] | None = None
    kind: ClassVar[str] = "int"

    def __post_init__(self) -> None:
        for name, bound in (("low", self.low), ("high", self.high)):
            if isinstance(bound, bool) or not isinstance(bound, int):
                raise SpaceError(f"Int.{name}={bound!r} must be a whole number")
            if bound >= 2**63:
                raise SpaceError(f"Int.{name} must be below 2**63, which a message can carry")
        _check_range("Int", self.low, self.high, 0)
        _check_by(self)

    @property
    def bounds(self) -> tuple[float, float]:
        """Coordinates of `low` and `high`."""
        if self.low >= 1:
            return math.log(self.low), math.log(self.high)
        return float(self.low), float(self.high)

    def coordinate(self, value: Scalar) -> float:
        """The logarithm of `value`, or `value` itself where the range starts at 0.

        Raises:
            SpaceError: the value is outside the range.
        """
        number = _inside(self, value)
        return math.log(number) if self.low >= 1 else number

    def value(self, coordinate: float) -> int:
        """The nearest whole number, inside the range."""
        clipped = _clip(coordinate, self.bounds)
        number = math.exp(clipped) if self.low >= 1 else clipped
        return min(max(round(number), self.low), self.high)


@dataclass(frozen=True, init=False)
class Choice:
    """One of several values, the same for every client.

    Attributes:
        options: the allowed values, at least two, all different.

    Raises:
        SpaceError: fewer than two options, a repeated one, or one that a ConfigRecord cannot hold.
    """

    options: tuple[Scalar, ...]
    by: tuple[str, ...] | None = None
    kind: ClassVar[str] = "choice"

    def __init__(self, *options: Scalar) -> None:
        for option in options:
            if not isinstance(option, bool | int | float | str):
                raise SpaceError(
                    f"option {option!r} of Choice is a {type(option).__name__}; "
                    "bool, int, float and str can be sent to a client"
                )
        if len(options) < 2 or len(set(options)) != len(options):
            raise SpaceError(f"Choice{options!r} needs at least two different options")
        object.__setattr__(self, "options", tuple(options))
        # Options have no order, so no metric can move a client along them.
        object.__setattr__(self, "by", ())

    @property
    def bounds(self) -> tuple[float, float]:
        """First and last position."""
        return 0.0, float(len(self.options) - 1)

    def coordinate(self, value: Scalar) -> float:
        """The position of `value` among the options.

        Raises:
            SpaceError: the value is not one of the options.
        """
        if value not in self.options:
            raise SpaceError(f"{value!r} is not one of {self.options!r}")
        return float(self.options.index(value))

    def value(self, coordinate: float) -> Scalar:
        """The option nearest to a position."""
        return self.options[round(_clip(coordinate, self.bounds))]


_KINDS: dict[str, type[Any]] = {cls.kind: cls for cls in (Log, Linear, Int, Choice)}


class SearchSpace(Mapping[str, Dimension]):
    """The hyperparameters to tune, under the keys that clients read in their config.

    Example:
        >>> space = SearchSpace(lr=Log(1e-3, 1.0), **{"local-epochs": Int(1, 8)})
        >>> list(space)
        ['lr', 'local-epochs']

    Raises:
        SpaceError: no dimension, a reserved or empty name, or something that is no dimension.
    """

    def __init__(self, **dimensions: Dimension) -> None:
        if not dimensions:
            raise SpaceError("SearchSpace() is empty; give at least one, as lr=Log(1e-3, 1.0)")
        for name, dimension in dimensions.items():
            if not name or name in RESERVED:
                raise SpaceError(f"name {name!r} is reserved; choose another key")
            if not isinstance(dimension, Log | Linear | Int | Choice):
                raise SpaceError(
                    f"{name}={dimension!r} must be a Log, Linear, Int or Choice, "
                    f"as {name}=Log(1e-3, 1.0)"
                )
        self._dimensions: dict[str, Dimension] = dict(dimensions)

    def __getitem__(self, name: str) -> Dimension:
        return self._dimensions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dimensions)

    def __len__(self) -> int:
        return len(self._dimensions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SearchSpace) and self._dimensions == other._dimensions

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={dimension!r}" for name, dimension in self.items())
        return f"SearchSpace({inner})"

    def coordinates(self, values: Mapping[str, Scalar]) -> dict[str, float]:
        """The coordinate of each value.

        Raises:
            SpaceError: a name of the space is missing, or a value is outside its range.
        """
        missing = [name for name in self if name not in values]
        if missing:
            raise SpaceError(f"values for {', '.join(missing)} are missing; got {dict(values)!r}")
        return {name: dimension.coordinate(values[name]) for name, dimension in self.items()}

    def values_at(self, coordinates: Mapping[str, float]) -> dict[str, Scalar]:
        """The value at each coordinate, clipped to its range."""
        return {name: dimension.value(coordinates[name]) for name, dimension in self.items()}

    def to_dict(self) -> dict[str, Any]:
        """A form that JSON can hold; `from_dict` reads it."""
        return {
            name: {"kind": d.kind, **asdict(d)}  # type: ignore[call-overload]
            for name, d in self.items()
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "SearchSpace":
        """The space that `to_dict` described.

        Raises:
            SpaceError: the description is not one.
        """
        dimensions: dict[str, Dimension] = {}
        for name, described in fields.items():
            try:
                arguments = dict(described)
                kind = _KINDS[arguments.pop("kind")]
                if kind is Choice:
                    dimensions[name] = Choice(*arguments["options"])
                else:
                    by = arguments.pop("by", None)
                    dimensions[name] = kind(**arguments, by=None if by is None else tuple(by))
            except (KeyError, TypeError, ValueError) as error:
                raise SpaceError(
                    f"{name}: {described!r} describes no dimension ({error}); expected e.g. "
                    '{"kind": "log", "low": 0.001, "high": 1.0}'
                ) from error
        return cls(**dimensions)

    def digest(self) -> str:
        """A SHA-256 of the space, the same in every process."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
