"""Parquet files as input: paths, globs, folders and lists of them."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from kingpin_ray._errors import InputError, MissingColumnError, MixedTypesError

if TYPE_CHECKING:
    from collections.abc import Sequence


def is_path(data: Any) -> bool:
    """Returns whether `data` is a path or a list of paths."""
    if isinstance(data, (str, os.PathLike)):
        return True
    return bool(
        isinstance(data, (list, tuple))
        and data
        and all(isinstance(item, (str, os.PathLike)) for item in data)
    )


def is_dataset(data: Any) -> bool:
    """Returns whether `data` is a Ray Dataset; Ray is not imported for it."""
    return type(data).__module__.startswith("ray.data") and hasattr(data, "to_arrow_refs")


def dataset_table(data: Any) -> pa.Table:
    """Returns all rows of a Ray Dataset."""
    import ray

    return pa.concat_tables(ray.get(data.to_arrow_refs()))


def expand(data: Any) -> list[str]:
    """Returns the files that a path, glob, folder or list names, sorted within each.

    Raises:
        InputError: a name matches no file.
    """
    names = [data] if isinstance(data, (str, os.PathLike)) else list(data)
    files: list[str] = []
    for name in [os.fspath(name) for name in names]:
        if os.path.isdir(name):
            found = sorted(str(path) for path in Path(name).rglob("*.parquet"))
        elif os.path.exists(name):
            found = [name]
        else:
            found = sorted(glob.glob(name, recursive=True))
        if not found:
            raise InputError(
                f"no Parquet file is at {name!r}; give a file, a folder that holds *.parquet, "
                "or a glob that matches some"
            )
        files += found
    return files


@dataclass(frozen=True)
class Part:
    """Row groups that one task reads.

    Attributes:
        pieces: (file, its footer, row group numbers).
    """

    pieces: tuple[tuple[str, Any, tuple[int, ...]], ...]


class Files:
    """Parquet files whose footers are read, once.

    Args:
        data: a path, glob, folder or list of them.
        wanted: columns that will be read; None for all.

    Raises:
        InputError: a name matches no file, or a file is not Parquet.
        MissingColumnError: a file lacks a column.
        MixedTypesError: a column has different types in two files.
    """

    def __init__(self, data: Any, wanted: Sequence[str] | None) -> None:
        self.names = expand(data)
        self.footers: list[Any] = []
        first: pa.Schema | None = None
        for name in self.names:
            try:
                footer = pq.read_metadata(name)
                schema = footer.schema.to_arrow_schema()
            except (pa.ArrowInvalid, OSError) as error:
                raise InputError(f"{name!r} cannot be read as Parquet: {error}") from error
            self.footers.append(footer)
            if first is None:
                first = schema
                self.columns = list(wanted) if wanted is not None else schema.names
            for column in self.columns:
                if column not in schema.names:
                    raise MissingColumnError(
                        f"column {column!r} is not in {name!r}, which has {', '.join(schema.names)}"
                    )
                if schema.field(column).type != first.field(column).type:
                    raise MixedTypesError(
                        f"column {column!r} is {first.field(column).type} in {self.names[0]!r} but "
                        f"{schema.field(column).type} in {name!r}; write the files with one type"
                    )
        assert first is not None
        self.schema = pa.schema([first.field(column) for column in self.columns])

    @property
    def n_rows(self) -> int:
        """Rows of all files."""
        return sum(footer.num_rows for footer in self.footers)

    def column_bytes(self) -> int:
        """Returns the bytes that the wanted columns take in the files."""
        total = 0
        wanted = set(self.columns)
        for footer in self.footers:
            for g in range(footer.num_row_groups):
                group = footer.row_group(g)
                for c in range(group.num_columns):
                    column = group.column(c)
                    if column.path_in_schema.split(".")[0] in wanted:
                        total += column.total_compressed_size
        return total

    def parts(self, count: int) -> list[Part]:
        """Returns at most `count` parts of about equal rows that hold each row group once."""
        groups = [
            (f, g, footer.row_group(g).num_rows)
            for f, footer in enumerate(self.footers)
            for g in range(footer.num_row_groups)
        ]
        size = max(1, -(-self.n_rows // max(count, 1)))
        cut: list[dict[int, list[int]]] = []
        seen = 0
        for f, g, rows in groups:
            while len(cut) <= seen // size:
                cut.append({})
            cut[-1].setdefault(f, []).append(g)
            seen += rows
        return [
            Part(tuple((self.names[f], self.footers[f], tuple(g)) for f, g in part.items()))
            for part in cut
            if part
        ]


class _Counted:
    """A file that counts what is read of it."""

    def __init__(self, name: str) -> None:
        self._file = open(name, "rb")  # noqa: SIM115  (closed by close)
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.count += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


def read_part(part: Part, columns: list[str]) -> tuple[pa.Table, int]:
    """Returns the columns of a part's row groups, and the bytes that were read for them."""
    tables = []
    total = 0
    for name, footer, groups in part.pieces:
        counted = _Counted(name)
        try:
            file = pq.ParquetFile(
                pa.PythonFile(counted, mode="r"), metadata=footer, pre_buffer=False
            )
            tables.append(file.read_row_groups(list(groups), columns=columns, use_threads=False))
        finally:
            counted.close()
        total += counted.count
    return pa.concat_tables(tables), total


def read_paths(data: Any, wanted: Sequence[str] | None) -> pa.Table:
    """Returns the wanted columns of all files as one table."""
    files = Files(data, wanted)
    (part,) = files.parts(1) or [Part(())]
    if not part.pieces:
        return files.schema.empty_table()
    return read_part(part, files.columns)[0]
