"""Gradient-boosted trees of every group: an own kernel for many small ones, else LightGBM."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy.special import expit
from sklearn.base import clone

from kingpin_ray._errors import MissingColumnError, ParameterError
from kingpin_ray._folds import hold_out
from kingpin_ray._kernels import trees
from kingpin_ray.models import _lightgbm
from kingpin_ray.models._base import Fitted, GroupModel, Naming, Stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block

_OBJECTIVES = ("binary", "multiclass", "regression")
# Past this many rows in a group the kernel gains little over LightGBM (2.2 to 2.6 times at
# 240,000), and its 31-bit sums leave a row's gradient too few digits.
_MOST_ROWS = 300_000
_SETTINGS = (
    "n_estimators",
    "num_leaves",
    "min_child_samples",
    "early_stopping_rounds",
    "learning_rate",
    "reg_lambda",
    "min_child_weight",
)


class GBDT(GroupModel):
    """Gradient-boosted trees, in LightGBM's words; NaN features are missing values.

    Two classes and squared error run on an own kernel, which several settings of a group share.
    More classes, categorical features, monotone constraints, weights, groups of more than 300,000
    rows, and machines where the kernel was not built, run LightGBM with one thread.

    Args:
        n_estimators: trees at most.
        num_leaves: leaves of a tree at most.
        max_bin: bins of a feature, at most 255.
        learning_rate: factor of each tree.
        min_child_samples: rows a leaf needs (estimated from the Hessian, as LightGBM does).
        min_child_weight: Hessian a leaf needs.
        reg_lambda: L2 penalty of leaf values.
        early_stopping_rounds: end when the held-out loss of the group has not fallen for so many
            trees, and keep the best; 0 for never.
        validation_fraction: share of a group's rows held out for that.
        objective: "binary", "multiclass" or "regression".
        categorical_feature: columns whose numbers are codes of categories (0, 1, ..., NaN where
            missing), by name or by position among the features.
        monotone_constraints: 1 (rising), -1 (falling) or 0 for every feature in order, or by name.
        weight_column: a column of `features` that holds the weights of the rows instead; it need
            not be there when predicting.
    """

    name: ClassVar[str] = "gbdt"
    accepts_missing: ClassVar[bool] = True
    threads: ClassVar[bool] = True

    def __init__(
        self,
        n_estimators: int = 100,
        num_leaves: int = 31,
        max_bin: int = 63,
        *,
        learning_rate: float = 0.1,
        min_child_samples: int = 20,
        min_child_weight: float = 1e-3,
        reg_lambda: float = 0.0,
        early_stopping_rounds: int = 0,
        validation_fraction: float = 0.1,
        objective: str = "binary",
        categorical_feature: Sequence[Any] | None = None,
        monotone_constraints: Sequence[int] | Mapping[Any, int] | None = None,
        weight_column: Any = None,
    ) -> None:
        self.n_estimators = n_estimators
        self.num_leaves = num_leaves
        self.max_bin = max_bin
        self.learning_rate = learning_rate
        self.min_child_samples = min_child_samples
        self.min_child_weight = min_child_weight
        self.reg_lambda = reg_lambda
        self.early_stopping_rounds = early_stopping_rounds
        self.validation_fraction = validation_fraction
        self.objective = objective
        self.categorical_feature = categorical_feature
        self.monotone_constraints = monotone_constraints
        self.weight_column = weight_column

    @property
    def classifier(self) -> bool:
        """Whether the objective is that of classes."""
        return self.objective != "regression"

    def cost(self, n_features: int) -> tuple[float, float]:
        """Returns a guess at one fit's seconds per row and per group."""
        return 2e-8 * self.n_estimators * (n_features + 5), 1e-5 * self.n_estimators

    def validate(self, params: Mapping[str, Any]) -> None:
        """Raises ParameterError when a value is not allowed."""
        whole = {"n_estimators": 1, "num_leaves": 2, "max_bin": 2, "min_child_samples": 1}
        for key, low in {**whole, "early_stopping_rounds": 0}.items():
            value = params[key]
            if not isinstance(value, numbers.Integral) or int(value) < low:
                raise ParameterError(f"GBDT({key}={value!r}): give a whole number from {low}")
        if int(params["max_bin"]) > 255:
            raise ParameterError(f"GBDT(max_bin={params['max_bin']}): give at most 255")
        real = {"learning_rate": 1e-12, "min_child_weight": 0.0, "reg_lambda": 0.0}
        for key, floor in real.items():
            value = params[key]
            if not isinstance(value, numbers.Real) or not floor <= float(value) < float("inf"):
                raise ParameterError(f"GBDT({key}={value!r}): give a finite number from {floor}")
        share = params["validation_fraction"]
        if not isinstance(share, numbers.Real) or not 0 < float(share) <= 0.5:
            raise ParameterError(f"GBDT(validation_fraction={share!r}): give over 0, at most 0.5")
        if params["objective"] not in _OBJECTIVES or params["objective"] != self.objective:
            raise ParameterError(
                f"GBDT(objective={params['objective']!r}): choose one of {', '.join(_OBJECTIVES)}; "
                "a grid cannot change it"
            )

        for key in ("categorical_feature", "monotone_constraints", "weight_column"):
            if params[key] is not getattr(self, key):
                raise ParameterError(f"GBDT: param_grid cannot change {key}")

    def bound(self, features: Sequence[Any]) -> GBDT:
        """Returns this model with its columns as positions among the features.

        Raises:
            MissingColumnError: one of them is no feature.
            ParameterError: a constraint is none of -1, 0 and 1, or there are too few.
        """
        if not self._needs_lightgbm():
            return self

        def place(name: Any, part: str) -> int:
            if name in features:
                return list(features).index(name)
            if isinstance(name, int) and 0 <= name < len(features):
                return int(name)
            raise MissingColumnError(
                f"GBDT({part}={name!r}): this is no feature; the features are "
                f"{', '.join(repr(f) for f in features)}"
            )

        found: GBDT = clone(self)
        if self.categorical_feature is not None:
            if isinstance(self.categorical_feature, str):
                raise ParameterError("GBDT(categorical_feature): give a list of columns")
            found.categorical_feature = [
                place(name, "categorical_feature") for name in self.categorical_feature
            ]
        if self.weight_column is not None:
            found.weight_column = place(self.weight_column, "weight_column")
        signs = self.monotone_constraints
        if signs is not None:
            if isinstance(signs, Mapping):
                by_place = {place(k, "monotone_constraints"): v for k, v in signs.items()}
                signs = [by_place.get(j, 0) for j in range(len(features))]
            if len(signs) != len(features) or any(sign not in (-1, 0, 1) for sign in signs):
                raise ParameterError(
                    f"GBDT(monotone_constraints={self.monotone_constraints!r}): give -1, 0 or 1 "
                    f"for each of the {len(features)} features, or by name"
                )
            found.monotone_constraints = [int(sign) for sign in signs]
        return found

    def ignored(self) -> tuple[Any, ...]:
        """Returns the columns that prediction can do without."""
        return () if self.weight_column is None else (self.weight_column,)

    def _needs_lightgbm(self) -> bool:
        own = (self.categorical_feature, self.monotone_constraints, self.weight_column)
        return self.objective == "multiclass" or any(part is not None for part in own)

    def check_classes(self, n_classes: int) -> None:
        """Raises ParameterError when the target has more classes than the objective takes."""
        if self.objective == "binary" and n_classes > 2:
            raise ParameterError(
                f"GBDT(objective='binary'): the target has {n_classes} classes; use "
                "GBDT(objective='multiclass')"
            )

    def fit(self, block: Block, configs: Sequence[Mapping[str, Any]]) -> list[Fitted]:
        """Returns the trees of every group under each configuration."""
        mine = self.get_params(deep=False)
        full = [{**mine, **config} for config in configs]
        widest = max(int(params["max_bin"]) for params in full)
        fits = block.X.shape[1] * (widest + 1) < 1 << 16
        if self._needs_lightgbm() or trees.library() is None or not fits:
            return [_lightgbm.fit(block, params) for params in full]
        large = block.counts > _MOST_ROWS
        if not large.any():
            return self._fit_kernel(block, full)
        parts = [np.flatnonzero(~large), np.flatnonzero(large)]
        return [
            _merged(block.n_groups, parts, pair)
            for pair in zip(
                self._fit_kernel(block.select(parts[0]), full),
                [_lightgbm.fit(block.select(parts[1]), params) for params in full],
                strict=True,
            )
        ]

    def _fit_kernel(self, block: Block, full: list[dict[str, Any]]) -> list[Fitted]:
        results: list[Fitted | None] = [None] * len(full)
        families: dict[tuple[Any, ...], list[int]] = {}
        for c, params in enumerate(full):
            stops = int(params["early_stopping_rounds"]) > 0
            share = float(params["validation_fraction"]) if stops else 0.0
            families.setdefault((int(params["max_bin"]), share), []).append(c)
        for (max_bin, share), members in families.items():
            held = hold_out(block, share)
            order, middle = held.order, held.middle
            X = np.ascontiguousarray(block.X[order], np.float64)
            y = block.y[order].astype(np.float64)
            settings = [trees.TreeConfig(*(full[c][name] for name in _SETTINGS)) for c in members]
            binary = self.objective == "binary"
            found, fitted = trees.train(X, y, block.offsets, middle, max_bin, binary, settings)
            for k, c in enumerate(members):
                models = np.empty(block.n_groups, object)
                for g in range(block.n_groups):
                    models[g] = found[g][k]
                seen = np.empty(len(y))
                seen[order] = fitted[k]
                results[c] = Fitted({"trees": models}, seen=self._outputs(seen, block.n_classes))
        return [fitted for fitted in results if fitted is not None]

    def _outputs(self, raw: NDArray[np.float64], n_classes: int) -> NDArray[np.float64] | None:
        if not np.isfinite(raw).all():
            return None
        if not n_classes:
            return raw
        positive = expit(raw)
        return np.stack([1.0 - positive, positive], axis=1)

    def predict(
        self, stack: Stack, X: NDArray[np.floating], model: NDArray[np.int64], n_classes: int
    ) -> NDArray[np.float64]:
        """Returns (N,) values or (N, n_classes) probabilities."""
        x = np.ascontiguousarray(X, np.float64)
        raw = np.zeros(len(x))
        out = np.zeros((len(x), n_classes)) if n_classes else raw
        order = np.argsort(model, kind="stable")
        ids, starts = np.unique(model[order], return_index=True)
        for at, rows in zip(ids, np.split(order, starts[1:]), strict=True):
            payload = stack["trees"][at]
            if payload.startswith(b"tree\n"):
                out[rows] = _lightgbm.predict(payload, x[rows], n_classes)
                continue
            if trees.library() is None:
                raw[rows] = trees.raw_scores(payload, x[rows])
            else:
                trees.add_scores(payload, x, rows, raw)
            if n_classes:
                out[rows, 1] = expit(raw[rows])
                out[rows, 0] = 1.0 - out[rows, 1]
        return out

    def export(self, stack: Stack, at: int, naming: Naming, config: Mapping[str, Any]) -> Any:
        """Returns a `lightgbm.Booster`; `booster.model_to_string()` serves other runtimes.

        Raises:
            MissingDependencyError: LightGBM is not installed.
        """
        payload = stack["trees"][at]
        text = (
            payload.decode()
            if payload.startswith(b"tree\n")
            else trees.to_lightgbm(payload, naming.features, self.objective == "binary")
        )
        return _lightgbm.lightgbm().Booster(model_str=text, params={"verbosity": -1})


def _merged(groups: int, parts: Sequence[NDArray[np.int64]], found: Sequence[Fitted]) -> Fitted:
    """Returns models of some groups and models of the others, in the order of the block."""
    models = np.empty(groups, object)
    failed: dict[int, str] = {}
    for at, fitted in zip(parts, found, strict=True):
        models[at] = fitted.stack["trees"]
        failed |= {int(at[g]): message for g, message in fitted.failed.items()}
    return Fitted({"trees": models}, failed)
