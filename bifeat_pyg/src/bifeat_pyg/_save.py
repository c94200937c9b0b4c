"""Writes a store that is in memory, and checks one that is on disk."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from bifeat_pyg import _format
from bifeat_pyg._errors import ChecksumError, FormatError, StorageError
from bifeat_pyg._format import FORMAT, MANIFEST, PLAIN, VERSION, Key
from bifeat_pyg._table import PackedTable

_ROWS = 1 << 16


def save(folder: Path, tables: Mapping[Key, PackedTable], plain: Mapping[Key, Tensor]) -> None:
    """Writes a store; the folder appears when it is complete.

    Raises:
        StorageError: something is there already, or it cannot be written.
    """
    refuse_existing(folder)
    with _format.writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with _format.writing(folder):
            entries = []
            for number, (key, table) in enumerate(tables.items()):
                name = _format.stem(key, number)
                digest = _write_codes(made / f"{name}.codes", table)
                _format.write_params(made / f"{name}.safetensors", table)
                entry = _format.describe(key, table, name, digest)
                entry["params_sha256"] = _format.checksum(made / entry["params"])
                entries.append(entry)
            finish(made, folder, entries, plain)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def finish(
    made: Path, folder: Path, entries: list[dict[str, Any]], plain: Mapping[Key, Tensor]
) -> None:
    """Writes plain attributes and the manifest, then gives the folder its name."""
    manifest: dict[str, Any] = {"format": FORMAT, "version": VERSION, "tables": entries}
    if plain:
        tensors = {json.dumps(key): value.contiguous() for key, value in plain.items()}
        save_file(tensors, made / PLAIN)
        manifest["plain_sha256"] = _format.checksum(made / PLAIN)
    _format.write_json(made / MANIFEST, manifest)
    os.chmod(made, 0o755)
    _format.sync_folder(made)
    refuse_existing(folder)
    os.rename(made, folder)
    _format.sync_folder(folder.parent)


def refuse_existing(folder: Path) -> None:
    """Raises StorageError if something is there: a store may be mapped by somebody."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise StorageError(
            f"{folder} exists already; choose another folder or remove it first (a store in use is "
            "never written in place)"
        )


def load(
    folder: Path, verify: bool, progress: Callable[[int], None] | None = None
) -> tuple[dict[Key, PackedTable], dict[Key, Tensor]]:
    """Returns tables, codes mapped, and plain attributes of a store.

    Raises:
        FormatError, ChecksumError, VersionError: see `_format`.
    """
    manifest = _format.read_manifest(folder)
    tables = {}
    entries = manifest.get("tables")
    if not isinstance(entries, list):
        raise FormatError(f"{folder / MANIFEST} lists no tables: it is damaged; quantize again")
    for entry in entries:
        key, table = _format.read_table(folder, entry)
        tables[key] = table
        if verify:
            path = folder / entry["codes"]
            if _format.checksum(path, progress) != entry.get("codes_sha256"):
                raise ChecksumError(
                    f"{path} is not what was written (SHA-256 differs); copy it again or quantize "
                    "again"
                )
    plain: dict[Key, Tensor] = {}
    if "plain_sha256" in manifest:
        if not (folder / PLAIN).is_file():
            raise FormatError(f"{folder / PLAIN} is missing; copy it again or quantize again")
        if _format.checksum(folder / PLAIN) != manifest["plain_sha256"]:
            raise ChecksumError(f"{folder / PLAIN} is not what was written; copy it again")
        for name, value in _format.read_tensors(folder / PLAIN).items():
            group, attr = json.loads(name)
            plain[group, attr] = value
    return tables, plain


def _write_codes(path: Path, table: PackedTable) -> str:
    stride = _format.stride_of(table.codec.row_bytes)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for start in range(0, table.rows, _ROWS):
            rows = table.codes[start : start + _ROWS, : table.codec.row_bytes]
            data = _format.padded(rows, stride).numpy().data
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
