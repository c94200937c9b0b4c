"""Least squares and ridge of every group, whole grids and all folds from the same Gram matrices."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kingpin_ray._errors import ParameterError
from kingpin_ray._folds import fold_of_row
from kingpin_ray._kernels import least_squares as ls
from kingpin_ray._scoring import SQUARED, squared_score
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
    from kingpin_ray._folds import Split
    from kingpin_ray._scoring import Scorer
    from kingpin_ray.models._base import Add


class _LeastSquares(GroupModel):
    """What Linear and Ridge share."""

    kind: ClassVar[str] = "regressor"
    threads: ClassVar[bool] = True

    def validate(self, params: Mapping[str, Any]) -> None:
        """Raises ParameterError when a value is not allowed."""
        check_flag(type(self).__name__, "fit_intercept", params["fit_intercept"])

    def cost(self, n_features: int) -> tuple[float, float]:
        """Returns a guess at one fit's seconds per row and per group: memory traffic, a solve."""
        return 1.5e-8 * (n_features + 4), 1.5e-5

    def exchanges(
        self, counts: NDArray[np.int64], n_features: int, n_classes: int
    ) -> tuple[Any, Any]:
        """Returns three sums: rows, means and Grams."""
        return 3, (n_features + 2) ** 2 / 2

    def _penalty(self, config: Mapping[str, Any]) -> tuple[float, bool]:
        params = {**self.get_params(deep=False), **config}
        return float(params.get("alpha", 0.0)), bool(params["fit_intercept"])

    def fit(self, block: Block, configs: Sequence[Mapping[str, Any]]) -> list[Fitted]:
        """Returns the optimum of every group under each configuration."""
        results = []
        kept: dict[bool, tuple[Any, Any]] = {}
        for config in configs:
            alpha, free = self._penalty(config)
            if free not in kept:
                kept[free] = ls.centred_grams(block.X, block.y, block.offsets, free)
            shift, gram = kept[free]
            weights, constant, good = ls.solve(gram, alpha, free)
            intercept = constant
            if free:
                moved = np.einsum("gd,gd->g", weights, shift[:, :-1])
                intercept = constant + shift[:, -1] - moved
            for g in np.flatnonzero(~good):
                rows = slice(block.offsets[g], block.offsets[g + 1])
                weights[g], intercept[g] = ls.solve_rows(block.X[rows], block.y[rows], alpha, free)
                constant[g] = intercept[g] - shift[g, -1] + weights[g] @ shift[g, :-1]
            stack = {"coef": weights[:, None, :], "intercept": intercept[:, None]}
            results.append(Fitted(stack, errors=ls.squared_errors(gram, weights, constant)))
        return results

    def fit_split(
        self, block: Block, configs: Sequence[Mapping[str, Any]], add: Add | None
    ) -> list[Fitted]:
        """As `fit`, where `block` holds only some rows of each group: two exchanges in all."""
        if add is None:
            return self.fit(block, configs)
        counts = np.maximum(add(block.counts.astype(np.float64)), 1.0)[:, None]
        sums = ls.group_means(block.X, block.y, block.offsets) * block.counts[:, None]
        shift = add(sums) / counts
        gram = add(ls.grams(block.X, block.y, block.offsets, shift))
        results = []
        for config in configs:
            alpha, free = self._penalty(config)
            used = gram if free else ls.shift_back(gram, shift)
            weights, constant, good = ls.solve(used, alpha, free)
            for g in np.flatnonzero(~good):
                weights[g], constant[g] = ls.solve_gram(used[g], alpha, free)
            intercept = constant
            if free:
                moved = np.einsum("gd,gd->g", weights, shift[:, :-1])
                intercept = constant + shift[:, -1] - moved
            results.append(Fitted({"coef": weights[:, None, :], "intercept": intercept[:, None]}))
        return results

    def search(
        self,
        block: Block,
        configs: Sequence[Mapping[str, Any]],
        split: Split,
        scorer: Scorer,
        name: str,
    ) -> tuple[NDArray[np.float64], dict[tuple[int, int, int], str]]:
        """Returns held-out scores; squared-error scores need no second look at the rows."""
        if name not in SQUARED:
            return super().search(block, configs, split, scorer, name)
        scores = np.full((block.n_groups, len(configs), split.n_folds), np.nan)
        folds = fold_of_row(block, split)
        # Rows that are never held out are one more part.
        parts = split.n_folds + bool((folds < 0).any())
        folds = np.where(folds < 0, split.n_folds, folds)
        for free in (True, False):
            members = [c for c, config in enumerate(configs) if self._penalty(config)[1] == free]
            if not members:
                continue
            alphas = np.array([self._penalty(configs[c])[0] for c in members])
            shift, held = ls.fold_grams(block.X, block.y, block.offsets, free, folds, parts)
            residual = ls.search(held, split.n_folds, free, alphas)
            for g, k, f in np.argwhere(np.isnan(residual)):
                residual[g, k, f] = self._doubtful(
                    block, int(g), folds, int(f), float(alphas[k]), free, shift[g], held[g]
                )
            about, rows = ls.totals(held[:, : split.n_folds])
            scores[:, members] = squared_score(name, residual, about[:, None], rows[:, None])
        return scores, {}

    def _doubtful(
        self,
        block: Block,
        g: int,
        folds: NDArray[np.int64],
        fold: int,
        alpha: float,
        free: bool,
        shift: NDArray[np.float64],
        held: NDArray[np.float64],
    ) -> float:
        """Returns one held-out squared error where normal equations may be ill-conditioned."""
        train = (held.sum(axis=0) - held[fold])[None]
        weights, constant, good = ls.solve(train, alpha, free)
        if not good[0]:
            rows = slice(block.offsets[g], block.offsets[g + 1])
            mask = folds[rows] != fold
            w, b = ls.solve_rows(block.X[rows][mask], block.y[rows][mask], alpha, free)
            weights, constant = w[None], np.array([b - shift[-1] + w @ shift[:-1]])
        return float(ls.squared_errors(held[fold][None], weights, constant)[0][0])

    def predict(
        self, stack: Stack, X: NDArray[np.floating], model: NDArray[np.int64], n_classes: int
    ) -> NDArray[np.float64]:
        """Returns (N,) values."""
        return linear_scores(stack["coef"], stack["intercept"], X, model)[:, 0]

    def _export(self, host: Any, stack: Stack, at: int, naming: Naming) -> Any:
        host.coef_ = stack["coef"][at, 0].copy()
        host.intercept_ = float(stack["intercept"][at, 0])
        host.n_features_in_ = len(host.coef_)
        if all(isinstance(name, str) for name in naming.features):
            host.feature_names_in_ = np.array(naming.features, dtype=object)
        return host


