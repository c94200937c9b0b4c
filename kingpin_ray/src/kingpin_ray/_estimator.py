"""The estimator: one call trains, selects and keeps a model for every group."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from sklearn.base import BaseEstimator
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from kingpin_ray import _plan
from kingpin_ray._assemble import assemble
from kingpin_ray._blocks import offsets_of
from kingpin_ray._driver import make_chunks, remaining
from kingpin_ray._errors import InputError, ParameterError, StoreError
from kingpin_ray._fallback import add_fallback
from kingpin_ray._frame import Columns, Frame, layout
from kingpin_ray._inputs import key_columns, one_column
from kingpin_ray._keys import encode
from kingpin_ray._memory import give_back
from kingpin_ray._parameters import as_model, task_of
from kingpin_ray._prepare import open_data, prepare
from kingpin_ray._progress import Progress
from kingpin_ray._report import write_report
from kingpin_ray._result_table import raise_bad, with_keys
from kingpin_ray._run import Run, adopt, set_names
from kingpin_ray._schedule import assignment_of, run_chunks
from kingpin_ray._scoring import scorer
from kingpin_ray._serving import BatchPredictor
from kingpin_ray._store import Store, restore_model, understood
from kingpin_ray._targets import held_truth
from kingpin_ray._views import Estimators
from kingpin_ray.models._base import Naming
from kingpin_ray.models._sklearn import PerGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kingpin_ray._engine import Outcome
    from kingpin_ray._plan import Assignment


def _predicts_classes(estimator: GroupedEstimator) -> bool:
    try:
        return as_model(estimator.model).classifier
    except ParameterError:  # `fit` will say so
        return False


SEGMENT_EVERY_S = 2.0
"""Finished groups wait at most this long (and until their chunk is done) to be written."""


class GroupedEstimator(BaseEstimator):  # type: ignore[misc]
    """Trains a model for every group of a table, thousands at once.

    Args:
        model: `Linear()`, `Ridge()`, `Logistic()` or another model of `kingpin_ray.models`, or any
            scikit-learn estimator, which is then fitted group by group.
        by: key column, or a list of them; a number for a column of an array. None with `groups`
            given to `fit`, or for one model of all rows.
        target: column to predict; None when `y` is given to `fit`. It is never a feature, also
            when `y` is given. Rows without a (finite) target are dropped and counted.
        features: columns to learn from; None for all others.
        param_grid: as of `sklearn.model_selection.ParameterGrid`; the best setting of each group is
            chosen by held-out score.
        cv: folds (2 or more), or the share of rows to hold out once. None: 5 folds when there is
            something to choose, else scores are those of the training rows.
        scoring: a scikit-learn name such as "neg_log_loss", "roc_auc", "r2"; None for accuracy or
            r2.
        min_rows: groups with fewer rows are bad.
        on_bad: what becomes of a group that cannot be trained (too few rows, one class, NaN
            features, an error): "fallback" serves it by the fallback model, "skip" leaves it
            without a model, "raise" ends `fit` with an error. It is recorded in `results_` anyway.
        fallback: "global" trains one model on all rows, "parent" one for each value of the key
            columns but the last (and a global one), for bad and for unseen groups; None has none.
        plan: "local" trains in this process; "task" places whole groups on Ray actors; "data"
            splits every group's rows over all actors and trains in step, one exchange a step for
            all models (gradient accumulation parallelism); "grouped" does that for groups too big
            for one actor and places the others whole; "auto" is "local" or "task", whichever is
            predicted to be faster.
        store: folder that takes finished groups during `fit`, so that a killed run can be resumed;
            None keeps models in memory until `save`.
        num_actors: Ray actors of one CPU each; None for all free CPUs.
        random_state: seed of folds and of models that draw numbers; None draws a fresh one.
        progress: whether to show a bar when standard error is a terminal.
        n_iter: settings to draw at random (by `random_state`) from `param_grid`, whose values may
            then be distributions with a method `rvs`, as of
            `sklearn.model_selection.RandomizedSearchCV`; None to try the whole grid.

    Attributes:
        results_: Arrow table, a row per group, configuration and fold, and one with fold null for
            each group's final model: key columns, config, params, fold, status, n_rows, n_dropped,
            score, seconds, plan, error.
        best_params_: chosen setting by key.
        estimators_: by key, the model as an object of its host library, made when asked for.
        classes_: the classes, for classifiers.
        plan_: the plan that was used.
        bytes_read_: bytes that tasks took from Parquet files, each byte once.

    Example:
        >>> import pandas as pd
        >>> from kingpin_ray import GroupedEstimator, Linear
        >>> data = pd.DataFrame({"shop": list("aabb"), "day": [1, 2, 1, 2], "sold": [3, 5, 4, 3]})
        >>> model = GroupedEstimator(Linear(), by="shop", target="sold").fit(data)
        >>> model.predict(pd.DataFrame({"shop": ["a", "b"], "day": [3, 3]})).round(6).tolist()
        [7.0, 2.0]
    """

    def __init__(
        self,
        model: Any,
        by: Any = None,
        target: Any = None,
        features: Sequence[Any] | None = None,
        param_grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]] | None = None,
        cv: float | None = None,
        scoring: str | None = None,
        min_rows: int = 2,
        on_bad: str = "fallback",
        fallback: str | None = "global",
        plan: str = "auto",
        store: str | os.PathLike[str] | None = None,
        num_actors: int | None = None,
        random_state: int | None = None,
        progress: bool = True,
        n_iter: int | None = None,
    ) -> None:
        self.model = model
        self.by = by
        self.target = target
        self.features = features
        self.param_grid = param_grid
        self.cv = cv
        self.scoring = scoring
        self.min_rows = min_rows
        self.on_bad = on_bad
        self.fallback = fallback
        self.plan = plan
        self.store = store
        self.num_actors = num_actors
        self.random_state = random_state
        self.progress = progress
        self.n_iter = n_iter

    def fit(self, X: Any, y: Any = None, groups: Any = None) -> GroupedEstimator:
        """Trains every group and returns itself.

        Args:
            X: pandas DataFrame, Arrow table, Ray Dataset, Parquet path, glob or list of them; or
                an (N, D) array, with `y`. Ray Datasets, and Parquet files that are large or when
                `plan="task"`, are read in parts by Ray tasks and never pass through this process.
            y: (N,) target; None to take the column `target`.
            groups: (N,) keys, or (N, k) for composite ones; None to take the columns `by`.

        Raises:
            ParameterError: a parameter has a value that is not allowed.
            InputError: the data cannot be used; its subclasses say why.
            BadGroupError: a group is bad and `on_bad="raise"`.
            ResourceError: the Ray cluster lacks the CPUs.
        """
        with ExitStack() as session:
            run = prepare(self, X, y, groups, self.random_state, session)
            assignment = assignment_of(self.plan, run, self.num_actors)
            store = None if self.store is None else Store(self.store)
            about = run.about(self, assignment, None if store is None else run.fingerprint())
            if store is not None:
                session.enter_context(store.writing())
                store.begin(about)
            return self._train(run, [], store, assignment, about)

    def resume(
        self,
        store: str | os.PathLike[str],
        X: Any = None,
        y: Any = None,
        groups: Any = None,
        *,
        trust: bool = False,
    ) -> GroupedEstimator:
        """Finishes a run that was killed, and returns itself; groups in the store are not redone.

        Args:
            store: the folder that `fit` was given as `store`.
            X: the same data; None to read the Parquet files that `fit` read.
            y: as for `fit`.
            groups: as for `fit`.
            trust: whether pickled models in the store may be loaded, which runs what they name.

        Raises:
            StoreError: the store is of other data or other parameters, cannot be read, or another
                process writes to it.
        """
        kept = Store(store)
        manifest = kept.manifest()
        if X is None:
            if manifest["paths"] is None:
                raise StoreError(
                    f"store={os.fspath(store)!r} was trained on data in memory; give the same data "
                    "to resume(store, data)"
                )
            X = manifest["paths"]
        with ExitStack() as session:
            session.enter_context(kept.writing())
            manifest = kept.manifest()
            if manifest["fingerprint"] is None:
                raise StoreError(
                    f"store={os.fspath(store)!r} was written by save(), so nothing of it is left "
                    "to do; load() it"
                )
            run = prepare(self, X, y, groups, manifest["seed"], session)
            if run.fingerprint() != manifest["fingerprint"]:
                raise StoreError(
                    f"store={os.fspath(store)!r} is of a run with other data, model, grid, cv or "
                    "min_rows; make the estimator with the same parameters and give it the same "
                    "data"
                )
            if manifest["complete"]:
                return adopt(self, kept, trust)
            before = manifest.get("assignment")
            assignment = assignment_of(self.plan, run, self.num_actors, before)
            about = run.about(self, assignment, manifest["fingerprint"])
            return self._train(run, kept.outcomes(trust), kept, assignment, about)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all models, keys and results to a new folder.

        Raises:
            StoreError: the folder holds a store already, or the disk refuses.
        """
        check_is_fitted(self, "_served")
        kept = Store(path)
        with kept.writing():
            kept.begin(self._about)
            kept.finish(self._about, self._served, self.results_)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, trust: bool = False) -> GroupedEstimator:
        """Returns the estimator that a folder holds; models are mapped from disk, not read.

        Args:
            path: what `save`, or `fit` with `store`, wrote.
            trust: whether pickled models may be loaded, which runs whatever code they name.

        Raises:
            StoreError: there is no complete store, it is damaged, or needs `trust`.
        """
        kept = Store(path)
        manifest = kept.manifest()
        model = restore_model(manifest["model"], trust)
        if isinstance(model, PerGroup):
            model = model.estimator
        with understood("the manifest's estimator"):
            made = cls(model, **manifest["estimator"])
        return adopt(made, kept, trust)

    def _train(
        self,
        run: Run,
        outcomes: list[Outcome],
        store: Store | None,
        assignment: Assignment,
        about: dict[str, Any],
    ) -> GroupedEstimator:
        frame, task = run.frame, run.task
        if not isinstance(frame, Frame):
            self.bytes_read_ = frame.bytes_read
        began = time.perf_counter()
        outcomes = [*outcomes, *self._outcomes(run, outcomes, store, assignment)]
        naming = Naming(run.layout.features, frame.classes)
        give_back()
        results, served = assemble(outcomes, frame.keys, task, naming)
        outcomes.clear()
        give_back()
        if self.on_bad == "raise" or not (run.layout.by or run.groups_apart):
            raise_bad(results, frame)
        if self.on_bad == "skip":
            served.skipped = served.slot < 0
        add_fallback(served, frame, task, results, self.fallback)
        self.results_ = with_keys(results, frame, task, self.by)
        self.plan_ = assignment.plan
        self._walls = (assignment.seconds, time.perf_counter() - began)
        self._served = served
        self._layout = run.layout
        self._groups_apart = run.groups_apart
        self._about = about
        set_names(self, run.n_features_in, naming)
        if store is not None:
            store.finish(self._about, served, self.results_)
        return self

    def _outcomes(
        self, run: Run, before: list[Outcome], store: Store | None, assignment: Assignment
    ) -> list[Outcome]:
        """Returns what became of the groups that `before` lacks, written to the store as it comes.

        What came after the last segment is not in the store yet.
        """
        counts = run.frame.counts
        chunks = remaining(make_chunks(counts), before)
        found: list[Outcome] = []
        written, last = 0, time.monotonic()
        with Progress(len(counts), bool(self.progress)) as bar:
            for chunk, outcome in run_chunks(assignment, run, chunks, self.num_actors):
                found.append(outcome)
                bad = len(chunk.groups) - len(outcome.groups)
                bar.add(len(chunk.groups), int(counts[chunk.groups].sum()), bad)
                if store is not None and time.monotonic() - last >= SEGMENT_EVERY_S:
                    store.append(found[written:])
                    written, last = len(found), time.monotonic()
        return found

    def _raw(self, X: Any, groups: Any) -> tuple[NDArray[np.float64], Columns, list[pa.Array]]:
        """Returns values or probabilities, the data, and the key columns."""
        check_is_fitted(self, "_served")
        data, _ = open_data(self, X, reset=False)
        parts, served = self._layout, self._served
        own = served.model.ignored()  # by name, or by position once bound
        ignored = {n if n in parts.features else parts.features[n] for n in own}
        spare = ignored - set(data.names)
        needed = [name for name in parts.features if name not in spare]
        layout(data.names, None if self._groups_apart else list(parts.by) or None, None, needed)
        if self._groups_apart:
            if groups is None:
                raise InputError("groups: the model was fitted with groups; give one for each row")
            keys = key_columns(groups)
        elif parts.by:
            keys = [data.get(name) for name in parts.by]
        else:
            keys = [pa.nulls(data.n_rows, pa.int8())]
        for column in keys:
            if len(column) != data.n_rows:
                raise InputError(f"groups has {len(column)} entries for {data.n_rows} rows of X")
        matrix = np.zeros((data.n_rows, len(parts.features)))
        for j, name in enumerate(parts.features):
            if name not in spare:
                matrix[:, j] = data.numbers(name)
        if not served.model.accepts_missing and not np.isfinite(matrix).all():
            rows = int((~np.isfinite(matrix).all(axis=1)).sum())
            raise InputError(
                f"Input X contains NaN or infinity in {rows} of {data.n_rows} rows, which "
                f"{type(served.model).__name__} cannot take; impute them or use GBDT"
            )
        plain = [k.combine_chunks() if isinstance(k, pa.ChunkedArray) else k for k in keys]
        classes = served.naming.classes
        found = served.predict(matrix, plain, 0 if classes is None else len(classes))
        return found, data, plain

    def predict(self, X: Any, groups: Any = None) -> NDArray[Any]:
        """Returns (N,) predictions of each row by its group's model.

        Args:
            X: as for `fit`; the target may be absent.
            groups: keys, if the model was fitted with `groups`.

        Raises:
            UnknownGroupError: rows belong to groups without a model, and there is no fallback.
            InputError: a column is missing or cannot be used.
        """
        raw = self._raw(X, groups)[0]
        classes = self._served.naming.classes
        return raw if classes is None else classes[raw.argmax(axis=1)]

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, RegressorTags

        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        if _predicts_classes(self):
            tags.estimator_type = "classifier"
            tags.classifier_tags = ClassifierTags()
        else:
            tags.estimator_type = "regressor"
            tags.regressor_tags = RegressorTags()
        return tags

    @available_if(_predicts_classes)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """Returns (N, K) probabilities in the order of `classes_`; classes a group never saw get 0.

        Raises:
            AttributeError: the model is a regressor.
            UnknownGroupError: rows belong to groups without a model, and there is no fallback.
        """
        return self._raw(X, groups)[0]

    def score(self, X: Any, y: Any = None, groups: Any = None, *, average: str = "rows") -> float:
        """Returns the score under `scoring` (accuracy or r2 by default).

        Rows without a target are left out, as in `fit`.

        Args:
            X: as for `predict`.
            y: (N,) target; None to take the column `target`.
            groups: keys, if the model was fitted with `groups`.
            average: "rows" scores all rows together; "groups" is the plain mean of the scores of
                the groups, in which a small group counts as much as a large one.

        Raises:
            ParameterError: `average` is neither.
            InputError: there is no target, or it cannot be used.
        """
        if average not in ("rows", "groups"):
            raise ParameterError(f"average={average!r}: choose 'rows' or 'groups'")
        raw, data, keys = self._raw(X, groups)
        if y is None and self._layout.target is None:
            raise InputError("y: the model was fitted with y apart; give the true y to score")
        if y is None:
            layout(data.names, None, self._layout.target, None)
        name = "y" if y is not None else str(self._layout.target)
        column = one_column(y, "y") if y is not None else data.get(self._layout.target)
        if len(column) != len(raw):
            raise InputError(f"y has {len(column)} entries for {len(raw)} rows of X")
        classes = self._served.naming.classes
        known, score_of = scorer(self.scoring, classes is not None)
        truth, kept = held_truth(column, name, classes, known)
        owner: NDArray[np.integer] = np.zeros(len(raw), np.int64)
        if average == "groups":
            owner, _ = encode(keys, [str(j) for j in range(len(keys))])
        order = np.flatnonzero(kept)[np.argsort(owner[kept], kind="stable")]
        sizes = np.bincount(owner[kept])
        scores = score_of(truth[order], raw[order], offsets_of(sizes[sizes > 0]))
        return float(np.nanmean(scores))

    def as_map_batches(self, *, proba: bool = False) -> BatchPredictor:
        """Returns a function for `ray.data.Dataset.map_batches(..., batch_format="pyarrow")`.

        Args:
            proba: add a column for each class's probability instead of `prediction`.
        """
        check_is_fitted(self, "_served")
        return BatchPredictor(self, proba)

    def explain(self) -> pa.Table:
        """Returns what was predicted and what was measured, by plan and size of group.

        Columns: plan, rows_from (groups of that many rows up to four times as many), groups, rows,
        predicted_seconds and measured_seconds: of one core, or of all workers together for groups
        that were split. A last row, plan "whole run", has the wall seconds on which the plan was
        chosen (not after `load`). `calibrate` improves the prediction.
        """
        check_is_fitted(self, "_served")
        keys = [str(name) for name in self.results_.column_names]
        at = keys.index("config")
        group = self._served.keys.lookup([self.results_.column(j) for j in range(at)])
        rows = self.results_.select(["fold", "status", "n_rows", "seconds", "plan"])
        rows = rows.append_column("group", pa.array(group))
        classes = self._served.naming.classes
        return _plan.explain(
            rows,
            task_of(self, self._about["seed"]),
            len(self._layout.features),
            0 if classes is None else len(classes),
            _plan.count_workers(self.num_actors),
            getattr(self, "_walls", None),
        )

    def report(self, path: str | os.PathLike[str], *, worst: int = 15) -> dict[str, float]:
        """Writes a page about the run, and returns its summary.

        The page shows how the scores are spread, the worst groups, the bad groups with their
        errors, and the time by plan.

        Args:
            path: file ending in .html (one file, nothing to load beside it) or .png.
            worst: groups to name.

        Returns:
            groups, bad_groups, rows, rows_dropped, and the mean score in which all rows
            (mean_score_by_rows) or all groups (mean_score_by_groups) count alike.

        Raises:
            ParameterError: the ending is another, or `worst` is no number of at least 1.
            MissingDependencyError: matplotlib is not installed.
            StoreError: the file cannot be written.
        """
        check_is_fitted(self, "_served")
        name, _ = scorer(self.scoring, self._served.naming.classes is not None)
        return write_report(self.results_, name, path, worst)

    @property
    def estimators_(self) -> Mapping[Any, Any]:
        """By key, the model of each trained group as an object of its host library."""
        check_is_fitted(self, "_served")
        return Estimators(self._served)

    @property
    def best_params_(self) -> dict[Any, dict[str, Any]]:
        """The chosen setting of each trained group, by key."""
        check_is_fitted(self, "_served")
        return self._served.best_params()
