"""Least squares and ridge of every group, whole grids and all folds from the same Gram matrices."""

from __future__ import annotations

import numbers
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kingpin_ray._errors import ParameterError
from kingpin_ray._folds import fold_of_row
from kingpin_ray._kernels import least_squares as ls
from kingpin_ray._scoring import SQUARED, squared_score
from kingpin_ray._sums import parts_of
from kingpin_ray.models._base import (
    Fitted,
    GroupModel,
    Naming,
    Stack,
    check_flag,
    linear_scores,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block
    from kingpin_ray._folds import Split
    from kingpin_ray._scoring import Scorer
    from kingpin_ray._sums import Sums
    from kingpin_ray.models._base import Add

    F64 = NDArray[np.float64]


def _optimum(
    shift: F64,
    gram: F64,
    alpha: float,
    free: bool,
    again: Callable[[int], tuple[F64, float]] | None = None,
) -> Fitted:
    """Returns the models of all groups from their Grams (G, Q, Q) about their shifts (G, Z).

    `again` solves for one group in shifted coordinates where normal equations may be
    ill-conditioned; None solves from the Gram's own eigenvectors, as the rows are elsewhere.
    """
    weights, constant, good = ls.solve(gram, alpha, free)
    for g in np.flatnonzero(~good):
        weights[g], constant[g] = (
            ls.solve_gram(gram[g], alpha, free) if again is None else again(int(g))
        )
    moved = np.einsum("gd,gd->g", weights, shift[:, :-1])
    intercept = constant + shift[:, -1] - moved
    stack = {"coef": weights[:, None, :], "intercept": intercept[:, None]}
    return Fitted(stack, errors=ls.squared_errors(gram, weights, constant))


def _from_rows(
    block: Block,
    shift: F64,
    alpha: float,
    free: bool,
    g: int,
    kept: NDArray[np.bool_] | None = None,
) -> tuple[F64, float]:
    """Returns weights and constant, in shifted coordinates, of group g from its (kept) rows."""
    rows = slice(block.offsets[g], block.offsets[g + 1])
    X, y = block.X[rows], block.y[rows]
    if kept is not None:
        X, y = X[kept[rows]], y[kept[rows]]
    weights, intercept = ls.solve_rows(X, y, alpha, free)
    return weights, intercept - shift[g, -1] + weights @ shift[g, :-1]


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
            again = partial(_from_rows, block, shift, alpha, free)
            results.append(_optimum(shift, gram, alpha, free, again))
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
            if free:
                results.append(_optimum(shift, gram, alpha, free))
            else:
                results.append(_optimum(shift * 0.0, ls.shift_back(gram, shift), alpha, free))
        return results

    def fit_sums(self, sums: Sums, configs: Sequence[Mapping[str, Any]]) -> list[Fitted]:
        """As `fit`, of groups of which only the statistics are left."""
        results = []
        for config in configs:
            alpha, free = self._penalty(config)
            shift, gram = sums.grams(free)
            results.append(_optimum(shift, gram.sum(axis=1), alpha, free))
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
        folds = fold_of_row(block, split)
        # Rows that are never held out are one more part.
        folds = np.where(folds < 0, split.n_folds, folds)

        def grams(free: bool) -> tuple[F64, F64]:
            return ls.fold_grams(block.X, block.y, block.offsets, free, folds, parts_of(split))

        def from_rows(g: int, fold: int, alpha: float, free: bool, shift: F64) -> Any:
            return _from_rows(block, shift, alpha, free, g, folds != fold)

        return self._search(block.n_groups, configs, split, name, grams, from_rows), {}

    def search_sums(
        self, sums: Sums, configs: Sequence[Mapping[str, Any]], split: Split, name: str
    ) -> NDArray[np.float64]:
        """As `search`, of groups of which only the statistics are left."""
        return self._search(sums.n_groups, configs, split, name, sums.grams, None)

    def _search(
        self,
        groups: int,
        configs: Sequence[Mapping[str, Any]],
        split: Split,
        name: str,
        grams: Callable[[bool], tuple[F64, F64]],
        from_rows: Callable[[int, int, float, bool, F64], Any] | None,
    ) -> NDArray[np.float64]:
        """Returns held-out scores (groups, configurations, folds).

        Args:
            groups: how many.
            configs: parameter settings.
            split: how rows are held out.
            name: of the score.
            grams: returns shifts and Grams of all parts, with and without a free constant.
            from_rows: solves for one group without one fold where normal equations may be
                ill-conditioned; None where the rows are gone.
        """
        scores = np.full((groups, len(configs), split.n_folds), np.nan)
        for free in (True, False):
            members = [c for c, config in enumerate(configs) if self._penalty(config)[1] == free]
            if not members:
                continue
            alphas = np.array([self._penalty(configs[c])[0] for c in members])
            shift, held = grams(free)
            residual = ls.search(held, split.n_folds, free, alphas)
            for g, k, f in np.argwhere(np.isnan(residual)):
                train, alpha = held[g].sum(axis=0) - held[g, f], float(alphas[k])
                weights, constant, good = ls.solve(train[None], alpha, free)
                if not good[0]:
                    w, b = (
                        ls.solve_gram(train, alpha, free)
                        if from_rows is None
                        else from_rows(int(g), int(f), alpha, free, shift)
                    )
                    weights, constant = w[None], np.array([b])
                residual[g, k, f] = ls.squared_errors(held[g, f][None], weights, constant)[0][0]
            about, rows = ls.totals(held[:, : split.n_folds])
            scores[:, members] = squared_score(name, residual, about[:, None], rows[:, None])
        return scores

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
