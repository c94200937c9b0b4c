"""Any scikit-learn estimator, one fit per group: the general case and the others' yardstick."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import clone, is_classifier

from kingpin_ray._errors import ParameterError
from kingpin_ray.models._base import Fitted, GroupModel, Naming, Stack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block


class PerGroup(GroupModel):
    """Fits a clone of a scikit-learn estimator to each group, one after another.

    Args:
        estimator: a classifier with `predict_proba`, or a regressor. Where it has a `random_state`
            that is None, each group gets its own seed, so that results do not depend on the plan.
    """

    name = "per_group"
    needs_pickle = True
    # The estimator knows best; what it refuses is recorded as the group's error.
    accepts_missing = True

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator

    @property
    def classifier(self) -> bool:
        """Whether the estimator predicts classes."""
        return bool(is_classifier(self.estimator))

    def cost(self, n_features: int) -> tuple[float, float]:
        """Returns a guess at one fit's seconds per row and per group: mostly Python."""
        return 1e-6 * (n_features + 4), 3e-3

    def check(self, config: Mapping[str, Any]) -> None:
        """Raises ParameterError unless the estimator has every parameter of `config`."""
        known = self.estimator.get_params()
        for name in config:
            if name not in known:
                raise ParameterError(
                    f"param_grid: {type(self.estimator).__name__} has no parameter {name!r}; "
                    f"it has {', '.join(sorted(known))}"
                )
        if self.classifier and not hasattr(self.estimator, "predict_proba"):
            raise ParameterError(
                f"model={self.estimator!r} has no predict_proba, which scores and union of classes "
                "need; wrap it in sklearn.calibration.CalibratedClassifierCV"
            )

    def fit(self, block: Block, configs: Sequence[Mapping[str, Any]]) -> list[Fitted]:
        """Returns one fitted estimator per group and configuration."""
        results = []
        for config in configs:
            models = np.empty(block.n_groups, object)
            failed = {}
            for g in range(block.n_groups):
                rows = slice(block.offsets[g], block.offsets[g + 1])
                model = clone(self.estimator).set_params(**config)
                if model.get_params().get("random_state", 0) is None:
                    model.set_params(random_state=int(block.seeds[g] >> np.uint64(33)))
                try:
                    # Thousands of convergence warnings would hide everything else.
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        models[g] = model.fit(block.X[rows], block.y[rows])
                except Exception as error:
                    failed[g] = f"{type(error).__name__}: {error}"
            results.append(Fitted({"model": models}, failed))
        return results

    def predict(
        self, stack: Stack, X: NDArray[np.floating], model: NDArray[np.int64], n_classes: int
    ) -> NDArray[np.float64]:
        """Returns (N,) values or (N, n_classes) probabilities, NaN where there is no model."""
        shape = (len(X), n_classes) if n_classes else (len(X),)
        out = np.full(shape, np.nan)
        order = np.argsort(model, kind="stable")
        ids, starts = np.unique(model[order], return_index=True)
        for at, rows in zip(ids, np.split(order, starts[1:]), strict=True):
            fitted = stack["model"][at]
            if fitted is None:
                continue
            if n_classes:
                out[rows] = 0.0
                out[np.ix_(rows, fitted.classes_.astype(np.int64))] = fitted.predict_proba(X[rows])
            else:
                out[rows] = np.asarray(fitted.predict(X[rows])).reshape(len(rows))
        return out

    def export(self, stack: Stack, at: int, naming: Naming, config: Mapping[str, Any]) -> Any:
        """Returns the fitted estimator; a classifier answers in the user's own classes."""
        from copy import copy

        model = copy(stack["model"][at])
        if naming.classes is not None and hasattr(model, "classes_"):
            try:
                model.classes_ = naming.classes[model.classes_.astype(np.int64)]
            except AttributeError:  # a pipeline forwards the attribute from its last step
                last = copy(model.steps[-1][1])
                last.classes_ = naming.classes[last.classes_.astype(np.int64)]
                model = copy(model)
                model.steps = [*model.steps[:-1], (model.steps[-1][0], last)]
        return model
