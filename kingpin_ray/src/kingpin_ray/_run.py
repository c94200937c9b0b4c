"""One run: its task and data, what a store says of it, and an estimator made from a store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kingpin_ray._frame import Layout
from kingpin_ray._parameters import as_model
from kingpin_ray._store import describe_model, restore_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kingpin_ray._engine import Task
    from kingpin_ray._frame import Frame
    from kingpin_ray._plan import Assignment
    from kingpin_ray._shuffle import Shuffled
    from kingpin_ray._spill import Spilled
    from kingpin_ray._store import Store
    from kingpin_ray.models._base import Naming

E = TypeVar("E", bound=Any)

_KEPT_PARAMETERS = (
    "by",
    "target",
    "features",
    "param_grid",
    "cv",
    "scoring",
    "min_rows",
    "on_bad",
    "fallback",
    "plan",
    "num_actors",
    "random_state",
)


@dataclass(frozen=True)
class Run:
    """What a call to `fit` will do.

    Attributes:
        task: what to do with every group.
        frame: the data.
        layout: which columns are what.
        groups_apart: whether the keys came as `groups`.
        seed: of folds and models.
        n_features_in: scikit-learn's count of input columns.
        paths: Parquet files the data came from; None for data in memory.
    """

    task: Task
    frame: Frame | Shuffled | Spilled
    layout: Layout
    groups_apart: bool
    seed: int
    n_features_in: int
    paths: list[str] | None

    def fingerprint(self) -> str:
        """Returns a hash of everything that the models depend on."""
        task, frame = self.task, self.frame
        digest = hashlib.blake2b(digest_size=16)
        words = [
            type(task.model).__name__,
            repr(sorted(task.model.get_params(deep=True).items(), key=str)),
            repr([sorted(config.items()) for config in task.configs]),
            repr((task.split, task.scoring, task.min_rows, self.seed, self.layout)),
        ]
        digest.update("\n".join(words).encode())
        if frame.classes is not None:
            digest.update(repr(frame.classes.tolist()).encode())
        for array in (frame.keys.combos, frame.counts, frame.seeds, frame.row_sums()):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def about(
        self, estimator: Any, assignment: Assignment, fingerprint: str | None
    ) -> dict[str, Any]:
        """Returns what the manifest of a store says of the run.

        Args:
            estimator: whose parameters are written down.
            assignment: which groups are split.
            fingerprint: of the run, by which `resume` knows its data again; None for a run that
                is never resumed, as that is a pass over all data.

        Raises:
            StoreError: a parameter of the model cannot be written down.
        """
        params = estimator.get_params(deep=False)
        return {
            "model": describe_model(as_model(estimator.model)),
            "configs": [dict(config) for config in self.task.configs],
            "estimator": {name: params[name] for name in _KEPT_PARAMETERS} | self._searched(params),
            "features": list(self.layout.features),
            "by": list(self.layout.by),
            "target": self.layout.target,
            "groups_apart": self.groups_apart,
            "n_features_in": self.n_features_in,
            "seed": self.seed,
            "paths": self.paths,
            "fingerprint": fingerprint,
            "assignment": {"plan": assignment.plan, "split": assignment.split},
        }

    def _searched(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the grid of a random search as its draws: distributions cannot be written."""
        if params["n_iter"] is None:
            return {}
        return {"param_grid": [{k: [v] for k, v in c.items()} for c in self.task.configs]}


def set_names(estimator: Any, n_features_in: int, naming: Naming) -> None:
    """Sets scikit-learn's attributes about input and classes."""
    estimator.n_features_in_ = n_features_in
    if all(isinstance(name, str) for name in naming.features):
        estimator.feature_names_in_ = np.array(naming.features, dtype=object)
    if naming.classes is not None:
        estimator.classes_ = naming.classes


def adopt(estimator: E, store: Store, trust: bool) -> E:
    """Returns `estimator` with the models of a complete store.

    Raises:
        StoreError: the store is unfinished, damaged, or needs `trust`.
    """
    manifest = store.manifest()
    served = store.served(restore_model(manifest["model"], trust), trust)
    estimator._served = served
    estimator._layout = Layout(
        tuple(manifest["by"]), manifest["target"], tuple(manifest["features"])
    )
    estimator._groups_apart = manifest["groups_apart"]
    estimator._about = store.about()
    estimator.results_ = store.results()
    plans = estimator.results_.column("plan").to_pylist()
    estimator.plan_ = plans[0] if plans else estimator.plan
    set_names(estimator, manifest["n_features_in"], served.naming)
    return estimator
