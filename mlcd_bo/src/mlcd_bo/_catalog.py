"""What can be rented: instance types, their sizes and their prices."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from os import PathLike
from typing import Any

from ._check import at_least_zero, positive, positive_int
from ._errors import CatalogError, InvalidInput


@dataclass(frozen=True)
class InstanceType:
    """One kind of machine and what an hour of it costs.

    Attributes:
        name: as the provider spells it; unique within a catalogue.
        price: dollars per hour of one machine, on demand.
        vcpus: virtual processors.
        gpus: accelerators.
        gpu_name: the accelerator's model.
        mem_gib: main memory, GiB.
        gpu_mem_gib: memory of one accelerator, GiB.
        net_gbps: network bandwidth, Gbit/s.
        spot_price: dollars per hour of one machine that may be taken away.
        max_count: most machines of this type in one cluster.
        quota: most machines of this type that the account may hold.

    Raises:
        CatalogError: a field is out of its range; the message names the type and the field.
    """

    name: str
    price: float
    vcpus: float | None = None
    gpus: float | None = None
    gpu_name: str | None = None
    mem_gib: float | None = None
    gpu_mem_gib: float | None = None
    net_gbps: float | None = None
    spot_price: float | None = None
    max_count: int | None = None
    quota: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise CatalogError(f"name must be a non-empty, printable string, got {self.name!r}")
        label = f"instance type {self.name!r}"
        price = positive(f"{label}: price", self.price, CatalogError, " (dollars per hour)")
        object.__setattr__(self, "price", _plain(self.price, price))
        for field in ("vcpus", "mem_gib", "gpu_mem_gib", "net_gbps", "spot_price"):
            value = getattr(self, field)
            if value is not None:
                number = positive(f"{label}: {field}", value, CatalogError)
                object.__setattr__(self, field, _plain(value, number))
        if self.gpus is not None:
            try:
                number = at_least_zero(f"{label}: gpus", self.gpus)
            except InvalidInput as problem:
                raise CatalogError(str(problem)) from None
            object.__setattr__(self, "gpus", _plain(self.gpus, number))
        for field in ("max_count", "quota"):
            value = getattr(self, field)
            if value is not None:
                number = positive_int(f"{label}: {field}", value, CatalogError)
                object.__setattr__(self, field, number)
        if self.gpu_name is not None and not isinstance(self.gpu_name, str):
            raise CatalogError(f"{label}: gpu_name must be a string, got {self.gpu_name!r}")

    @property
    def memory_gib(self) -> float | None:
        """Memory that training can fill, GiB: the accelerators' if there are any, else main."""
        if self.gpus:
            return None if self.gpu_mem_gib is None else self.gpu_mem_gib * self.gpus
        return self.mem_gib

    @property
    def most(self) -> int | None:
        """The most machines of this type that may run together, or None if nothing limits it."""
        caps = [cap for cap in (self.max_count, self.quota) if cap is not None]
        return min(caps) if caps else None


def _plain(value: object, number: float) -> float:
    """Returns `number` as a whole one where `value` is: an int for an int, also for NumPy's."""
    return int(number) if isinstance(value, Integral) else number


FIELDS = tuple(field.name for field in fields(InstanceType))


