"""One folder for all models: a manifest, the keys, and Arrow files that are mapped, not read.

While a run is on, finished chunks are appended as segments, each written under a temporary name and
renamed, then named by the manifest, which is replaced in the same way: what the manifest names is
whole. At the end the segments are merged into one file in the order of the groups, so its bytes
depend on data and seed alone, not on who finished first.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kingpin_ray._engine import Outcome
from kingpin_ray._errors import KingpinError, StoreError
from kingpin_ray._keys import KeyTable, rebuild
from kingpin_ray._served import Served
from kingpin_ray.models._base import GroupModel, Naming

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kingpin_ray.models._base import Stack

FORMAT = 1
_MANIFEST = "manifest.json"


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that it is either absent or whole, also after a crash.

    Raises:
        StoreError: the disk refuses.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StoreError(
            f"store: {str(path)!r} cannot be written ({error.strerror or error}); free some disk "
            "space or choose another folder, then go on with resume()"
        ) from error


def write_table(path: Path, table: pa.Table) -> None:
    """Writes an Arrow file atomically."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_atomically(path, sink.getvalue())


def read_table(path: Path) -> pa.Table:
    """Returns an Arrow file as a mapping: only what is looked at is read.

    Raises:
        StoreError: it is missing or damaged.
    """
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise StoreError(
            f"store: {str(path)!r} is missing or damaged ({error}); restore it, or train again"
        ) from error


def stack_to_table(stack: Stack, groups: np.ndarray, config: np.ndarray) -> pa.Table:
    """Returns a table with a row per model."""
    columns: dict[str, Any] = {"group": pa.array(groups), "config": pa.array(config)}
    fields = [pa.field("group", pa.int64()), pa.field("config", pa.int64())]
    for name, values in stack.items():
        meta = {"shape": json.dumps(values.shape[1:])}
        if values.dtype == object:
            packed = [v if isinstance(v, bytes) else pickle.dumps(v) for v in values]
            meta["pickle"] = json.dumps(any(not isinstance(v, bytes) for v in values))
            column: Any = pa.array(packed, pa.large_binary())
        else:
            column = pa.array(np.ascontiguousarray(values).reshape(-1))
            if values.ndim > 1:
                width = int(np.prod(values.shape[1:]))
                column = pa.FixedSizeListArray.from_arrays(column, width)
        columns[f"model_{name}"] = column
        fields.append(pa.field(f"model_{name}", column.type, metadata=meta))
    return pa.table(list(columns.values()), schema=pa.schema(fields))


def table_to_stack(table: pa.Table, trust: bool) -> tuple[Stack, np.ndarray, np.ndarray]:
    """Returns the stack, the group ids and the configurations of a table.

    Raises:
        StoreError: the models are pickled Python objects and `trust` is False.
    """
    stack: Stack = {}
    table = table.combine_chunks()
    for field in table.schema:
        if not field.name.startswith("model_"):
            continue
        column = table.column(field.name)
        array = column.chunk(0) if column.num_chunks else pa.array([], field.type)
        meta = field.metadata or {}
        shape = json.loads(meta.get(b"shape", b"[]"))
        if pa.types.is_large_binary(field.type):
            raw = np.empty(len(array), object)
            pickled = json.loads(meta.get(b"pickle", b"false"))
            if pickled and not trust:
                raise StoreError(
                    "store: its models are pickled Python objects, and loading those runs whatever "
                    "code they name; if you trust who wrote it, use load(path, trust=True)"
                )
            for i, item in enumerate(array):
                raw[i] = pickle.loads(item.as_py()) if pickled else item.as_py()
            stack[field.name[6:]] = raw
        else:
            flat = array.flatten() if pa.types.is_fixed_size_list(field.type) else array
            values = flat.to_numpy(zero_copy_only=False)
            stack[field.name[6:]] = values.reshape(len(array), *shape)
    return stack, table.column("group").to_numpy(), table.column("config").to_numpy()


