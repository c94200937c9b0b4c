"""What a model must offer so that thousands of it can be trained at once.

A third party subclasses `GroupModel` and names it by an entry point of the group
`kingpin_ray.models`; everything else (keys, folds, plans, faults, storage) is done around it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from sklearn.base import BaseEstimator

from kingpin_ray._errors import ParameterError
from kingpin_ray._folds import fold_of_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block
    from kingpin_ray._folds import Split
    from kingpin_ray._scoring import Scorer
    from kingpin_ray._sums import Sums

    F64 = NDArray[np.float64]

Add = Callable[["NDArray[Any]"], "NDArray[Any]"]
"""Sums an array over all workers."""

Stack = dict[str, "NDArray[Any]"]
"""Parameters of M models: arrays whose first axis is M; an object array holds bytes or objects."""


@dataclass
class Fitted:
    """Models of a block's groups under one configuration.

    Attributes:
        stack: parameters, first axis the groups of the block.
        failed: message by position of a group whose training raised.
        unconverged: positions of groups that stopped at the iteration limit.
        seen: what `predict` would return for the block's own rows, where training knows it anyway.
        errors: sums of squared errors, of squares about the mean, and rows, each (G,), where
            training knows those.
    """

    stack: Stack
    failed: dict[int, str] = field(default_factory=dict)
    unconverged: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    seen: NDArray[np.float64] | None = None
    errors: tuple[F64, F64, F64] | None = None


@dataclass(frozen=True)
class Naming:
    """Names a rebuilt estimator needs: features, classes (None for regression)."""

    features: tuple[str, ...]
    classes: NDArray[Any] | None


class GroupModel(BaseEstimator):  # type: ignore[misc]
    """A kind of model with its hyperparameters, named as the host library names them.

    Attributes:
        name: what `kingpin_ray.models.get` finds it by, and a store writes down.
        kind: "classifier" or "regressor".
        accepts_missing: whether NaN features may reach `fit`.
        needs_pickle: whether a stack holds Python objects that only pickle can write.
        threads: whether blocks may be trained in several threads at once, and gain by it: `fit`
            spends its time outside Python's lock and touches nothing global, such as a random
            state.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str] = "regressor"
    accepts_missing: ClassVar[bool] = False
    needs_pickle: ClassVar[bool] = False
    threads: ClassVar[bool] = False

    @property
    def classifier(self) -> bool:
        """Whether this predicts classes."""
        return self.kind == "classifier"

    def check(self, config: Mapping[str, Any]) -> None:
        """Raises ParameterError unless `config` holds allowed parameters of this model."""
        known = self.get_params(deep=False)
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise ParameterError(
                f"param_grid: {type(self).__name__} has no parameter {unknown[0]!r}; "
                f"it has {', '.join(sorted(known))}"
            )
        self.validate({**known, **config})

    def validate(self, params: Mapping[str, Any]) -> None:
        """Raises ParameterError when a value is not allowed; the default allows everything."""

    def bound(self, features: Sequence[Any]) -> GroupModel:
        """Returns this model knowing the names of its columns; the default needs no names."""
        return self

    def ignored(self) -> tuple[Any, ...]:
        """Returns the features that `predict` can do without."""
        return ()

    def check_classes(self, n_classes: int) -> None:
        """Raises ParameterError unless the model can learn that many classes; 0 for values."""

    @property
    def splits(self) -> bool:
        """Whether a group's rows may be split over workers: the model has `fit_split`."""
        return type(self).fit_split is not GroupModel.fit_split

    def fit_split(
        self, block: Block, configs: Sequence[Mapping[str, Any]], add: Add | None
    ) -> list[Fitted]:
        """As `fit`, where `block` holds only some rows of each group and `add` sums over workers.

        Every worker must make the same calls of `add` and come to the same models. The default
        says that the model needs whole groups.

        Raises:
            ParameterError: always; a model that can do this overrides it.
        """
        raise ParameterError(f"{type(self).__name__} needs whole groups; use plan='task'")

    @property
    def summable(self) -> bool:
        """Whether statistics of a group's rows suffice to train it: the model has `fit_sums`."""
        return type(self).fit_sums is not GroupModel.fit_sums

    def fit_sums(self, sums: Sums, configs: Sequence[Mapping[str, Any]]) -> list[Fitted]:
        """As `fit`, of groups of which only means and products are left; with `errors`.

        Raises:
            ParameterError: always; a model that can do this overrides it, and `search_sums`.
        """
        raise ParameterError(f"{type(self).__name__} needs the rows of its groups")

    def search_sums(
        self, sums: Sums, configs: Sequence[Mapping[str, Any]], split: Split, name: str
    ) -> F64:
        """As `search`, of groups of which only means and products are left, for squared errors.

        Raises:
            ParameterError: always; a model that has `fit_sums` overrides it.
        """
        raise ParameterError(f"{type(self).__name__} needs the rows of its groups")

    def cost(self, n_features: int) -> tuple[float, float]:
        """Returns a guess at one fit's seconds per row and per group, on one core."""
        return 2e-7 * (n_features + 4), 1e-5

    def exchanges(
        self, counts: NDArray[np.int64], n_features: int, n_classes: int
    ) -> tuple[Any, Any]:
        """Returns how many sums over workers one split fit takes, and how many floats each sends.

        Args:
            counts: (G,) rows of each group.
            n_features: features of the data.
            n_classes: classes of the data; 0 for regression.

        Returns:
            Two numbers, or (G,) arrays of them: sums, and floats a group in each.
        """
        return 10, (n_features + 2) ** 2

    @abstractmethod
    def fit(self, block: Block, configs: Sequence[Mapping[str, Any]]) -> list[Fitted]:
        """Returns, for each configuration, the models of all groups of the block.

        Args:
            block: groups with enough rows and, for a classifier, at least two classes each.
            configs: parameters that replace this object's own.
        """

    @abstractmethod
    def predict(
        self, stack: Stack, X: NDArray[np.floating], model: NDArray[np.int64], n_classes: int
    ) -> F64:
        """Returns (N,) values, or (N, n_classes) probabilities for a classifier.

        Args:
            stack: parameters of M models.
            X: (N, D) rows in any order.
            model: (N,) which of the M models each row is for.
            n_classes: classes of the whole data set; 0 for a regressor.
        """

    @abstractmethod
    def export(self, stack: Stack, at: int, naming: Naming, config: Mapping[str, Any]) -> Any:
        """Returns model `at` of a stack as an object of the host library."""

    def search(
        self,
        block: Block,
        configs: Sequence[Mapping[str, Any]],
        split: Split,
        scorer: Scorer,
        name: str,
    ) -> tuple[F64, dict[tuple[int, int, int], str]]:
        """Returns held-out scores (G, configurations, folds), NaN where one could not be had.

        The second result tells why, by (group, configuration, fold). Override it where folds or
        configurations can share work.
        """
        shape = (block.n_groups, len(configs), split.n_folds)
        scores = np.full(shape, np.nan)
        failed: dict[tuple[int, int, int], str] = {}
        folds = fold_of_row(block, split)
        for f in range(split.n_folds):
            train, test = block.keep(folds != f), block.keep(folds == f)
            usable = test.counts > 0
            if self.classifier:
                usable &= (train.class_counts() > 0).sum(axis=1) >= 2
            for g in np.flatnonzero(~usable):
                for c in range(len(configs)):
                    failed[int(g), c, f] = "single_class"
            at = np.flatnonzero(usable)
            if not len(at):
                continue
            train, test = train.select(at), test.select(at)
            owner = test.group_of_row()
            for c, fitted in enumerate(self.fit(train, configs)):
                raw = self.predict(fitted.stack, test.X, owner, block.n_classes)
                score = scorer(test.y, raw, test.offsets)
                for position, message in fitted.failed.items():
                    failed[int(at[position]), c, f] = message
                    score[position] = np.nan
                scores[at, c, f] = score
        return scores, failed


def check_flag(owner: str, name: str, value: object) -> None:
    """Raises ParameterError unless `value` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ParameterError(f"{owner}({name}={value!r}): give True or False")


def linear_scores(
    coef: F64, intercept: F64, X: NDArray[np.floating], model: NDArray[np.int64]
) -> F64:
    """Returns (N, M) the products of each row with its model's (M, D) coefficients."""
    out = np.empty((len(X), coef.shape[1]))
    # Gathered coefficients are as large as the rows; a piece at a time stays in the cache.
    piece = max(1, (1 << 18) // max(1, coef.shape[1] * coef.shape[2]))
    for begin in range(0, len(X), piece):
        at = model[begin : begin + piece]
        rows = X[begin : begin + piece].astype(np.float64, copy=False)
        out[begin : begin + piece] = np.einsum("nd,nmd->nm", rows, coef[at]) + intercept[at]
    return out