class Catalog(Mapping[str, InstanceType]):
    """Instance types by name, in the order given.

    Args:
        types: the instance types.
        counts: numbers of machines that may be rented together, of every type or by type
            name; None leaves it to `SearchSpace`.
        dated: when the prices were read, in the provider's words (kept with every trial).

    Raises:
        CatalogError: no type at all, two types of one name, or a count that is not a whole
            number of at least one.
    """

    def __init__(
        self,
        types: Iterable[InstanceType],
        counts: Iterable[int] | Mapping[str, Iterable[int]] | None = None,
        dated: str | None = None,
    ) -> None:
        self._types: dict[str, InstanceType] = {}
        if not isinstance(types, Iterable):
            raise CatalogError(f"types must be a list of InstanceType objects, got {types!r}")
        for kind in types:
            if not isinstance(kind, InstanceType):
                raise CatalogError(f"types must hold InstanceType objects, got {kind!r}")
            if kind.name in self._types:
                raise CatalogError(
                    f"instance type {kind.name!r} is listed twice; give each a name of its own "
                    "(for instance with its region)"
                )
            self._types[kind.name] = kind
        if not self._types:
            raise CatalogError("types is empty; a catalogue needs at least one instance type")
        self.dated = dated
        self.counts = None if counts is None else counts_by_type(counts, self._types)

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> "Catalog":
        """Returns the catalogue of a YAML file.

        A mapping with ``types``, a list of mappings with the fields of `InstanceType` (and
        optional ``counts`` of its own), and optional ``counts`` and ``dated``.

        Raises:
            CatalogError: the file cannot be read, or a field in it is not allowed; the message
                names the place.
        """
        from ._catalog_files import catalog_from_yaml

        return catalog_from_yaml(path)

    @classmethod
    def from_csv(
        cls,
        path: str | PathLike[str],
        counts: Iterable[int] | Mapping[str, Iterable[int]] | None = None,
    ) -> "Catalog":
        """Returns the catalogue of a CSV file whose columns are the fields of `InstanceType`.

        Args:
            path: the file; empty cells are unset fields.
            counts: as in `Catalog`.

        Raises:
            CatalogError: the file cannot be read, or a cell in it is not allowed; the message
                names the line.
        """
        from ._catalog_files import catalog_from_csv

        return catalog_from_csv(path, counts)

    @classmethod
    def aws(
        cls,
        names: Iterable[str] | None = None,
        *,
        counts: Iterable[int] | Mapping[str, Iterable[int]] | None = None,
        prices: str | PathLike[str] | None = None,
        described: Iterable[Mapping[str, Any]] | None = None,
    ) -> "Catalog":
        """Returns a catalogue of AWS instance types.

        Sizes of 84 common types are bundled, with on-demand list prices of us-east-1 and the
        date they are of (`dated`). List prices change: for a real decision give your own.

        Args:
            names: which types; None takes all that have a size and a price.
            counts: as in `Catalog`.
            prices: a CSV file with the columns ``name``, ``price`` and optional ``spot_price``,
                and an optional first line ``# dated: ...``.
            described: entries of EC2's DescribeInstanceTypes, for sizes of other types:
                ``client.describe_instance_types()["InstanceTypes"]``.

        Raises:
            CatalogError: a type has no known size or price, or a file cannot be read.
        """
        from ._catalog_aws import aws_catalog

        return aws_catalog(names, counts, prices, described)

    def __getitem__(self, name: str) -> InstanceType:
        return self._types[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)

    def __repr__(self) -> str:
        return f"Catalog({', '.join(self)})"

    def as_rows(self) -> list[dict[str, Any]]:
        """Returns the types as plain dictionaries, unset fields left out."""
        return [
            {f: getattr(kind, f) for f in FIELDS if getattr(kind, f) is not None}
            for kind in self._types.values()
        ]


def counts_by_type(
    counts: Iterable[int] | Mapping[str, Iterable[int]], names: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """Returns sorted counts for each type name.

    Raises:
        CatalogError: a count is not a whole number of at least one, a list is empty, or a
            name is not in the catalogue.
    """
    known = list(names)
    if isinstance(counts, str | bytes) or not isinstance(counts, Iterable):
        raise CatalogError(f"counts must be a list of whole numbers, got {counts!r}")
    if isinstance(counts, Mapping):
        unknown = [name for name in counts if name not in known]
        if unknown:
            raise CatalogError(
                f"counts names {unknown[0]!r}, which is not in the catalogue: {', '.join(known)}"
            )
        return {name: _counts(f"counts[{name!r}]", counts[name]) for name in counts}
    shared = _counts("counts", counts)
    return dict.fromkeys(known, shared)


def _counts(label: str, values: Iterable[int]) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise CatalogError(f"{label} must be a list of whole numbers, got {values!r}")
    counts = tuple(sorted({positive_int(label, value, CatalogError) for value in values}))
    if not counts:
        raise CatalogError(f"{label} is empty; give the numbers of machines, such as [1, 2, 4]")
    return counts
