"""The store on disk: a folder that says what is in it, and is whole or absent.

    out/
      manifest.json        format, version, tables: spec, shape, sizes, checksums, errors
      <table>.codes        packed rows, little-endian, each padded to a multiple of 16 bytes
      <table>.safetensors  scales or codebooks, and the errors of each column
      plain.safetensors    attributes kept as they are (y, masks, time)

Rows keep the order of the source. Nothing here is a pickle. A folder is written under another name
and renamed when it is complete and on disk; codes are mapped, not read, when it is opened.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bifeat_pyg import quantizers
from bifeat_pyg._errors import (
    BiFeatError,
    ChecksumError,
    FormatError,
    StorageError,
    VersionError,
)
from bifeat_pyg._fit import Errors
from bifeat_pyg._table import DTYPES, PackedTable
from bifeat_pyg.quantizers._base import known

FORMAT = "bifeat"
VERSION = 1
MANIFEST = "manifest.json"
PLAIN = "plain.safetensors"
_PADDING = 16
_BLOCK = 1 << 22

Key = tuple[str | None, str]


def stride_of(row_bytes: int) -> int:
    """Returns the bytes from one row to the next, a multiple of 16."""
    return -(-row_bytes // _PADDING) * _PADDING


def stem(key: Key, number: int) -> str:
    """Returns the file name of a table, without ending; the number keeps look-alikes apart."""
    text = "_".join(part for part in key if part is not None)
    return f"{number}_{re.sub(r'[^A-Za-z0-9_.-]', '_', text)}"[:80]


@contextmanager
def writing(what: Path) -> Iterator[None]:
    """Turns failures of the file system into one line that says what could not be written.

    Raises:
        StorageError: e.g. the disk is full.
    """
    try:
        yield
    except BiFeatError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(
            error.errno,
            f"cannot write {what}: {reason}. What was there before is untouched; make room or "
            "choose another folder, and call again",
        ) from error
    except SafetensorError as error:
        raise StorageError(f"cannot write {what}: {error}") from error


def sync_folder(folder: Path) -> None:
    """Asks the system to write a folder's entries to disk, where it can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON so that the file is the old one or the new one, never half of it."""
    part = path.with_name(path.name + ".new")
    with open(part, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def write_params(path: Path, table: PackedTable) -> None:
    """Writes a table's parameters and errors."""
    tensors = {f"param.{name}": value for name, value in table.codec.params.items()}
    if table.errors is not None:
        tensors["error.squared"] = table.errors.squared
        tensors["error.power"] = table.errors.power
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def padded(packed: Tensor, stride: int) -> Tensor:
    """Returns packed rows with zeros after each up to `stride` bytes."""
    return torch.nn.functional.pad(packed, (0, stride - packed.shape[1]))


def describe(key: Key, table: PackedTable, name: str, codes_sha256: str) -> dict[str, Any]:
    """Returns a table's entry of the manifest; its parameters must be on disk already in `name`."""
    return {
        "group": key[0],
        "attr": key[1],
        "rows": table.rows,
        "row_shape": list(table.codec.tail),
        "row_order": "source",
        "dtype": str(table.dtype).removeprefix("torch."),
        "spec": table.codec.spec.to_dict(),
        "columns": table.codec.columns,
        "row_bytes": table.codec.row_bytes,
        "stride": stride_of(table.codec.row_bytes),
        "codes": f"{name}.codes",
        "codes_sha256": codes_sha256,
        "params": f"{name}.safetensors",
    }


def checksum(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Returns the SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    return digest.hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a store.

    Raises:
        FormatError: there is none, or it is damaged.
        VersionError: of another version of the format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        hint = ""
        if folder.with_name(folder.name + ".part").is_dir():
            hint = "; a .part folder lies beside it: call quantize_file again to finish it"
        raise FormatError(f"{folder} is no store: it has no {MANIFEST}{hint}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is damaged ({error}); quantize again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise FormatError(f"{path} does not say that this is a {FORMAT} store")
    if manifest.get("version") != VERSION:
        raise VersionError(
            f"{folder} is of format version {manifest.get('version')!r}, this package reads "
            f"{VERSION}; install the bifeat-pyg that wrote it, or quantize again"
        )
    return manifest


def read_table(folder: Path, entry: dict[str, Any]) -> tuple[Key, PackedTable]:
    """Returns (group, attribute) and the table that an entry describes, its codes mapped.

    Raises:
        FormatError: a file is missing, too short or too long, or an entry makes no sense.
        ChecksumError: the parameters were changed.
        SpecError: its quantizer is not installed.
    """
    try:
        rows, stride = int(entry["rows"]), int(entry["stride"])
        if rows < 0:
            raise ValueError(f"rows is {rows}")
        spec = quantizers.get(entry["spec"]["quantizer"]).from_dict(entry["spec"])
        dtype = DTYPES[entry["dtype"]]
        codes_path = inside(folder, entry["codes"])
        params_path = inside(folder, entry["params"])
        expected = entry["params_sha256"]
        key = (entry["group"], entry["attr"])
        if not isinstance(key[0], str | None) or not isinstance(key[1], str):
            raise TypeError(f"group and attr are {key}")
        columns, tail = int(entry["columns"]), tuple(int(s) for s in entry["row_shape"])
        row_bytes = int(entry["row_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"an entry of {folder / MANIFEST} is damaged ({error!r}); quantize again"
        ) from None
    for path in (codes_path, params_path):
        if not path.is_file():
            raise FormatError(f"{path} is missing; copy it again or quantize again")
    size = codes_path.stat().st_size
    # The stride too, or half as many rows of twice the bytes would pass for what was written.
    if size != rows * stride or stride != stride_of(row_bytes):
        raise FormatError(
            f"{codes_path} has {size} bytes, {rows} rows of {stride_of(row_bytes)} take "
            f"{rows * stride_of(row_bytes)}: it or {MANIFEST} was cut off or changed; copy it "
            "again or quantize again"
        )
    if checksum(params_path) != expected:
        raise ChecksumError(f"{params_path} is not what was written; copy it again")
    tensors = read_tensors(params_path)
    params = {n.removeprefix("param."): t for n, t in tensors.items() if n.startswith("param.")}
    errors = None
    if "error.squared" in tensors:
        errors = Errors(rows, tensors["error.squared"], tensors["error.power"])
    codec = known(spec.restore(columns, params).shaped(tail))
    if codec.row_bytes != row_bytes:
        raise FormatError(f"{codec} packs rows to {codec.row_bytes} bytes, not {row_bytes}")
    return key, PackedTable(mapped(codes_path, rows, stride), codec, dtype, errors)


def mapped(path: Path, rows: int, stride: int) -> Tensor:
    """Returns a file's bytes as uint8 [rows, stride], mapped and never written back."""
    if rows * stride == 0:
        return torch.empty((rows, stride), dtype=torch.uint8)
    # shared=False maps privately: pages are those of the system's cache, one copy for all
    # processes, and a stray write would stay in this process.
    flat = torch.from_file(str(path), shared=False, size=rows * stride, dtype=torch.uint8)
    return flat.view(rows, stride)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of a safetensors file.

    Raises:
        FormatError: it is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path} is damaged ({error}); copy it again") from None


def inside(folder: Path, name: str) -> Path:
    """Returns a file of the folder; a manifest must not lead elsewhere.

    Raises:
        ValueError: the name has a path in it.
    """
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a plain file name")
    return folder / name
