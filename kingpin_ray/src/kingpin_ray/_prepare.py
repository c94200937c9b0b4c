"""From parameters and data of any kind to a run: what will be trained, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from scipy.sparse import issparse
from sklearn.utils.validation import check_array

from kingpin_ray import _plan
from kingpin_ray._errors import EmptyDataError, InputError, ParameterError
from kingpin_ray._folders import temporary_folder
from kingpin_ray._frame import Columns, array_columns, build_frame, columns_of, layout
from kingpin_ray._inputs import key_columns, one_column
from kingpin_ray._memory import available_memory, give_back
from kingpin_ray._parameters import seed_of, task_of
from kingpin_ray._run import Run
from kingpin_ray._scoring import SQUARED
from kingpin_ray._session import actor_count, ray_is_running, ray_session
from kingpin_ray._shuffle import Shuffled
from kingpin_ray._source import (
    Files,
    dataset_table,
    expand,
    is_dataset,
    is_path,
    read_paths,
)
from kingpin_ray._spill import Spilled
from kingpin_ray._streamed import Streamed

if TYPE_CHECKING:
    from contextlib import ExitStack

    from kingpin_ray._engine import Task


# Files whose wanted columns take more than this part of the free memory are spilled: compressed
# columns grow several times when they are read.
_MEMORY_SHARE = 8
# Statistics may take this part of the free memory; they are copied once when they grow.
_SUMS_SHARE = 4
_SPILL_PREFIX = "kingpin-spill-"
_SPILL_BYTES = 32 << 20
_TYPICAL_ROWS = 500


def open_data(estimator: Any, X: Any, *, reset: bool) -> tuple[Columns, bool]:
    """Returns the columns of an input, and whether it is an array of features alone."""
    if is_path(X):
        return columns_of(read_paths(X, _needed(estimator)), once=reset), False
    if is_dataset(X):
        return columns_of(dataset_table(X), once=reset), False
    if isinstance(X, (pa.Table, pa.RecordBatch)) or hasattr(X, "iloc"):
        return columns_of(X), False
    if issparse(X):
        raise InputError("sparse input is not supported; use X.toarray() where it fits memory")
    if isinstance(X, Mapping):
        return columns_of(X), False  # raises, naming what is allowed
    if isinstance(X, np.ma.MaskedArray) and X.dtype.kind in "biuf":
        X = np.where(np.ma.getmaskarray(X), np.nan, X.data)
    try:
        array = check_array(X, ensure_all_finite=False, dtype="numeric", estimator=estimator)
    except ValueError as error:
        raise InputError(
            f"X: {error} A pandas frame, an Arrow table, a Ray Dataset or a Parquet path will do "
            "as well as an array of rows and columns"
        ) from error
    if not reset and array.shape[1] != estimator.n_features_in_:
        raise InputError(
            f"X has {array.shape[1]} features, but {type(estimator).__name__} is expecting "
            f"{estimator.n_features_in_} features as input"
        )
    return array_columns(array), True


def _needed(estimator: Any) -> list[str] | None:
    """Returns the columns to read from a file, None for all."""
    if estimator.features is None:
        return None
    by = list(estimator.by) if isinstance(estimator.by, (list, tuple)) else [estimator.by]
    names = [*by, estimator.target, *estimator.features]
    return [str(name) for name in names if name is not None]


def prepare(
    estimator: Any, X: Any, y: Any, groups: Any, seed: int | None, session: ExitStack
) -> Run:
    """Returns what a call to `fit` or `resume` will do.

    Args:
        estimator: whose parameters count.
        X: as for `fit`.
        y: as for `fit`.
        groups: as for `fit`.
        seed: of folds and models; None draws one.
        session: keeps a Ray that had to be started for reading.

    Raises:
        ParameterError: a parameter has a value that is not allowed.
        InputError: the data cannot be used.
    """
    seed = seed_of(seed)
    task = task_of(estimator, seed)
    if (
        y is None
        and groups is None
        and estimator.target is not None
        and (is_path(X) or is_dataset(X))
    ):
        run = _prepare_parts(estimator, X, task, seed, session)
        if run is not None:
            return run
    data, features_only = open_data(estimator, X, reset=True)
    if y is None:
        if estimator.target is None:
            raise ParameterError(
                "requires y to be passed, but the target y is None; or name its column by target="
            )
        parts = layout(data.names, estimator.by, estimator.target, estimator.features)
    else:
        # X may hold the target still, as GridSearchCV hands it on: learning from it would leak.
        parts = layout(data.names, estimator.by, None, estimator.features, barred=estimator.target)
    frame = build_frame(
        data,
        parts,
        None if y is None else one_column(y, "y"),
        None if groups is None else key_columns(groups),
        task.model.classifier,
        seed,
    )
    give_back()
    task = _bound(task, parts.features, frame.classes)
    return Run(
        task=task,
        frame=frame,
        layout=parts,
        groups_apart=groups is not None,
        seed=seed,
        n_features_in=len(data.names) if features_only else len(parts.features),
        paths=expand(X) if is_path(X) else None,
    )


def _prepare_parts(estimator: Any, X: Any, task: Task, seed: int, session: ExitStack) -> Run | None:
    """Returns a run whose data is read in parts; None when it is read here and kept in memory."""
    plan = _plan.check_plan(estimator.plan)
    if estimator.fallback == "parent" or estimator.by is None:
        return None
    files = None
    if is_path(X):
        files = Files(X, _needed(estimator))
        names, rows = files.columns, files.n_rows
    elif plan == "local":
        return None
    else:
        names, rows = list(X.columns()), X.count()
    if rows == 0:
        raise EmptyDataError("the data has 0 rows; at least one sample is required")
    parts = layout(names, estimator.by, estimator.target, estimator.features)
    spills = False
    if files is not None and (plan == "local" or (plan == "auto" and not _ray_pays(
        estimator, task, rows, len(parts.features)
    ))):  # fmt: skip
        spills = files.column_bytes() > available_memory() // _MEMORY_SHARE
        if not spills:
            return None
    columns = [*parts.by, parts.target, *parts.features]
    frame: Shuffled | Spilled
    pieces: list[Any]
    if spills and files is not None:
        folder = session.enter_context(temporary_folder(_SPILL_PREFIX))
        pieces = files.parts(-(-files.column_bytes() // _SPILL_BYTES))
        if task.model.summable and task.scoring in SQUARED:
            budget = available_memory() // _SUMS_SHARE
            frame = Streamed(folder, pieces, columns, parts, seed, task.split, budget)
        else:
            frame = Spilled(folder, pieces, columns, parts, task.model.classifier, seed)
    else:
        ray = session.enter_context(ray_session(estimator.num_actors))
        workers = actor_count(ray, estimator.num_actors, 1 << 30)
        pieces = (
            list(files.parts(2 * workers))
            if files is not None
            else X.select_columns(columns).to_arrow_refs()
        )
        frame = Shuffled(ray, pieces, columns, parts, task.model.classifier, seed)
    task = _bound(task, parts.features, frame.classes)
    return Run(
        task=task,
        frame=frame,
        layout=parts,
        groups_apart=False,
        seed=seed,
        n_features_in=len(parts.features),
        paths=None if files is None else files.names,
    )


def _bound(task: Task, features: tuple[Any, ...], classes: Any) -> Task:
    """Returns a task whose model knows its columns and can learn the classes that are there."""
    model = task.model.bound(features)
    model.check_classes(0 if classes is None else len(classes))
    return replace(task, model=model)


def _ray_pays(estimator: Any, task: Task, rows: int, features: int) -> bool:
    """Returns whether Ray is predicted to save time; the groups are not known yet."""
    counts = np.full(max(rows // _TYPICAL_ROWS, 1), min(rows, _TYPICAL_ROWS))
    workers = _plan.count_workers(estimator.num_actors)
    cores = _plan.count_cores(estimator.num_actors)
    possible = _plan.walls(task, counts, features, 2, workers, ray_is_running(), cores)
    return possible["task"].seconds < possible["local"].seconds
