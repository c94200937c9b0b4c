"""Trees by LightGBM, one group after another: where the own kernel is absent or cannot do it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._errors import MissingDependencyError
from kingpin_ray._folds import hold_out
from kingpin_ray.models._base import Fitted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block

_PASSED_ON = (
    "num_leaves",
    "min_child_samples",
    "learning_rate",
    "reg_lambda",
    "min_child_weight",
    "max_bin",
    "objective",
)


def lightgbm() -> Any:
    """Returns the library.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import lightgbm as found
    except ImportError as error:
        raise MissingDependencyError(
            "this needs LightGBM (for more than two classes, categorical features, monotone "
            "constraints, weights or very large groups, for estimators_, or because the tree "
            "kernel was not built): pip install 'kingpin-ray[lightgbm]'"
        ) from error
    return found


def fit(block: Block, params: Mapping[str, Any]) -> Fitted:
    """Returns one booster a group, as LightGBM's text.

    Args:
        block: the groups.
        params: of `GBDT`, its columns as positions.
    """
    library = lightgbm()
    share = float(params["validation_fraction"]) if params["early_stopping_rounds"] else 0.0
    held = hold_out(block, share)
    models = np.empty(block.n_groups, object)
    options = {name: params[name] for name in _PASSED_ON}
    options |= {"num_threads": 1, "verbosity": -1, "seed": 0, "deterministic": True}
    if params["objective"] == "multiclass":
        options["num_class"] = block.n_classes
    if params["monotone_constraints"] is not None:
        options["monotone_constraints"] = list(params["monotone_constraints"])
    categories = list(params["categorical_feature"] or [])
    X, weight = block.X, None
    if params["weight_column"] is not None:
        weight = np.asarray(X[:, params["weight_column"]], np.float64)
        X = X.copy()
        X[:, params["weight_column"]] = 0.0  # a constant, which no tree cuts
    failed: dict[int, str] = {}
    for g in range(block.n_groups):
        begin, end = int(block.offsets[g]), int(block.offsets[g + 1])
        message = _unfit(X[begin:end], categories, None if weight is None else weight[begin:end])
        if message is not None:
            failed[g] = message
            continue
        train, watched = held.order[begin : held.middle[g]], held.order[held.middle[g] : end]

        def made(rows: NDArray[np.int64], base: Any = None) -> Any:
            return library.Dataset(
                X[rows],
                block.y[rows],
                weight=None if weight is None else weight[rows],
                reference=base,
                categorical_feature=categories or "auto",
                params={"verbosity": -1, "max_bin": params["max_bin"]},
            )

        data = made(train)
        extra: dict[str, Any] = {}
        if len(watched):
            extra["valid_sets"] = [made(watched, data)]
            rounds = int(params["early_stopping_rounds"])
            extra["callbacks"] = [library.early_stopping(rounds, verbose=False)]
        try:
            booster = library.train(options, data, int(params["n_estimators"]), **extra)
            best = booster.best_iteration if len(watched) else None
            models[g] = booster.model_to_string(num_iteration=best).encode()
        except library.basic.LightGBMError as error:
            failed[g] = f"LightGBMError: {error}"
    return Fitted({"trees": models}, failed)


def _unfit(
    X: NDArray[np.floating], categories: list[int], weight: NDArray[np.float64] | None
) -> str | None:
    """Returns why a group's rows cannot be used, which LightGBM would not say; None if they can."""
    codes = X[:, categories]
    codes = codes[~np.isnan(codes)]
    if ((codes < 0) | (codes != np.floor(codes)) | (codes >= 2**31)).any():
        return "categorical_feature: codes must be whole numbers of at least 0, or NaN"
    if weight is not None and not (np.isfinite(weight) & (weight >= 0)).all():
        return "weight_column: weights must be finite numbers of at least 0"
    return None


def predict(payload: bytes, X: NDArray[np.float64], n_classes: int) -> NDArray[np.float64]:
    """Returns (N,) values or (N, n_classes) probabilities of one booster's text."""
    booster = lightgbm().Booster(model_str=payload.decode(), params={"verbosity": -1})
    found = np.asarray(booster.predict(X, num_threads=1))
    if n_classes == 2 and found.ndim == 1:
        return np.stack([1.0 - found, found], axis=1)
    return found
