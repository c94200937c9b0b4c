"""The catalogue of AWS: sizes from instance metadata, prices from a dated file."""

import csv
from collections.abc import Iterable, Mapping
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from ._catalog import Catalog, InstanceType
from ._catalog_files import cell, csv_rows, once, read_text
from ._errors import CatalogError


def aws_catalog(
    names: Iterable[str] | None,
    counts: Iterable[int] | Mapping[str, Iterable[int]] | None,
    prices: str | PathLike[str] | None,
    described: Iterable[Mapping[str, Any]] | None,
) -> Catalog:
    """Returns the catalogue; see `Catalog.aws`."""
    dated, price_of = _prices(prices)
    sizes = _bundled() if described is None else dict(map(_from_description, described))
    wanted = list(sizes if names is None else names)
    unknown = [name for name in wanted if name not in sizes]
    if unknown:
        raise CatalogError(
            f"names holds {unknown[0]!r}, of which no size is known; known are "
            f"{', '.join(list(sizes)[:5])}, ... ({len(sizes)} types); pass `described` for others"
        )
    unpriced = [name for name in wanted if name not in price_of]
    if unpriced and names is not None:
        raise CatalogError(
            f"no price is known for {unpriced[0]!r}; pass prices=, a CSV file with the columns "
            "name and price"
        )
    types = [InstanceType(n, **sizes[n], **price_of[n]) for n in wanted if n in price_of]
    return Catalog(types, counts, dated)


def _prices(path: str | PathLike[str] | None) -> tuple[str | None, dict[str, dict[str, Any]]]:
    if path is None:
        label, text = "the bundled price file", _bundled_text("aws_prices.csv")
    else:
        label, text = f"price file {str(path)!r}", read_text(Path(path))
    dated = None
    rows = []
    for line in text.splitlines():
        if line.startswith("#"):
            note = line.lstrip("# ")
            dated = note.removeprefix("dated:").strip() if note.startswith("dated:") else dated
        elif line.strip():
            rows.append(line)
    columns, lines = csv_rows(label, "\n".join(rows))
    if not {"name", "price"} <= set(columns):
        raise CatalogError(
            f"{label} needs the columns name and price, separated by commas; got {columns}"
        )
    once(label, columns)
    found: dict[str, dict[str, Any]] = {}
    for _, row in lines:
        if row["name"] in found:
            raise CatalogError(f"{label} has two prices for {row['name']!r}; give it one")
        fields = {k: row[k] for k in ("price", "spot_price") if (row.get(k) or "").strip()}
        where = f"{label}, {row['name']}"
        found[row["name"]] = {k: float(cell(where, k, v)) for k, v in fields.items()}
    return dated, found


def _bundled() -> dict[str, dict[str, Any]]:
    sizes: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(_bundled_text("aws_types.csv").splitlines()):
        name = row.pop("name")
        sizes[name] = {k: cell("aws_types.csv", k, v) for k, v in row.items() if v}
    return sizes


def _bundled_text(name: str) -> str:
    return (resources.files("mlcd_bo") / "data" / name).read_text(encoding="utf-8")


def _from_description(entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns name and sizes of one entry of EC2's DescribeInstanceTypes."""
    try:
        sizes: dict[str, Any] = {
            "vcpus": entry["VCpuInfo"]["DefaultVCpus"],
            "mem_gib": entry["MemoryInfo"]["SizeInMiB"] / 1024,
        }
        gpus = (entry.get("GpuInfo") or {}).get("Gpus") or []
        if gpus:
            sizes["gpus"] = sum(gpu["Count"] for gpu in gpus)
            sizes["gpu_name"] = gpus[0]["Name"]
            sizes["gpu_mem_gib"] = gpus[0]["MemoryInfo"]["SizeInMiB"] / 1024
        network = str(entry.get("NetworkInfo", {}).get("NetworkPerformance", "")).split()
        if len(network) > 1 and network[-1].startswith("Gigabit"):
            sizes["net_gbps"] = float(network[-2])
        return str(entry["InstanceType"]), sizes
    except (KeyError, TypeError, ValueError) as problem:
        raise CatalogError(
            f"described holds an entry that is not one of DescribeInstanceTypes: {problem!r}"
        ) from problem