class Store:
    """A folder of models.

    Args:
        path: the folder; made when it is written to first.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def exists(self) -> bool:
        """Whether a manifest is there."""
        return (self.path / _MANIFEST).exists()

    def manifest(self) -> dict[str, Any]:
        """Returns the manifest.

        Raises:
            StoreError: there is none, it is damaged, or of a later format.
        """
        try:
            text = (self.path / _MANIFEST).read_text(encoding="utf-8")
            manifest = json.loads(text)
        except FileNotFoundError as error:
            raise StoreError(
                f"store: there is no {_MANIFEST} in {str(self.path)!r}; give a folder that save() "
                "or fit(store=...) wrote"
            ) from error
        except (OSError, ValueError) as error:
            raise StoreError(
                f"store: {_MANIFEST} in {str(self.path)!r} is damaged: {error}"
            ) from error
        if manifest.get("format") != FORMAT:
            raise StoreError(
                f"store: format {manifest.get('format')!r} is not {FORMAT}; "
                "use the version of kingpin-ray that wrote it"
            )
        return dict(manifest)

    def begin(self, about: Mapping[str, Any]) -> None:
        """Makes the folder and writes a manifest without models.

        Raises:
            StoreError: a store is there already, or the folder cannot be made.
        """
        if self.exists:
            state = "complete" if self.manifest()["complete"] else "unfinished"
            todo = "load() it" if state == "complete" else "resume() it"
            raise StoreError(
                f"store={str(self.path)!r} already holds a {state} run; {todo}, remove it, or "
                "choose another folder"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"store={str(self.path)!r} cannot be made: {error.strerror}"
            ) from error
        self._write_manifest({"format": FORMAT, "complete": False, "segments": [], **about})

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        text = json.dumps(manifest, indent=1, default=_plain)
        write_atomically(self.path / _MANIFEST, text.encode())

    def append(self, outcomes: list[Outcome]) -> None:
        """Adds finished groups as a segment."""
        if not outcomes:
            return
        manifest = self.manifest()
        number = len(manifest["segments"])
        for part, outcome in enumerate(outcomes):
            stem = f"segment-{number:06d}-{part:04d}"
            write_table(self.path / f"{stem}.results.arrow", outcome.results)
            if len(outcome.groups):
                table = stack_to_table(outcome.stack, outcome.groups, outcome.config)
                write_table(self.path / f"{stem}.models.arrow", table)
            manifest["segments"].append({"name": stem, "models": len(outcome.groups)})
        self._write_manifest(manifest)

    def outcomes(self, trust: bool) -> list[Outcome]:
        """Returns what finished segments hold; files the manifest does not name are removed."""
        manifest = self.manifest()
        named = {segment["name"] for segment in manifest["segments"]}
        for stray in self.path.glob("segment-*"):
            if stray.name.split(".")[0] not in named:
                stray.unlink()
        found = []
        none = np.zeros(0, np.int64)
        for segment in manifest["segments"]:
            results = read_table(self.path / f"{segment['name']}.results.arrow")
            stack: Stack = {}
            groups, config = none, none
            if segment["models"]:
                table = read_table(self.path / f"{segment['name']}.models.arrow")
                stack, groups, config = table_to_stack(table, trust)
            found.append(Outcome(results, groups, config, stack))
        return found

    def finish(self, about: Mapping[str, Any], served: Served, results: pa.Table) -> None:
        """Writes merged models and results, says so in the manifest, then drops the segments."""
        _write_keys(self.path, "keys", served.keys)
        if served.parents is not None:
            _write_keys(self.path, "parents", served.parents)
            write_table(self.path / "parent_slot.arrow", pa.table({"slot": served.parent_slot}))
        if served.naming.classes is not None:
            classes = pa.table({"class": pa.array(served.naming.classes)})
            write_table(self.path / "classes.arrow", classes)
        groups = pa.table(
            {"slot": served.slot, "constant": served.constant, "skipped": served.skipped}
        )
        write_table(self.path / "groups.arrow", groups)
        number = np.arange(len(served.config))
        write_table(self.path / "models.arrow", stack_to_table(served.stack, number, served.config))
        write_table(self.path / "results.arrow", results)
        self._write_manifest(
            {
                "format": FORMAT,
                "complete": True,
                "segments": [],
                **about,
                "key_names": list(served.keys.names),
                "parent_names": list(served.parents.names) if served.parents is not None else None,
                "fallback_slot": served.fallback,
                "has_classes": served.naming.classes is not None,
            }
        )
        for stray in self.path.glob("segment-*"):
            stray.unlink()

    def served(self, model: GroupModel, trust: bool) -> Served:
        """Returns the models, mapped from the disk."""
        manifest = self.manifest()
        if not manifest["complete"]:
            raise StoreError(
                f"store={str(self.path)!r} is of a run that did not finish; "
                "finish it with resume(store)"
            )
        classes = None
        if manifest["has_classes"]:
            column = read_table(self.path / "classes.arrow").column(0)
            classes = column.to_numpy()
        stack, _, config = table_to_stack(read_table(self.path / "models.arrow"), trust)
        groups = read_table(self.path / "groups.arrow")
        parents, parent_slot = None, np.zeros(0, np.int64)
        if manifest["parent_names"]:
            parents = _read_keys(self.path, "parents", manifest["parent_names"])
            parent_slot = read_table(self.path / "parent_slot.arrow").column(0).to_numpy()
        return Served(
            model=model,
            configs=tuple(manifest["configs"]),
            keys=_read_keys(self.path, "keys", manifest["key_names"]),
            naming=Naming(tuple(manifest["features"]), classes),
            stack=stack,
            config=config,
            slot=groups.column("slot").to_numpy(),
            constant=groups.column("constant").to_numpy(),
            fallback=int(manifest["fallback_slot"]),
            parents=parents,
            parent_slot=parent_slot,
            skipped=groups.column("skipped").to_numpy(),
        )


def _write_keys(path: Path, name: str, keys: KeyTable) -> None:
    write_table(path / f"{name}.arrow", pa.table({"combo": keys.combos}))
    for j, level in enumerate(keys.levels):
        write_table(path / f"{name}-{j}.arrow", pa.table({"level": level}))


def _read_keys(path: Path, name: str, names: list[str]) -> KeyTable:
    combos = read_table(path / f"{name}.arrow").column(0).to_numpy()
    levels = []
    for j in range(len(names)):
        column = read_table(path / f"{name}-{j}.arrow").column(0)
        levels.append(column.chunk(0) if column.num_chunks else column.combine_chunks())
    return rebuild(names, levels, combos)


def describe_model(model: GroupModel) -> dict[str, Any]:
    """Returns what a manifest says of a model.

    Raises:
        StoreError: a parameter cannot be written down.
    """
    about = {"name": model.name, "needs_pickle": model.needs_pickle}
    if model.needs_pickle:
        return {**about, "pickle": pickle.dumps(model).hex()}
    try:
        params = json.dumps(model.get_params(deep=False), default=_plain)
    except TypeError as error:
        raise StoreError(
            f"store: {model!r} has a parameter that JSON cannot hold: {error}"
        ) from error
    return {**about, "params": json.loads(params)}


def restore_model(about: Mapping[str, Any], trust: bool) -> GroupModel:
    """Returns the model that a manifest describes.

    Raises:
        StoreError: it is pickled and `trust` is False, or its parameters do not fit.
        UnknownModelError: no installed distribution offers it.
    """
    from kingpin_ray import models

    if about["needs_pickle"]:
        if not trust:
            raise StoreError(
                "store: its models are pickled Python objects, and loading those runs whatever "
                "code they name; if you trust who wrote it, use load(path, trust=True)"
            )
        pickled: GroupModel = pickle.loads(bytes.fromhex(about["pickle"]))
        return pickled
    kind = models.get(about["name"])
    try:
        return kind(**about["params"])
    except KingpinError:
        raise
    except TypeError as error:
        raise StoreError(
            f"store: model {about['name']!r} does not take {about['params']}"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return list(value)
    if callable(value) and getattr(value, "__qualname__", "<").isidentifier():
        return f"{value.__module__}:{value.__qualname__}"
    raise TypeError(f"{type(value).__name__} is not a plain value")
