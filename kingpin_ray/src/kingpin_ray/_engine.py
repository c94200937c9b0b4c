"""Trains the groups of one block: screening, selection, the final fit, a record of each step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kingpin_ray._scoring import scorer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block
    from kingpin_ray._folds import Split
    from kingpin_ray.models._base import GroupModel, Stack

SERVED = ("ok", "not_converged")
"""Statuses of a final fit whose model is used."""

RESULT_FIELDS = [
    pa.field("group", pa.int64()),
    pa.field("config", pa.int32()),
    pa.field("fold", pa.int32()),
    pa.field("status", pa.string()),
    pa.field("n_rows", pa.int64()),
    pa.field("n_dropped", pa.int64()),
    pa.field("score", pa.float64()),
    pa.field("seconds", pa.float64()),
    pa.field("plan", pa.string()),
    pa.field("error", pa.string()),
]


@dataclass(frozen=True)
class Task:
    """What to do with every group.

    Attributes:
        model: the model, its own parameters the defaults of every configuration.
        configs: parameter settings to choose from, at least one.
        split: held-out rows for the choice; None scores the training rows.
        scoring: a name `_scoring` knows.
        min_rows: a group with fewer rows is not trained.
        plan: recorded with each result.
    """

    model: GroupModel
    configs: tuple[Mapping[str, Any], ...]
    split: Split | None
    scoring: str
    min_rows: int
    plan: str


@dataclass
class Outcome:
    """What became of a block.

    Attributes:
        results: RESULT_FIELDS, a row per group, configuration and fold, and one (fold null) for
            each group's final model.
        groups: (M,) ids of the groups that have a model.
        config: (M,) the configuration each was trained with.
        stack: parameters of the M models.
    """

    results: pa.Table
    groups: NDArray[np.int64]
    config: NDArray[np.int64]
    stack: Stack


def fit_block(block: Block, task: Task) -> Outcome:
    """Returns the models of a block's groups; a bad group is recorded, never raised."""
    model = task.model
    _, score_of = scorer(task.scoring, model.classifier)
    status, error = screen(block, task)
    good = np.flatnonzero(status == "ok")
    part = block.select(good)
    n_configs = len(task.configs)
    record = _Record(block, task.plan)

    best = np.zeros(len(good), np.int64)
    chosen_score = np.full(len(good), np.nan)
    if task.split is not None and len(good):
        began = time.perf_counter()
        scores, failed = _search_guarded(model, part, task, score_of)
        spent = time.perf_counter() - began
        for c in range(n_configs):
            for f in range(task.split.n_folds):
                why = {g: m for (g, cc, ff), m in failed.items() if (cc, ff) == (c, f)}
                record.fold(good, c, f, scores[:, c, f], why, spent / n_configs / scores.shape[2])
        mean = _mean_over_folds(scores)
        usable = ~np.isnan(mean)
        best = np.where(usable.any(axis=1), np.argmax(np.where(usable, mean, -np.inf), axis=1), 0)
        chosen_score = mean[np.arange(len(good)), best]

    groups: list[NDArray[np.int64]] = []
    configs: list[NDArray[np.int64]] = []
    stacks: list[Stack] = []
    seconds = np.zeros(block.n_groups)
    score = np.full(block.n_groups, np.nan)
    score[good] = chosen_score
    for c in np.unique(best):
        at = np.flatnonzero(best == c)
        began = time.perf_counter()
        some = part.select(at)
        fit = _fit_guarded(model, some, task.configs[int(c)])
        kept = good[at[fit.positions]]
        if task.split is None and len(fit.positions):
            seen = some.select(fit.positions)
            raw = fit.seen
            if raw is None:
                raw = model.predict(fit.stack, seen.X, seen.group_of_row(), block.n_classes)
            score[kept] = score_of(seen.y, raw, seen.offsets)
        spent = time.perf_counter() - began
        seconds[good[at]] = spent * some.counts / max(int(some.counts.sum()), 1)
        for position, message in fit.failed.items():
            status[good[at[position]]] = "error"
            error[int(good[at[position]])] = message
        status[good[at[fit.unconverged]]] = "not_converged"
        if len(kept):
            groups.append(block.groups[kept])
            configs.append(np.full(len(kept), c))
            stacks.append(fit.stack)
    chosen = np.full(block.n_groups, -1)
    chosen[good] = best
    record.final(chosen, status, error, score, seconds)
    return Outcome(
        results=record.table(),
        groups=np.concatenate(groups) if groups else np.zeros(0, np.int64),
        config=np.concatenate(configs) if configs else np.zeros(0, np.int64),
        stack=concat_stacks(stacks),
    )