class Linear(_LeastSquares):
    """Ordinary least squares, as `sklearn.linear_model.LinearRegression` solves it.

    Args:
        fit_intercept: whether a constant is added.
    """

    name: ClassVar[str] = "linear"

    def __init__(self, *, fit_intercept: bool = True) -> None:
        self.fit_intercept = fit_intercept

    def export(self, stack: Stack, at: int, naming: Naming, config: Mapping[str, Any]) -> Any:
        """Returns a fitted `sklearn.linear_model.LinearRegression`."""
        from sklearn.linear_model import LinearRegression

        host = LinearRegression(**{**self.get_params(deep=False), **config})
        return self._export(host, stack, at, naming)


class Ridge(_LeastSquares):
    """Ridge regression, as `sklearn.linear_model.Ridge` solves it.

    Args:
        alpha: strength of the penalty; 0 for none.
        fit_intercept: whether a constant (not penalised) is added.
    """

    name: ClassVar[str] = "ridge"

    def __init__(self, alpha: float = 1.0, *, fit_intercept: bool = True) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept

    def validate(self, params: Mapping[str, Any]) -> None:
        """Raises ParameterError when a value is not allowed."""
        super().validate(params)
        alpha = params["alpha"]
        good = isinstance(alpha, numbers.Real) and 0 <= float(alpha) < float("inf")
        if not good:
            raise ParameterError(f"Ridge(alpha={alpha!r}): give a finite number of at least 0")

    def export(self, stack: Stack, at: int, naming: Naming, config: Mapping[str, Any]) -> Any:
        """Returns a fitted `sklearn.linear_model.Ridge`."""
        from sklearn.linear_model import Ridge as Host

        host = Host(**{**self.get_params(deep=False), **config})
        return self._export(host, stack, at, naming)
