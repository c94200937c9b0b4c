"""One folder for all models: a manifest, the keys, and Arrow files that are mapped, not read.

While a run is on, finished chunks are appended as segments, each written under a temporary name and
renamed, then named by the manifest, which is replaced in the same way: what the manifest names is
whole. At the end the segments are merged into one file in the order of the groups, so its bytes
depend on data and seed alone, not on who finished first.

The manifest holds a SHA-256 of each file and one of itself: a store that was damaged is refused
instead of predicting something else.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import secrets
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kingpin_ray._engine import Outcome
from kingpin_ray._errors import KingpinError, ParameterError, StoreError
from kingpin_ray._folders import hold
from kingpin_ray._keys import KeyTable, rebuild
from kingpin_ray._served import Served
from kingpin_ray.models._base import GroupModel, Naming

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from kingpin_ray.models._base import Stack

FORMAT = 1
_MANIFEST = "manifest.json"
# What `write_atomically` calls a file of a store before it has all of it.
_TEMPORARY = re.compile(r"\.(manifest\.json|[a-z0-9_.-]+\.arrow)\.[0-9a-f]{8}\.part")
_OWN_KEYS = frozenset({"format", "complete", "segments", "files", "checksum"})
_RUN_KEYS = frozenset(
    {
        *("model", "configs", "estimator", "features", "by", "target", "groups_apart"),
        *("n_features_in", "seed", "paths", "fingerprint"),
    }
)


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Turns whatever comes of content that cannot be right into a StoreError."""
    try:
        yield
    except KingpinError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        pa.ArrowException,
        pickle.PickleError,
    ) as error:
        raise StoreError(
            f"store: {what} does not hold what it should "
            f"({type(error).__name__}: {error}); restore it, or train again"
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that it is either absent or whole, also after a crash.

    Raises:
        StoreError: the disk refuses.
    """
    try:
        # Not by `tempfile`, whose files others may not read whatever the user's umask says.
        name = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            with name.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            name.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StoreError(
            f"store: {str(path)!r} cannot be written ({error.strerror or error}); free some disk "
            "space or choose another folder, then go on with resume()"
        ) from error


def write_table(path: Path, table: pa.Table) -> str:
    """Writes an Arrow file atomically and returns its SHA-256."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue()
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def read_table(path: Path, checksum: str) -> pa.Table:
    """Returns an Arrow file as a mapping, after one pass over it to compare its SHA-256.

    Raises:
        StoreError: it is missing or damaged.
    """
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != checksum:
            raise pa.ArrowInvalid("its SHA-256 is not what the manifest says")
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
        if not isinstance(path, (str, os.PathLike)):
            raise ParameterError(f"store={path!r}: give the path of a folder")
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
            if not isinstance(manifest, dict):
                raise ValueError("it is not a JSON object")
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
        if manifest.pop("checksum", None) != _checksum(manifest):
            raise StoreError(
                f"store: {_MANIFEST} in {str(self.path)!r} is damaged: it was changed after it was "
                "written; restore it, or train again"
            )
        missing = sorted((_RUN_KEYS | _OWN_KEYS) - {"checksum"} - set(manifest))
        if missing:
            raise StoreError(
                f"store: {_MANIFEST} in {str(self.path)!r} is damaged: it lacks {missing[0]!r}"
            )
        return dict(manifest)

    def about(self) -> dict[str, Any]:
        """Returns what the manifest says of the run, without what it says of this folder."""
        return {key: value for key, value in self.manifest().items() if key not in _OWN_KEYS}

    def results(self) -> pa.Table:
        """Returns the results of a complete run.

        Raises:
            StoreError: they are missing or damaged.
        """
        return self._read("results.arrow", self.manifest()["files"])

    def _read(self, name: str, files: Mapping[str, str]) -> pa.Table:
        if name not in files:
            raise StoreError(
                f"store: {_MANIFEST} in {str(self.path)!r} is damaged: it does not list {name!r}"
            )
        return read_table(self.path / name, files[name])

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps the folder, which is made if need be, to this process, and clears it first.

        A killed writer may leave temporary files, and segments that no manifest names: those are
        removed. Files of other names are not ours and stay.

        Raises:
            StoreError: the folder cannot be made, or another process writes to it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = hold(self.path)
        except OSError as error:
            raise StoreError(
                f"store={str(self.path)!r} cannot be made: {error.strerror}"
            ) from error
        if handle is None:
            raise StoreError(
                f"store={str(self.path)!r} is being written by another process; wait for its end, "
                "or choose another folder"
            )
        try:
            for stray in [p for p in self.path.iterdir() if _TEMPORARY.fullmatch(p.name)]:
                stray.unlink(missing_ok=True)
            if self.exists:
                self._drop_segments({s["name"] for s in self.manifest()["segments"]})
            yield
        finally:
            os.close(handle)

    def _drop_segments(self, kept: Collection[str]) -> None:
        for stray in self.path.glob("segment-*.arrow"):
            if stray.name.split(".")[0] not in kept:
                stray.unlink()

    def begin(self, about: Mapping[str, Any]) -> None:
        """Writes a manifest without models.

        Raises:
            StoreError: a store is there already.
        """
        if self.exists:
            state = "complete" if self.manifest()["complete"] else "unfinished"
            todo = "load() it" if state == "complete" else "resume() it"
            raise StoreError(
                f"store={str(self.path)!r} already holds a {state} run; {todo}, remove it, or "
                "choose another folder"
            )
        self._write_manifest(
            {"format": FORMAT, "complete": False, "segments": [], "files": {}, **about}
        )

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        plain = json.loads(json.dumps(manifest, default=_plain))
        text = json.dumps({**plain, "checksum": _checksum(plain)}, indent=1)
        write_atomically(self.path / _MANIFEST, text.encode())

    def append(self, outcomes: list[Outcome]) -> None:
        """Adds finished groups as a segment."""
        if not outcomes:
            return
        manifest = self.manifest()
        number, files = len(manifest["segments"]), manifest["files"]
        for part, outcome in enumerate(outcomes):
            stem = f"segment-{number:06d}-{part:04d}"
            name = f"{stem}.results.arrow"
            files[name] = write_table(self.path / name, outcome.results)
            if len(outcome.groups):
                table = stack_to_table(outcome.stack, outcome.groups, outcome.config)
                name = f"{stem}.models.arrow"
                files[name] = write_table(self.path / name, table)
            manifest["segments"].append({"name": stem, "models": len(outcome.groups)})
        self._write_manifest(manifest)

    def outcomes(self, trust: bool) -> list[Outcome]:
        """Returns what finished segments hold."""
        manifest = self.manifest()
        found = []
        none = np.zeros(0, np.int64)
        files = manifest["files"]
        for segment in manifest["segments"]:
            results = self._read(f"{segment['name']}.results.arrow", files)
            stack: Stack = {}
            groups, config = none, none
            if segment["models"]:
                name = f"{segment['name']}.models.arrow"
                table = self._read(name, files)
                with understood(name):
                    stack, groups, config = table_to_stack(table, trust)
            found.append(Outcome(results, groups, config, stack))
        return found

    def finish(self, about: Mapping[str, Any], served: Served, results: pa.Table) -> None:
        """Writes merged models and results, says so in the manifest, then drops the segments."""
        tables = _key_tables("keys", served.keys)
        if served.parents is not None:
            tables |= _key_tables("parents", served.parents)
            tables["parent_slot"] = pa.table({"slot": served.parent_slot})
        if served.naming.classes is not None:
            tables["classes"] = pa.table({"class": pa.array(served.naming.classes)})
        tables["groups"] = pa.table(
            {"slot": served.slot, "constant": served.constant, "skipped": served.skipped}
        )
        number = np.arange(len(served.config))
        tables["models"] = stack_to_table(served.stack, number, served.config)
        tables["results"] = results
        files = {
            f"{name}.arrow": write_table(self.path / f"{name}.arrow", table)
            for name, table in tables.items()
        }
        self._write_manifest(
            {
                "format": FORMAT,
                "complete": True,
                "segments": [],
                "files": files,
                **about,
                "key_names": list(served.keys.names),
                "parent_names": list(served.parents.names) if served.parents is not None else None,
                "fallback_slot": served.fallback,
                "has_classes": served.naming.classes is not None,
            }
        )
        self._drop_segments(())

    def served(self, model: GroupModel, trust: bool) -> Served:
        """Returns the models, mapped from the disk.

        Raises:
            StoreError: the run did not finish, a file is damaged, or `trust` is needed.
        """
        manifest = self.manifest()
        if not manifest["complete"]:
            raise StoreError(
                f"store={str(self.path)!r} is of a run that did not finish; "
                "finish it with resume(store)"
            )
        with understood(repr(str(self.path))):
            return self._served(manifest, model, trust)

    def _served(self, manifest: Mapping[str, Any], model: GroupModel, trust: bool) -> Served:
        files = manifest["files"]
        classes = None
        if manifest["has_classes"]:
            classes = self._read("classes.arrow", files).column(0).to_numpy()
        stack, _, config = table_to_stack(self._read("models.arrow", files), trust)
        groups = self._read("groups.arrow", files)
        parents, parent_slot = None, np.zeros(0, np.int64)
        if manifest["parent_names"]:
            parents = self._keys("parents", manifest["parent_names"], files)
            parent_slot = self._read("parent_slot.arrow", files).column(0).to_numpy()
        return Served(
            model=model,
            configs=tuple(manifest["configs"]),
            keys=self._keys("keys", manifest["key_names"], files),
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

    def _keys(self, name: str, names: list[str], files: Mapping[str, str]) -> KeyTable:
        combos = self._read(f"{name}.arrow", files).column(0).to_numpy()
        levels = []
        for j in range(len(names)):
            column = self._read(f"{name}-{j}.arrow", files).column(0)
            levels.append(column.chunk(0) if column.num_chunks else column.combine_chunks())
        return rebuild(names, levels, combos)


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _key_tables(name: str, keys: KeyTable) -> dict[str, pa.Table]:
    levels = {f"{name}-{j}": pa.table({"level": level}) for j, level in enumerate(keys.levels)}
    return {name: pa.table({"combo": keys.combos}), **levels}


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

    with understood("the manifest's model"):
        if not about["needs_pickle"]:
            made: GroupModel = models.get(about["name"])(**about["params"])
            return made
        if not trust:
            raise StoreError(
                "store: its models are pickled Python objects, and loading those runs whatever "
                "code they name; if you trust who wrote it, use load(path, trust=True)"
            )
        pickled: GroupModel = pickle.loads(bytes.fromhex(about["pickle"]))
        return pickled


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return list(value)
    if callable(value) and getattr(value, "__qualname__", "<").isidentifier():
        return f"{value.__module__}:{value.__qualname__}"
    raise TypeError(f"{type(value).__name__} is not a plain value")
