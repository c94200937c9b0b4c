"""Trains the groups of one block: screening, selection, the final fit, a record of each step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from kingpin_ray._blocks import Block
from kingpin_ray._scoring import SQUARED, scorer, squared_score
from kingpin_ray._sums import Sums, unusable
from kingpin_ray.models._base import Fitted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kingpin_ray._folds import Split
    from kingpin_ray.models._base import GroupModel, Stack

    Searched: TypeAlias = tuple[NDArray[np.float64], dict[tuple[int, int, int], str]]

S = TypeVar("S", Block, Sums)
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


@dataclass(frozen=True)
class Choice:
    """Held-out scores and the setting they speak for.

    Attributes:
        best: (G,) chosen configuration.
        score: (G,) its mean held-out score; NaN without one.
        scores: (G, configurations, folds), or None when nothing was held out.
        failed: why a score is missing, by (group, configuration, fold).
        seconds: time all of it took.
    """

    best: NDArray[np.int64]
    score: NDArray[np.float64]
    scores: NDArray[np.float64] | None = None
    failed: Mapping[tuple[int, int, int], str] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def none(cls, groups: int) -> Choice:
        """Returns the first configuration for everyone."""
        return cls(np.zeros(groups, np.int64), np.full(groups, np.nan))


def choose(
    scores: NDArray[np.float64], failed: Mapping[tuple[int, int, int], str], seconds: float
) -> Choice:
    """Returns the configuration with the best mean score of each group; the first one of equals."""
    mean = _mean_over_folds(scores)
    usable = ~np.isnan(mean)
    best = np.where(usable.any(axis=1), np.argmax(np.where(usable, mean, -np.inf), axis=1), 0)
    return Choice(best, mean[np.arange(len(best)), best], scores, failed, seconds)


def fit_block(block: Block, task: Task) -> Outcome:
    """Returns the models of a block's groups; a bad group is recorded, never raised."""
    model = task.model
    _, score_of = scorer(task.scoring, model.classifier)
    status, error = screen(block, task)
    good = np.flatnonzero(status == "ok")
    part = block.select(good)

    def search(some: Block, split: Split) -> Searched:
        return model.search(some, task.configs, split, score_of, task.scoring)

    def fit(some: Block, config: Mapping[str, Any]) -> tuple[Fitted, NDArray[np.float64]]:
        fitted = _fit_guarded(model.fit, some, config)
        score = np.full(some.n_groups, np.nan)
        kept = np.setdiff1d(np.arange(some.n_groups), np.fromiter(fitted.failed, np.int64))
        if task.split is None and fitted.errors is not None and task.scoring in SQUARED:
            score = squared_score(task.scoring, *fitted.errors)
        elif task.split is None and len(kept):
            held = some.select(kept)
            raw = fitted.seen
            if raw is None:
                raw = model.predict(fitted.stack, held.X, held.group_of_row(), block.n_classes)
            score[kept] = score_of(held.y, raw, held.offsets)
        return fitted, score

    choice = _choice(search, part, task)
    return finish(block, part, good, task, status, error, choice, fit)


def fit_sums(sums: Sums, task: Task) -> Outcome:
    """As `fit_block`, of groups of which only statistics are left; scores are of squared errors."""
    model = task.model
    status, error = verdicts(task, sums.counts, sums.missing, None)
    good = np.flatnonzero(status == "ok")
    part = sums.select(good)

    def search(some: Sums, split: Split) -> Searched:
        return model.search_sums(some, task.configs, split, task.scoring), {}

    def fit(some: Sums, config: Mapping[str, Any]) -> tuple[Fitted, NDArray[np.float64]]:
        fitted = _fit_guarded(model.fit_sums, some, config)
        if fitted.errors is None:  # some group failed
            return fitted, np.full(some.n_groups, np.nan)
        return fitted, squared_score(task.scoring, *fitted.errors)

    choice = _choice(search, part, task)
    return finish(sums, part, good, task, status, error, choice, fit)


def _choice(search: Callable[[S, Split], Searched], part: S, task: Task) -> Choice:
    if task.split is None or not part.n_groups:
        return Choice.none(part.n_groups)
    began = time.perf_counter()
    scores, failed = _search_guarded(search, part, task, task.split)
    return choose(scores, failed, time.perf_counter() - began)


def finish(
    block: Block | Sums,
    part: S,
    good: NDArray[np.int64],
    task: Task,
    status: NDArray[Any],
    error: dict[int, str],
    choice: Choice,
    fit: Callable[[S, Mapping[str, Any]], tuple[Fitted, NDArray[np.float64]]],
) -> Outcome:
    """Returns the outcome of the final fits.

    Args:
        block: all groups; its counts are recorded.
        part: the groups worth training.
        good: (groups of `part`,) their positions in `block`.
        task: what to do.
        status: (G,) of the screening; changed in place.
        error: its messages by position; changed in place.
        choice: which configuration each group of `part` gets.
        fit: returns models and training scores of some groups under one configuration; a stack of
            the models that did not fail.
    """
    record = _Record(block, task.plan)
    if choice.scores is not None:
        _, n_configs, n_folds = choice.scores.shape
        why: dict[tuple[int, int], dict[int, str]] = {}
        for (g, c, f), message in choice.failed.items():
            why.setdefault((c, f), {})[g] = message
        share = choice.seconds / (n_configs * n_folds)
        for c in range(n_configs):
            for f in range(n_folds):
                record.fold(good, c, f, choice.scores[:, c, f], why.get((c, f), {}), share)
    groups: list[NDArray[np.int64]] = []
    configs: list[NDArray[np.int64]] = []
    stacks: list[Stack] = []
    seconds = np.zeros(block.n_groups)
    score = np.full(block.n_groups, np.nan)
    score[good] = choice.score
    for c in np.unique(choice.best):
        at = np.flatnonzero(choice.best == c)
        began = time.perf_counter()
        some = part.select(at)
        fitted, seen = fit(some, task.configs[int(c)])
        kept = np.setdiff1d(np.arange(len(at)), np.fromiter(fitted.failed, np.int64))
        if task.split is None:
            score[good[at]] = seen
        spent = time.perf_counter() - began
        counts = block.counts[good[at]]
        seconds[good[at]] = spent * counts / max(int(counts.sum()), 1)
        for position, message in fitted.failed.items():
            status[good[at[position]]] = "error"
            error[int(good[at[position]])] = message
        status[good[at[fitted.unconverged]]] = "not_converged"
        if len(kept):
            stack = fitted.stack
            if len(next(iter(stack.values()))) > len(kept):
                stack = take_stack(stack, kept)
            groups.append(block.groups[good[at[kept]]])
            configs.append(np.full(len(kept), c))
            stacks.append(stack)
    chosen = np.full(block.n_groups, -1)
    chosen[good] = choice.best
    record.final(chosen, status, error, score, seconds)
    return Outcome(
        results=record.table(),
        groups=np.concatenate(groups) if groups else np.zeros(0, np.int64),
        config=np.concatenate(configs) if configs else np.zeros(0, np.int64),
        stack=concat_stacks(stacks),
    )


