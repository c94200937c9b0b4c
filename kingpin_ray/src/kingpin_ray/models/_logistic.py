"""Logistic regression of every group, by batched Newton steps."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kingpin_ray._errors import ParameterError
from kingpin_ray._kernels.newton import fit_logistic, fit_logistic_split
from kingpin_ray.models._base import (
    Fitted,
    GroupModel,
    Naming,
    Stack,
    check_flag,
    linear_scores,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block
    from kingpin_ray.models._base import Add


class Logistic(GroupModel):
    """Logistic regression with scikit-learn's L2 objective, two classes or more.

    Args:
        C: inverse strength of the penalty; `float("inf")` for none.
        fit_intercept: whether a constant (not penalised) is added.
        tol: a model is done when a Newton step promises less than `tol` of its objective.
        max_iter: Newton steps allowed.
    """

    name: ClassVar[str] = "logistic"
    kind: ClassVar[str] = "classifier"
    threads: ClassVar[bool] = True

    def __init__(
        self, C: float = 1.0, *, fit_intercept: bool = True, tol: float = 1e-8, max_iter: int = 100
    ) -> None:
        self.C = C
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter

    def validate(self, params: Mapping[str, Any]) -> None:
        """Raises ParameterError when a value is not allowed."""
        for name, low in (("C", 0.0), ("tol", 0.0)):
            value = params[name]
            if not isinstance(value, numbers.Real) or not float(value) > low:
                raise ParameterError(f"Logistic({name}={value!r}): give a number over 0")
        check_flag("Logistic", "fit_intercept", params["fit_intercept"])
        steps = params["max_iter"]
        if not isinstance(steps, numbers.Integral) or int(steps) < 1:
            raise ParameterError(f"Logistic(max_iter={steps!r}): give a whole number of at least 1")

    def exchanges(
        self, counts: NDArray[np.int64], n_features: int, n_classes: int
    ) -> tuple[Any, Any]:
        """Returns about ten sums, seven of them Newton steps; floats are those of the Hessian."""
        width = (n_features + 1) * (n_classes if n_classes > 2 else 1)
        return 10, width * (width + 1)

    def fit(self, block: Block, configs: Sequence[Mapping[str, Any]]) -> list[Fitted]:
        """Returns the optimum of every group under each configuration."""
        return self.fit_split(block, configs, None)

    def fit_split(
        self, block: Block, configs: Sequence[Mapping[str, Any]], add: Add | None
    ) -> list[Fitted]:
        """As `fit`, where `block` holds only some rows of each group and `add` sums over all."""
        mine = self.get_params(deep=False)
        full = [{**mine, **config} for config in configs]
        results: list[Fitted | None] = [None] * len(full)
        # Configurations that differ in C alone share the padded rows and warm starts.
        families: dict[tuple[bool, float, int], list[int]] = {}
        for c, params in enumerate(full):
            family = (bool(params["fit_intercept"]), float(params["tol"]), int(params["max_iter"]))
            families.setdefault(family, []).append(c)
        for (fit_intercept, tol, max_iter), members in families.items():
            penalties = [float(full[c]["C"]) for c in members]
            fits = self._fit_family(block, penalties, fit_intercept, tol, max_iter, add)
            for c, fitted in zip(members, fits, strict=True):
                results[c] = fitted
        return [fitted for fitted in results if fitted is not None]

    def _fit_family(
        self,
        block: Block,
        penalties: Sequence[float],
        fit_intercept: bool,
        tol: float,
        max_iter: int,
        add: Add | None,
    ) -> list[Fitted]:
        groups, features, classes = block.n_groups, block.X.shape[1], block.n_classes
        models = 1 if classes == 2 else classes
        shape = (len(penalties), groups, models)
        coef = np.zeros((*shape, features))
        # A class that a group never saw keeps the score -inf, which is probability zero.
        intercept = np.full(shape, -np.inf)
        n_iter = np.zeros((len(penalties), groups), np.int64)
        done = np.ones((len(penalties), groups), bool)
        held = block.class_counts()
        for present, at in _same_classes(held if add is None else add(held)):
            part = block.select(at)
            recode = np.zeros(classes, np.int64)
            recode[present] = np.arange(len(present))
            options: dict[str, Any] = {
                "fit_intercept": fit_intercept,
                "tol": tol,
                "max_iter": max_iter,
            }
            new = recode[part.y.astype(np.int64)]
            if add is None:
                fit = fit_logistic(part, new, len(present), penalties, **options)
            else:
                fit = fit_logistic_split(part, new, len(present), penalties, add, **options)
            if models == 1:
                to = np.array([0])
            elif len(present) == 2:
                # The two-class score belongs to the second class; the first one scores zero.
                to = present[1:]
                intercept[:, at, present[0]] = 0.0
            else:
                to = present
            where = np.ix_(np.arange(len(penalties)), at, to)
            coef[where] = fit.coef
            intercept[where] = fit.intercept
            n_iter[:, at] = fit.n_iter
            done[:, at] = fit.converged
        return [
            Fitted(
                {"coef": coef[c], "intercept": intercept[c], "n_iter": n_iter[c]},
                unconverged=np.flatnonzero(~done[c]),
            )
            for c in range(len(penalties))
        ]

    def predict(
        self, stack: Stack, X: NDArray[np.floating], model: NDArray[np.int64], n_classes: int
    ) -> NDArray[np.float64]:
        """Returns (N, n_classes) probabilities."""
        z = linear_scores(stack["coef"], stack["intercept"], X, model)
        if z.shape[1] == 1:
            z = np.concatenate([np.zeros_like(z), z], axis=1)
        z -= z.max(axis=1, keepdims=True)
        np.exp(z, out=z)
        z /= z.sum(axis=1, keepdims=True)
        return z

    def export(self, stack: Stack, at: int, naming: Naming, config: Mapping[str, Any]) -> Any:
        """Returns a fitted `sklearn.linear_model.LogisticRegression`."""
        from sklearn.linear_model import LogisticRegression

        assert naming.classes is not None
        params = {**self.get_params(deep=False), **config}
        coef, intercept = stack["coef"][at], stack["intercept"][at]
        classes = naming.classes
        if len(intercept) > 1:
            present = np.flatnonzero(np.isfinite(intercept))
            classes = classes[present]
            coef, intercept = coef[present], intercept[present]
            if len(present) == 2:
                coef, intercept = coef[1:], intercept[1:]
        model = LogisticRegression(
            C=params["C"], fit_intercept=params["fit_intercept"], max_iter=params["max_iter"]
        )
        model.classes_ = classes
        model.coef_ = coef.copy()
        model.intercept_ = intercept.copy()
        model.n_iter_ = np.array([stack["n_iter"][at]], dtype=np.int32)
        model.n_features_in_ = coef.shape[1]
        if all(isinstance(name, str) for name in naming.features):
            model.feature_names_in_ = np.array(naming.features, dtype=object)
        return model


def _same_classes(counts: NDArray[Any]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Returns (classes present, positions of the groups that hold exactly those)."""
    if counts.shape[1] == 2:
        return [(np.arange(2), np.arange(len(counts)))]
    held = counts > 0
    patterns, which = np.unique(held, axis=0, return_inverse=True)
    which = which.reshape(-1)
    return [
        (np.flatnonzero(pattern), np.flatnonzero(which == p)) for p, pattern in enumerate(patterns)
    ]