def screen(block: Block, task: Task) -> tuple[NDArray[Any], dict[int, str]]:
    """Returns (G,) "ok" or why a group cannot be trained, and the reason in words by position."""
    status = np.full(block.n_groups, "ok", dtype=object)
    error: dict[int, str] = {}
    floor = max(task.min_rows, 1, task.split.min_rows if task.split else 1)
    for g in np.flatnonzero(block.counts < floor):
        status[g] = "too_few_rows"
        error[int(g)] = f"n_samples={block.counts[g]}, fewer than the {floor} it needs"
    if not task.model.accepts_missing and block.X.size and not np.isfinite(block.X.sum()):
        bad = ~np.isfinite(block.X).all(axis=1)
        count = np.bincount(block.group_of_row()[bad], minlength=block.n_groups)
        for g in np.flatnonzero((count > 0) & (status == "ok")):
            status[g] = "nan_features"
            error[int(g)] = (
                f"{count[g]} of {block.counts[g]} rows have a NaN or infinite feature; "
                "impute them or use GBDT, which takes them"
            )
    if task.model.classifier:
        present = (block.class_counts() > 0).sum(axis=1)
        for g in np.flatnonzero((present == 1) & (status == "ok")):
            status[g] = "single_class"
            error[int(g)] = "every row has the same class"
    return status, error


def failed_outcome(block: Block, task: Task, message: str) -> Outcome:
    """Returns the record of a block that could not be trained at all (its worker died, say)."""
    record = _Record(block, task.plan)
    status, error = screen(block, task)
    for g in np.flatnonzero(status == "ok"):
        status[g] = "error"
        error[int(g)] = message
    nothing = np.full(block.n_groups, np.nan)
    record.final(np.full(block.n_groups, -1), status, error, nothing, nothing * 0)
    none = np.zeros(0, np.int64)
    return Outcome(record.table(), none, none, {})


def concat_stacks(stacks: Sequence[Stack]) -> Stack:
    """Returns one stack of all the models, in order."""
    stacks = [stack for stack in stacks if stack]
    if not stacks:
        return {}
    return {name: np.concatenate([stack[name] for stack in stacks]) for name in stacks[0]}


def take_stack(stack: Stack, at: NDArray[np.int64]) -> Stack:
    """Returns the stack of some of the models."""
    return {name: values[at] for name, values in stack.items()}


@dataclass
class _Guarded:
    positions: NDArray[np.int64]
    stack: Stack
    failed: dict[int, str]
    unconverged: NDArray[np.int64]
    seen: NDArray[np.float64] | None = None


def _fit_guarded(model: GroupModel, block: Block, config: Mapping[str, Any]) -> _Guarded:
    """Fits a block; when that raises, halves it until the groups that raise stand alone."""
    try:
        fitted = model.fit(block, [config])[0]
    except MemoryError:
        raise
    except Exception as raised:
        if block.n_groups == 1:
            message = f"{type(raised).__name__}: {raised}"
            none = np.zeros(0, np.int64)
            return _Guarded(none, {}, {0: message}, none)
        middle = block.n_groups // 2
        left = _fit_guarded(model, block.select(np.arange(middle)), config)
        right = _fit_guarded(model, block.select(np.arange(middle, block.n_groups)), config)
        return _Guarded(
            np.concatenate([left.positions, right.positions + middle]),
            concat_stacks([left.stack, right.stack]),
            {**left.failed, **{g + middle: m for g, m in right.failed.items()}},
            np.concatenate([left.unconverged, right.unconverged + middle]),
        )
    positions = np.setdiff1d(np.arange(block.n_groups), np.fromiter(fitted.failed, np.int64))
    stack = fitted.stack
    if fitted.failed:
        stack = take_stack(stack, positions)
    seen = None if fitted.failed else fitted.seen
    return _Guarded(positions, stack, fitted.failed, fitted.unconverged, seen)


