"""quantize_file: a matrix larger than memory, packed block by block into a store on disk.

While it runs, `out.part` holds what is done and a journal of how far. The journal is written after
the rows that it counts are on disk, so a killed run resumes at its last whole chunk; the result is
the same to the byte, because the codec comes from a seeded sample and is kept with the journal.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bifeat_pyg import _format
from bifeat_pyg._errors import FeatureError, FormatError, StorageError
from bifeat_pyg._fit import Errors, ErrorSum, as_float, check_nan, learn
from bifeat_pyg._quantize import spec_for
from bifeat_pyg._rows import RowSource, columns_of
from bifeat_pyg._save import finish, refuse_existing
from bifeat_pyg._sources import open_source
from bifeat_pyg._store import QuantizedFeatureStore
from bifeat_pyg._table import PackedTable
from bifeat_pyg.quantizers._base import Codec, Spec, known

_JOURNAL = "journal.json"
_NAME = "0_x"


def quantize_file(
    src: Any,
    out: str | Path,
    spec: Spec | None = None,
    chunk_rows: int = 65536,
    resume: bool = True,
    *,
    group: str | None = None,
    attr: str = "x",
    key: str | None = None,
    nan: str = "error",
    progress: bool = False,
) -> QuantizedFeatureStore:
    """Packs a matrix of any size into a store on disk, and returns the store, opened.

    The source is read twice, in blocks: to fit and to check all values, then to encode. Memory
    stays bounded by the block and the sample. `out` appears when it is complete; a run that was
    killed goes on where it stopped when called again with the same arguments.

    Args:
        src: a .npy, .safetensors, .pt (a tensor), .parquet, .arrow or .feather file; a NumPy array
            or memmap, a tensor, or a pyarrow Table.
        out: the folder to make; it must not exist.
        spec: how; SQ(4) where not given.
        chunk_rows: rows between two entries of the journal.
        resume: go on with what a killed run left; False starts anew.
        group: node type in the store, None for a homogeneous graph.
        attr: attribute name in the store.
        key: which tensor of a safetensors file.
        nan: "error", or "zero" to store zeros where values are NaN or infinite.
        progress: show a bar on a terminal.

    Raises:
        FeatureError: the source cannot be read or quantized; NonFiniteError for NaN.
        StorageError: `out` exists, is the source, or cannot be written (the disk is full).
        FormatError: `out.part` belongs to another source or spec and `resume` is set.
    """
    check_nan(nan)
    if not isinstance(chunk_rows, int) or chunk_rows < 1:
        raise FeatureError(f"chunk_rows is {chunk_rows!r}; it must be a whole number above 0")
    spec = spec_for(spec, attr)
    folder = Path(out)
    if isinstance(src, (str, Path)) and _same(Path(src), folder):
        raise StorageError(f"{folder} is the source itself; give another folder for the store")
    refuse_existing(folder)
    source = open_source(src, attr, key)
    part = folder.with_name(folder.name + ".part")
    job = _Job(source, spec, folder, part, chunk_rows, (group, attr), nan, progress)
    with _format.writing(folder):
        job.run(resume)
    return QuantizedFeatureStore.open(folder)


class _Job:
    """One conversion: the codec, and how far it is."""

    def __init__(
        self,
        source: RowSource,
        spec: Spec,
        folder: Path,
        part: Path,
        chunk_rows: int,
        key: _format.Key,
        nan: str,
        progress: bool,
    ) -> None:
        self.source, self.spec, self.folder, self.part = source, spec, folder, part
        self.chunk_rows, self.key, self.nan, self.progress = chunk_rows, key, nan, progress
        self.identity = {
            "spec": spec.to_dict(),
            "rows": source.rows,
            "row_shape": list(source.tail),
            "dtype": str(source.dtype).removeprefix("torch."),
            "group": key[0],
            "attr": key[1],
            "nan": nan,
            # Errors are added up block by block: other blocks would round them otherwise.
            "chunk_rows": chunk_rows,
        }

    def run(self, resume: bool) -> None:
        """Encodes what is left and puts the store in its place."""
        if self.part.exists() and not resume:
            shutil.rmtree(self.part)
        codec, errors, digest, done = self._left() or self._begin()
        codes = self.part / f"{_NAME}.codes"
        stride = _format.stride_of(codec.row_bytes)
        total = self.source.rows
        bar = tqdm(
            total=total, initial=done, unit="row", unit_scale=True, desc=f"{self.spec.name}",
            disable=None if self.progress else True,
        )  # fmt: skip
        with bar, open(codes, "ab") as file:
            # Rows after the last entry of the journal may be half written.
            file.truncate(done * stride)
            while done < total:
                stop = min(done + self.chunk_rows, total)
                for start in range(done, stop, self._block()):
                    end = min(start + self._block(), stop)
                    x = as_float(self.source.read(start, end), start, self.nan, self.source.name)
                    packed = codec.encode(x)
                    errors.add(x, packed)
                    data = _format.padded(packed, stride).numpy().data
                    digest.update(data)
                    file.write(data)
                    bar.update(end - start)
                file.flush()
                os.fsync(file.fileno())
                done = stop
                self._note(done, errors)
        self._complete(codec, errors.result(), digest.hexdigest())

    def _block(self) -> int:
        """Returns the rows held at a time: some 4 million values, as in `_rows.blocks`."""
        return max(1, (1 << 22) // max(columns_of(self.source.tail), 1))

    def _begin(self) -> tuple[Codec, ErrorSum, Any, int]:
        # Before anything is written: features that are refused leave nothing behind.
        codec = learn(self.source, self.spec, self.nan)
        self.part.mkdir(parents=True, exist_ok=True)
        table = PackedTable(torch.empty(0, 0, dtype=torch.uint8), codec, self.source.dtype)
        _format.write_params(self.part / "codec.safetensors", table)
        errors = ErrorSum(codec)
        # The fitted spec may be narrower than the one asked for.
        self.identity["fitted"] = codec.spec.to_dict()
        # The journal last: where there is one, what it counts on is there too.
        (self.part / f"{_NAME}.codes").write_bytes(b"")
        self._note(0, errors)
        return codec, errors, hashlib.sha256(), 0

    def _left(self) -> tuple[Codec, ErrorSum, Any, int] | None:
        """Returns the state of a run that was killed, or None where there is none to go on with."""
        journal = self.part / _JOURNAL
        if not journal.is_file():
            return None
        try:
            noted = json.loads(journal.read_text(encoding="utf-8"))
            same = {name: noted[name] for name in self.identity}
            done = int(noted["done"])
            sums = {name: torch.tensor(noted[name], dtype=torch.float64) for name in _SUMS}
        except (ValueError, KeyError, TypeError):
            raise FormatError(f"{journal} is damaged; start anew with resume=False") from None
        if same != json.loads(json.dumps(self.identity)):
            changed = sorted(name for name in same if same[name] != self.identity[name])
            raise FormatError(
                f"{self.part} was begun with another {', '.join(changed)}; start anew with "
                "resume=False, or call as before"
            )
        tensors = _format.read_tensors(self.part / "codec.safetensors")
        params = {name.removeprefix("param."): value for name, value in tensors.items()}
        fitted = type(self.spec).from_dict(noted["fitted"])
        self.identity["fitted"] = noted["fitted"]
        columns = columns_of(self.source.tail)
        codec = known(fitted.restore(columns, params).shaped(self.source.tail))
        errors = ErrorSum(codec)
        errors.rows, errors.squared, errors.power = done, sums["squared"], sums["power"]
        digest = hashlib.sha256()
        left = done * _format.stride_of(codec.row_bytes)
        with open(self.part / f"{_NAME}.codes", "rb") as file:
            while left > 0:
                block = file.read(min(left, 1 << 22))
                if not block:
                    raise FormatError(
                        f"{self.part} has fewer rows than its journal says; start anew with "
                        "resume=False"
                    )
                digest.update(block)
                left -= len(block)
        return codec, errors, digest, done

    def _note(self, done: int, errors: ErrorSum) -> None:
        sums = {name: getattr(errors, name).tolist() for name in _SUMS}
        _format.write_json(self.part / _JOURNAL, self.identity | {"done": done} | sums)

    def _complete(self, codec: Codec, errors: Errors, digest: str) -> None:
        rows = torch.empty((self.source.rows, 0), dtype=torch.uint8)
        table = PackedTable(rows, codec, self.source.dtype, errors)
        _format.write_params(self.part / f"{_NAME}.safetensors", table)
        entry = _format.describe(self.key, table, _NAME, digest)
        entry["params_sha256"] = _format.checksum(self.part / entry["params"])
        for leftover in (_JOURNAL, "codec.safetensors"):
            (self.part / leftover).unlink(missing_ok=True)
        finish(self.part, self.folder, [entry], {})


_SUMS = ("squared", "power")


def _same(source: Path, folder: Path) -> bool:
    return source.resolve() == folder.resolve() or folder.resolve() in source.resolve().parents