def screen(
    block: Block, task: Task, add: Callable[[NDArray[Any]], NDArray[Any]] | None = None
) -> tuple[NDArray[Any], dict[int, str]]:
    """Returns (G,) "ok" or why a group cannot be trained, and the reason in words by position.

    Args:
        block: the groups.
        task: what to do.
        add: sums an array over all workers, where each holds some rows of a group.
    """
    add = add or (lambda values: values)
    counts = add(block.counts)
    missing = np.zeros(block.n_groups, np.int64)
    if not task.model.accepts_missing:
        if block.X.size and not np.isfinite(block.X.sum()):
            missing = unusable(block)
        missing = add(missing)
    classes = None
    if task.model.classifier:
        classes = (add(block.class_counts()) > 0).sum(axis=1)
    return verdicts(task, counts, missing, classes)


def verdicts(
    task: Task,
    counts: NDArray[np.int64],
    missing: NDArray[np.int64],
    classes: NDArray[np.int64] | None,
) -> tuple[NDArray[Any], dict[int, str]]:
    """Returns what `screen` does.

    Args:
        task: what to do.
        counts: (G,) usable rows.
        missing: (G,) rows with a NaN or infinite feature; zeros if the model takes them.
        classes: (G,) distinct classes; None for regression.
    """
    status = np.full(len(counts), "ok", dtype=object)
    error: dict[int, str] = {}
    floor = max(task.min_rows, 1, task.split.min_rows if task.split else 1)
    for g in np.flatnonzero(counts < floor):
        status[g] = "too_few_rows"
        error[int(g)] = f"n_samples={counts[g]}, fewer than the {floor} it needs"
    for g in np.flatnonzero((missing > 0) & (status == "ok")):
        status[g] = "nan_features"
        error[int(g)] = (
            f"{missing[g]} of {counts[g]} rows have a NaN or infinite feature; "
            "impute them or use GBDT, which takes them"
        )
    if classes is not None:
        for g in np.flatnonzero((classes == 1) & (status == "ok")):
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


def _fit_guarded(
    train: Callable[[S, Sequence[Mapping[str, Any]]], list[Fitted]],
    part: S,
    config: Mapping[str, Any],
) -> Fitted:
    """Fits groups; when that raises, halves them until the groups that raise stand alone.

    The stack that comes back leaves out the groups that failed.
    """
    try:
        fitted = train(part, [config])[0]
    except MemoryError:
        raise
    except Exception as raised:
        if part.n_groups == 1:
            return Fitted({}, {0: f"{type(raised).__name__}: {raised}"})
        middle = part.n_groups // 2
        left = _fit_guarded(train, part.select(np.arange(middle)), config)
        right = _fit_guarded(train, part.select(np.arange(middle, part.n_groups)), config)
        return Fitted(
            concat_stacks([left.stack, right.stack]),
            {**left.failed, **{g + middle: m for g, m in right.failed.items()}},
            np.concatenate([left.unconverged, right.unconverged + middle]),
        )
    if fitted.failed:
        kept = np.setdiff1d(np.arange(part.n_groups), np.fromiter(fitted.failed, np.int64))
        stack = take_stack(fitted.stack, kept)
        return replace(fitted, stack=stack, seen=None, errors=None)
    return fitted


def _search_guarded(
    search: Callable[[S, Split], Searched], part: S, task: Task, split: Split
) -> Searched:
    try:
        return search(part, split)
    except MemoryError:
        raise
    except Exception as raised:
        if part.n_groups == 1:
            shape = (1, len(task.configs), split.n_folds)
            message = f"{type(raised).__name__}: {raised}"
            failed = {(0, c, f): message for c in range(shape[1]) for f in range(shape[2])}
            return np.full(shape, np.nan), failed
        middle = part.n_groups // 2
        left = _search_guarded(search, part.select(np.arange(middle)), task, split)
        right = _search_guarded(search, part.select(np.arange(middle, part.n_groups)), task, split)
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

    def __init__(self, block: Block | Sums, plan: str) -> None:
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
            pa.repeat(pa.scalar(self.plan, pa.string()), len(at)),
            pa.array(message, pa.string()),
        ]
        self.parts.append(pa.table(columns, schema=pa.schema(RESULT_FIELDS)))

    def table(self) -> pa.Table:
        return pa.concat_tables(self.parts).combine_chunks()