def _search_guarded(
    model: GroupModel, block: Block, task: Task, score_of: Callable[..., Any]
) -> tuple[NDArray[np.float64], dict[tuple[int, int, int], str]]:
    assert task.split is not None
    try:
        return model.search(block, task.configs, task.split, score_of, task.scoring)
    except MemoryError:
        raise
    except Exception as raised:
        if block.n_groups == 1:
            shape = (1, len(task.configs), task.split.n_folds)
            message = f"{type(raised).__name__}: {raised}"
            failed = {(0, c, f): message for c in range(shape[1]) for f in range(shape[2])}
            return np.full(shape, np.nan), failed
        middle = block.n_groups // 2
        left = _search_guarded(model, block.select(np.arange(middle)), task, score_of)
        right = _search_guarded(
            model, block.select(np.arange(middle, block.n_groups)), task, score_of
        )
        moved = {(g + middle, c, f): m for (g, c, f), m in right[1].items()}
        return np.concatenate([left[0], right[0]]), {**left[1], **moved}


def _mean_over_folds(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns (G, C) means over the folds that have a score; NaN where none has."""
    counted = ~np.isnan(scores)
    total = np.where(counted, scores, 0.0).sum(axis=2)
    with np.errstate(invalid="ignore"):
        return np.where(counted.any(axis=2), total / counted.sum(axis=2), np.nan)


class _Record:
    """Collects result rows by column."""

    def __init__(self, block: Block, plan: str) -> None:
        self.block = block
        self.plan = plan
        self.parts: list[pa.Table] = []

    def fold(
        self,
        good: NDArray[np.int64],
        config: int,
        fold: int,
        score: NDArray[np.float64],
        why: dict[int, str],
        spent: float,
    ) -> None:
        counts = self.block.counts[good]
        status = np.full(len(good), "ok", object)
        message = np.full(len(good), None, object)
        for g, text in why.items():
            status[g] = "single_class" if text == "single_class" else "error"
            message[g] = "the training rows hold one class" if text == "single_class" else text
        share = spent * counts / max(int(counts.sum()), 1)
        n = len(good)
        self._add(good, np.full(n, config), np.full(n, fold), status, score, share, message)

    def final(
        self,
        config: NDArray[np.int64],
        status: NDArray[Any],
        error: dict[int, str],
        score: NDArray[np.float64],
        seconds: NDArray[np.float64],
    ) -> None:
        everyone = np.arange(self.block.n_groups)
        message = np.full(len(everyone), None, object)
        for g, text in error.items():
            message[g] = text
        none = np.full(len(everyone), -1)
        self._add(everyone, config, none, status, score, seconds, message)

    def _add(
        self,
        at: NDArray[np.int64],
        config: NDArray[np.int64],
        fold: NDArray[np.int64],
        status: NDArray[Any],
        score: NDArray[np.float64],
        seconds: NDArray[np.float64],
        message: NDArray[Any],
    ) -> None:
        block = self.block
        columns = [
            pa.array(block.groups[at]),
            pa.array(config.astype(np.int32), mask=config < 0),
            pa.array(fold.astype(np.int32), mask=fold < 0),
            pa.array(status, pa.string()),
            pa.array(block.counts[at]),
            pa.array(block.n_dropped[at]),
            pa.array(score, mask=np.isnan(score)),
            pa.array(seconds),
            pa.array([self.plan] * len(at), pa.string()),
            pa.array(message, pa.string()),
        ]
        self.parts.append(pa.table(columns, schema=pa.schema(RESULT_FIELDS)))

    def table(self) -> pa.Table:
        return pa.concat_tables(self.parts).combine_chunks()
