"""Parquet files as input: paths, globs, folders and lists of them."""

from __future__ import annotations

import glob
import os
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


def unified_schema(files: Sequence[str], wanted: Sequence[str] | None) -> pa.Schema:
    """Returns the schema of the wanted columns, checked over all files from their footers alone.

    Raises:
        InputError: a file is not Parquet.
        MissingColumnError: a file lacks a column.
        MixedTypesError: a column has different types in two files.
    """
    first: pa.Schema | None = None
    for name in files:
        try:
            schema = pq.read_schema(name).remove_metadata()
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{name!r} cannot be read as Parquet: {error}") from error
        if first is None:
            first = schema
            columns = list(wanted) if wanted is not None else schema.names
        for column in columns:
            if column not in schema.names:
                raise MissingColumnError(
                    f"column {column!r} is not in {name!r}, which has {', '.join(schema.names)}"
                )
            if schema.field(column).type != first.field(column).type:
                raise MixedTypesError(
                    f"column {column!r} is {first.field(column).type} in {files[0]!r} but "
                    f"{schema.field(column).type} in {name!r}; write the files with one type"
                )
    assert first is not None
    return pa.schema([first.field(column) for column in columns])


def read_paths(data: Any, wanted: Sequence[str] | None) -> pa.Table:
    """Returns the wanted columns of all files as one table."""
    files = expand(data)
    schema = unified_schema(files, wanted)
    return pa.concat_tables(
        [pq.ParquetFile(name).read(columns=schema.names, use_threads=False) for name in files]
    )
