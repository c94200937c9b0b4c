"""Catalogues from files: YAML and CSV."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from ._catalog import FIELDS, Catalog, InstanceType
from ._errors import CatalogError, InvalidInput


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        again = next((key for at, key in enumerate(keys) if key in keys[:at]), None)
        if again is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {again!r} is given twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


_INTEGERS = ("max_count", "quota")
_STRINGS = ("name", "gpu_name")


def catalog_from_yaml(path: str | PathLike[str]) -> Catalog:
    """Returns the catalogue of a YAML file: ``types``, and optional ``counts`` and ``dated``."""
    label = f"catalogue {str(path)!r}"
    try:
        content = yaml.load(read_text(path), _Loader)
    except yaml.YAMLError as problem:
        raise CatalogError(f"{label} is not usable YAML: {problem}") from problem
    if not isinstance(content, dict) or not isinstance(content.get("types"), list):
        raise CatalogError(f"{label} must be a mapping with a list 'types'")
    unknown = sorted(set(map(str, content)) - {"types", "counts", "dated"})
    if unknown:
        raise CatalogError(f"{label} has unknown keys {unknown}; allowed: types, counts, dated")
    own: dict[str, Any] = {}
    types = []
    for position, row in enumerate(content["types"]):
        if not isinstance(row, dict):
            raise CatalogError(f"{label} types[{position}] must be a mapping, got {row!r}")
        where = f"{label} types[{position}]"
        fields = {key: _plain(where, key, value) for key, value in row.items()}
        if "counts" in fields:
            own[str(fields.get("name"))] = fields.pop("counts")
        types.append(_instance_type(where, fields))
    counts = content.get("counts")
    if own or isinstance(counts, Mapping):
        named = (
            {str(name): values for name, values in counts.items()}
            if isinstance(counts, Mapping)
            else dict.fromkeys((kind.name for kind in types), counts)
            if counts is not None
            else {}
        )
        names = [kind.name for kind in types]
        without = [name for name in names if name not in {**named, **own}]
        if without and set(named) <= set(names):
            raise CatalogError(
                f"{label} gives no counts for {without[0]!r}; give it a list counts of its own, or "
                "leave the type out"
            )
        counts = {**named, **own}
    dated = content.get("dated")
    return Catalog(types, counts, None if dated is None else str(dated))


def catalog_from_csv(
    path: str | PathLike[str], counts: Iterable[int] | Mapping[str, Iterable[int]] | None = None
) -> Catalog:
    """Returns the catalogue of a CSV file with the columns of `InstanceType`; empty is unset."""
    label = f"catalogue {str(path)!r}"
    columns, rows = csv_rows(label, read_text(path))
    if not {"name", "price"} <= set(columns):
        raise CatalogError(
            f"{label} needs the columns name and price, separated by commas; got {columns}"
        )
    once(label, columns)
    unknown = sorted(set(columns) - set(FIELDS))
    if unknown:
        raise CatalogError(f"{label} has unknown fields {unknown}; allowed: {', '.join(FIELDS)}")
    types = []
    for line, row in rows:
        where = f"{label} line {line}"
        if None in row or None in row.values():
            raise CatalogError(f"{where} does not have as many cells as the header")
        fields: dict[str, Any] = {k: cell(where, k, v) for k, v in row.items() if v.strip()}
        types.append(_instance_type(where, fields))
    return Catalog(types, counts)


def csv_rows(
    label: str, text: str, error: type[InvalidInput] = CatalogError
) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Returns the columns of a CSV text and its rows, each with the number of its (last) line.

    Raises:
        CatalogError: a quote that is never closed makes a cell of what follows (or the `error`
            given).
    """
    reader = csv.DictReader(text.splitlines())
    try:
        return list(reader.fieldnames or ()), [(reader.line_num, row) for row in reader]
    except csv.Error as problem:
        raise error(
            f"{label} is no usable CSV after line {reader.line_num}: {problem}; close every quote"
        ) from problem


def once(
    label: str, columns: Sequence[str] | None, error: type[InvalidInput] = CatalogError
) -> None:
    """Refuses a column that is given twice, of which CSV readers silently take the last.

    Raises:
        CatalogError: there is one (or the `error` given).
    """
    names = list(columns or ())
    again = sorted({name for name in names if names.count(name) > 1})
    if again:
        raise error(f"{label} has the column {again[0]!r} twice; give each column once")


def read_text(path: str | PathLike[str]) -> str:
    """Returns the text of a file, or raises a CatalogError that names it."""
    try:
        # With or without the mark that spreadsheets put in front.
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise CatalogError(f"catalogue {str(path)!r} cannot be read: {problem}") from problem


def _instance_type(where: str, fields: Mapping[str, Any]) -> InstanceType:
    unknown = sorted(set(map(str, fields)) - set(FIELDS))
    if unknown:
        raise CatalogError(f"{where} has unknown fields {unknown}; allowed: {', '.join(FIELDS)}")
    missing = [name for name in ("name", "price") if name not in fields]
    if missing:
        raise CatalogError(f"{where} lacks {' and '.join(missing)}")
    return InstanceType(**fields)


def _plain(where: str, key: object, value: Any) -> Any:
    """Returns a value of YAML as it was meant: names may look like numbers, numbers like text."""
    if key == "name" and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if key in FIELDS and key not in _STRINGS and isinstance(value, str):
        # YAML 1.1 takes 1e-3, without a point, for a text.
        return cell(where, str(key), value)
    return value


def cell(where: str, column: str, text: str) -> Any:
    """Returns the value of a CSV cell: text for names, numbers otherwise."""
    text = text.strip()
    if column in _STRINGS:
        return text
    try:
        number = float(text)
    except ValueError:
        raise CatalogError(f"{where}: {column} must be a number, got {text!r}") from None
    # Spreadsheets write whole numbers as 2.0, too.
    return int(number) if column in _INTEGERS and number.is_integer() else number
