"""The finite set of deployments that a search may choose from."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from ._catalog import Catalog, InstanceType, counts_by_type
from ._check import positive_int
from ._errors import CatalogError, InvalidInput

Knob = int | float | str | bool


@dataclass(frozen=True)
class Deployment:
    """So many machines of one type, rented on demand or on the spot market.

    Attributes:
        instance_type: the machine.
        count: how many of it, at least one.
        spot: rented at the spot price.
        knobs: other settings of the run and their values, such as ``(("local_batch", 64),)``.

    Raises:
        InvalidInput: `count` is below one, `spot` is asked of a type without a spot price, or
            a knob's value is not a finite number, a string or a bool.
    """

    instance_type: InstanceType
    count: int
    spot: bool = False
    knobs: tuple[tuple[str, Knob], ...] = field(default=())

    def __post_init__(self) -> None:
        if not isinstance(self.instance_type, InstanceType):
            raise InvalidInput(
                f"instance_type must be of type InstanceType, got {self.instance_type!r}"
            )
        object.__setattr__(self, "count", positive_int("count", self.count))
        object.__setattr__(self, "spot", bool(self.spot))
        plain = tuple((name, _plain(name, value)) for name, value in self.knobs)
        object.__setattr__(self, "knobs", plain)
        if self.spot and self.instance_type.spot_price is None:
            raise InvalidInput(
                f"spot was asked of {self.instance_type.name!r}, which has no spot_price; "
                "give one or set spot=False"
            )

    @property
    def price_per_hour(self) -> float:
        """Dollars per hour of the whole cluster."""
        kind = self.instance_type
        one = kind.spot_price if self.spot and kind.spot_price is not None else kind.price
        return one * self.count

    @property
    def key(self) -> str:
        """A short unique name within a search space, such as ``m5.large x4``."""
        parts = [f"{self.instance_type.name} x{self.count}"]
        if self.spot:
            parts.append("spot")
        parts += [f"{name}={value}" for name, value in self.knobs]
        return " ".join(parts)

    def __str__(self) -> str:
        return self.key


class SearchSpace(Sequence[Deployment]):
    """Every allowed deployment, in a fixed order: by type, then count, then purchase, then knobs.

    Args:
        catalog: the instance types.
        counts: numbers of machines, for all types (``[1, 2, 4]``) or by type name; None takes
            the catalogue's own. A type's `max_count` and `quota` cut it short.
        spot: also offer each type that has a spot price at that price.
        knobs: further finite settings, each with its values, such as
            ``{"local_batch": [32, 64]}``; a profiler hands them to the script as
            ``MLCD_KNOB_LOCAL_BATCH``.

    Raises:
        CatalogError: no counts anywhere, counts that are not positive whole numbers, or
            quotas that leave nothing.
        InvalidInput: a knob has no identifier for a name, no values, one twice, or one that is
            not a finite number, a string or a bool.
    """

    def __init__(
        self,
        catalog: Catalog,
        counts: Iterable[int] | Mapping[str, Iterable[int]] | None = None,
        *,
        spot: bool = False,
        knobs: Mapping[str, Iterable[Knob]] | None = None,
    ) -> None:
        if not isinstance(catalog, Catalog):
            raise InvalidInput(f"catalog must be a Catalog, got {type(catalog).__name__}")
        by_type = catalog.counts if counts is None else counts_by_type(counts, catalog)
        if by_type is None:
            raise CatalogError(
                "counts is missing: give SearchSpace(catalog, counts=[1, 2, 4]) or a catalogue "
                "with counts"
            )
        self.catalog = catalog
        settings: list[tuple[tuple[str, Knob], ...]] = [()]
        if knobs is not None and not isinstance(knobs, Mapping):
            raise InvalidInput(f"knobs must map names to lists of values, got {knobs!r}")
        told: dict[str, str] = {}
        for name, values in (knobs or {}).items():
            listed = isinstance(values, Iterable) and not isinstance(values, str | bytes)
            choices = list(values) if listed else []
            if not isinstance(name, str) or not name.isidentifier() or not choices:
                raise InvalidInput(
                    f"knobs[{name!r}] must have an identifier for a name and a list of at least "
                    f"one value, got {values!r}"
                )
            if name.upper() in told:
                raise InvalidInput(
                    f"knobs {told[name.upper()]!r} and {name!r} would both reach the script as "
                    f"MLCD_KNOB_{name.upper()}; name one of them otherwise"
                )
            told[name.upper()] = name
            settings = [(*setting, (name, value)) for setting in settings for value in choices]
        self._deployments: list[Deployment] = []
        for name, kind in catalog.items():
            for count in by_type.get(name, ()):
                if kind.most is not None and count > kind.most:
                    continue
                for on_spot in (False, True) if spot and kind.spot_price else (False,):
                    self._deployments += [
                        Deployment(kind, count, on_spot, setting) for setting in settings
                    ]
        if not by_type:
            raise CatalogError("counts is empty; give the numbers of machines, such as [1, 2, 4]")
        if not self._deployments:
            raise CatalogError(
                "no deployment is left: every count lies above its type's max_count or quota"
            )
        self._number()

    @classmethod
    def of(cls, catalog: Catalog, deployments: Iterable[Deployment]) -> "SearchSpace":
        """Returns the space of just these deployments, in the order given.

        Args:
            catalog: the instance types, prices included.
            deployments: at least one, each of a type of the catalogue.

        Raises:
            InvalidInput: none is given, one is given twice, or its type is not in the catalogue.
        """
        space = cls.__new__(cls)
        space.catalog = catalog
        space._deployments = list(deployments)
        for deployment in space._deployments:
            kind = deployment.instance_type
            if catalog.get(kind.name) != kind:
                raise InvalidInput(f"{deployment} is of a type that is not in the catalogue")
        if not space._deployments:
            raise InvalidInput("deployments is empty; give at least one")
        space._number()
        return space

    def _number(self) -> None:
        self._index = {d: i for i, d in enumerate(self._deployments)}
        if len(self._index) != len(self._deployments):
            raise InvalidInput(
                "a deployment is listed twice; give each knob value and each deployment once"
            )

    def __len__(self) -> int:
        return len(self._deployments)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # int and slice, as a tuple
        return self._deployments[index]

    def __iter__(self) -> Iterator[Deployment]:
        return iter(self._deployments)

    def position(self, deployment: Deployment) -> int:
        """Returns the place of `deployment` in the order of this space.

        Raises:
            InvalidInput: it is not one of this space's deployments.
        """
        try:
            return self._index[deployment]
        except (KeyError, TypeError):
            raise InvalidInput(
                f"deployment {deployment} is not in the search space of {len(self)} deployments; "
                "take it from the space or from ask()"
            ) from None

    def __repr__(self) -> str:
        return f"SearchSpace({len(self)} deployments of {len(self.catalog)} types)"


def _plain(name: str, value: object) -> Knob:
    """Returns the value of a knob as a plain one, which a store can hold and give back."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise InvalidInput(
        f"knobs[{name!r}] must hold finite numbers, strings or bools, got {value!r}; write other "
        "values as a string and take them apart in the script"
    )
