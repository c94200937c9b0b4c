"""Models for groups that have none: one of all rows, or one for each parent key."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kingpin_ray._blocks import Block
from kingpin_ray._driver import make_chunks, run_local
from kingpin_ray._engine import Task, concat_stacks, fit_block, fit_sums
from kingpin_ray._frame import Frame
from kingpin_ray._keys import encode
from kingpin_ray._served import MISSING
from kingpin_ray._streamed import Streamed

if TYPE_CHECKING:
    from kingpin_ray._parts import Parts
    from kingpin_ray._served import Served

_log = logging.getLogger(__name__)

GLOBAL_ROWS = 200_000
"""Rows, drawn by seed, that the global model is trained on when there are more.

Statistics of all rows are as quick as of some: where those are kept, all rows count.
"""


def add_fallback(
    served: Served,
    frame: Frame | Parts,
    task: Task,
    results: pa.Table,
    fallback: str | None,
) -> None:
    """Trains the fallback models and puts them behind the groups' own in `served`.

    Without a fallback, a group of one class gets that class as its constant answer.
    """
    config = _best_overall(task, results)
    single = replace(task, configs=(task.configs[config],), split=None, min_rows=1)
    if fallback == "parent":
        assert isinstance(frame, Frame)
        _add_parents(served, frame, single, config)
    if fallback is not None:
        _add_global(served, frame, single, config)
    if frame.classes is not None and served.fallback == MISSING:
        for g in np.flatnonzero((served.slot == MISSING) & ~served.skipped & (frame.counts > 0)):
            served.constant[g] = frame.only_class(int(g))


def _best_overall(task: Task, results: pa.Table) -> int:
    """Returns the setting with the best held-out score over all groups, weighted by rows."""
    if len(task.configs) == 1:
        return 0
    held = results.filter(pc.is_valid(results.column("fold")))
    held = held.filter(pc.is_valid(held.column("score")))
    if not held.num_rows:
        return 0
    config = held.column("config").to_numpy()
    weight = held.column("n_rows").to_numpy().astype(np.float64)
    score = held.column("score").to_numpy()
    total = np.bincount(config, weights=weight, minlength=len(task.configs))
    mean = np.bincount(config, weights=weight * score, minlength=len(task.configs))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(total > 0, mean / total, -np.inf)
    return int(np.argmax(mean))


def _append(served: Served, stack: dict[str, np.ndarray], config: int) -> int:
    """Returns the slot of the first of the models put behind the others."""
    first = len(served.config)
    count = len(next(iter(stack.values())))
    served.stack = concat_stacks([served.stack, stack])
    served.config = np.concatenate([served.config, np.full(count, config)])
    return first


def _add_global(served: Served, frame: Frame | Parts, task: Task, config: int) -> None:
    if isinstance(frame, Streamed):
        outcome = fit_sums(frame.overall(), task)
    else:
        block = _drawn(frame, task)
        if block is None:
            return
        outcome = fit_block(block, task)
    if len(outcome.groups):
        served.fallback = _append(served, outcome.stack, config)
    else:
        _log.warning(
            "no global fallback model: %s", outcome.results.column("error").to_pylist()[-1]
        )


def _drawn(frame: Frame | Parts, task: Task) -> Block | None:
    """Returns rows of all groups as one; None where none can be used."""
    usable = int(frame.counts.sum())
    positions = np.arange(min(usable, GLOBAL_ROWS))
    if usable > GLOBAL_ROWS:
        # One of each stretch of the data, which holds nothing as long as the data.
        rng = np.random.default_rng(int(frame.seeds[0] >> np.uint64(33)))
        edges = np.linspace(0, usable, GLOBAL_ROWS + 1).astype(np.int64)
        positions = rng.integers(edges[:-1], edges[1:])
    X, y = frame.sample_rows(positions)
    if not task.model.accepts_missing:
        finite = np.isfinite(X).all(axis=1)
        if not finite.all():
            X, y = X[finite], y[finite]
    if not len(y):
        return None
    return Block(
        X=X,
        y=y,
        offsets=np.array([0, len(y)]),
        groups=np.zeros(1, np.int64),
        seeds=frame.seeds[:1],
        n_classes=0 if frame.classes is None else len(frame.classes),
        n_dropped=np.zeros(1, np.int64),
        first=np.zeros(1, np.int64),
    )


def _add_parents(served: Served, frame: Frame, task: Task, config: int) -> None:
    """Children of a parent are neighbours in key order, so the rows need not be sorted again."""
    columns = [frame.keys.table.column(j) for j in range(len(frame.keys.names) - 1)]
    parent_of, parents = encode(columns, frame.keys.names[:-1])
    starts = np.flatnonzero(np.diff(parent_of, prepend=-1))
    above = replace(
        frame,
        keys=parents,
        offsets=np.append(frame.offsets[starts], frame.offsets[-1]),
        n_dropped=np.add.reduceat(frame.n_dropped, starts),
        seeds=frame.seeds[starts],
    )
    served.parents = parents
    served.parent_slot = np.full(len(parents), MISSING)
    for _, outcome in run_local(above, make_chunks(above.counts), task):
        if len(outcome.groups):
            first = _append(served, outcome.stack, config)
            served.parent_slot[outcome.groups] = first + np.arange(len(outcome.groups))
