"""An estimator's parameters, checked and put in the form of a task."""

from __future__ import annotations

import numbers
import warnings
from typing import Any

import numpy as np
from sklearn.model_selection import ParameterGrid, ParameterSampler

from kingpin_ray._engine import Task
from kingpin_ray._errors import ParameterError
from kingpin_ray._folds import parse_cv
from kingpin_ray._scoring import scorer
from kingpin_ray.models._base import GroupModel
from kingpin_ray.models._sklearn import PerGroup

_NAMES = "a column's name, or its number in an array"
_ON_BAD = ("fallback", "skip", "raise")
_FALLBACKS = ("global", "parent", None)


def as_model(model: Any) -> GroupModel:
    """Returns `model` itself, or a scikit-learn estimator wrapped to run group by group.

    Raises:
        ParameterError: it is neither.
    """
    if isinstance(model, GroupModel):
        return model
    if isinstance(model, type):
        raise ParameterError(
            f"model={model.__name__} is a class; give an object, {model.__name__}()"
        )
    if hasattr(model, "fit") and hasattr(model, "predict") and hasattr(model, "get_params"):
        return PerGroup(model)
    raise ParameterError(
        f"model={model!r} is neither a model of kingpin_ray.models nor a scikit-learn estimator"
    )


def seed_of(random_state: Any) -> int:
    """Returns the seed of a run; None and generators draw one.

    Raises:
        ParameterError: it is neither a whole number of at least 0, nor None, nor a generator.
    """
    if random_state is None:
        return int(np.random.default_rng().integers(2**31))
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    whole = isinstance(random_state, numbers.Integral) and not isinstance(random_state, bool)
    if not whole or random_state < 0:
        raise ParameterError(
            f"random_state={random_state!r}: give a whole number of at least 0, a NumPy generator, "
            "or None"
        )
    return int(random_state)


def _check_columns(estimator: Any) -> None:
    """Raises ParameterError unless by, target and features name columns."""

    def names_one(value: Any) -> bool:
        return isinstance(value, (str, numbers.Integral)) or (
            isinstance(value, tuple) and all(names_one(part) for part in value)
        )

    by, target, features = estimator.by, estimator.target, estimator.features
    keys = list(by) if isinstance(by, (list, tuple)) else [] if by is None else [by]
    if by is not None and (not keys or not all(names_one(key) for key in keys)):
        raise ParameterError(f"by={by!r}: give {_NAMES}, or a list of them")
    if target is not None and not names_one(target):
        raise ParameterError(f"target={target!r}: give {_NAMES}; one target only")
    many = isinstance(features, (list, tuple, np.ndarray)) or hasattr(features, "tolist")
    if features is not None and not (many and all(names_one(name) for name in list(features))):
        raise ParameterError(
            f"features={features!r}: give a list whose entries are each {_NAMES}, or None for all"
        )


def _settings(estimator: Any, seed: int) -> tuple[dict[str, Any], ...]:
    """Returns the settings to try, at least one.

    Raises:
        ParameterError: the grid, or the number of draws, has a value that is not allowed.
    """
    grid, draws = estimator.param_grid, estimator.n_iter
    whole = isinstance(draws, numbers.Integral) and not isinstance(draws, bool)
    if draws is not None and (not whole or draws < 1):
        raise ParameterError(f"n_iter={draws!r}: give a whole number of at least 1, or None")
    if draws is not None and not grid:
        raise ParameterError("n_iter draws settings from param_grid, which is None; give one")
    if not grid:
        return ({},)
    try:
        if draws is None:
            return tuple(ParameterGrid(grid))
        with warnings.catch_warnings():
            # A grid smaller than n_iter is tried whole, which is no reason for a warning.
            warnings.simplefilter("ignore", UserWarning)
            drawn = list(ParameterSampler(grid, int(draws), random_state=seed % 2**32))
    except (TypeError, ValueError) as error:
        raise ParameterError(f"param_grid={grid!r}: {error}") from error
    plain = [{name: _plain(value) for name, value in setting.items()} for setting in drawn]
    return tuple(setting for i, setting in enumerate(plain) if setting not in plain[:i])


def _plain(value: Any) -> Any:
    """Returns a drawn value as a Python number, which a store can write down."""
    return value.item() if isinstance(value, np.generic) else value


def task_of(estimator: Any, seed: int) -> Task:
    """Returns what an estimator's parameters ask for.

    Args:
        estimator: whose parameters count.
        seed: of the run; it draws the settings of a random search.

    Raises:
        ParameterError: one of them has a value that is not allowed.
    """
    model = as_model(estimator.model)
    _check_columns(estimator)
    if estimator.on_bad not in _ON_BAD:
        raise ParameterError(f"on_bad={estimator.on_bad!r}: choose one of {_ON_BAD}")
    if estimator.fallback not in _FALLBACKS:
        raise ParameterError(f"fallback={estimator.fallback!r}: choose one of {_FALLBACKS}")
    least = estimator.min_rows
    if not isinstance(least, numbers.Integral) or isinstance(least, bool) or least < 1:
        raise ParameterError(f"min_rows={estimator.min_rows!r}: give a whole number of at least 1")
    actors = estimator.num_actors
    if actors is not None and (not isinstance(actors, (int, np.integer)) or actors < 1):
        raise ParameterError(f"num_actors={actors!r}: give a whole number of at least 1")
    if estimator.fallback == "parent" and not (
        isinstance(estimator.by, (list, tuple)) and len(estimator.by) > 1
    ):
        raise ParameterError(
            f"fallback='parent' needs at least two key columns, by={estimator.by!r}; "
            "use fallback='global'"
        )
    configs = _settings(estimator, seed)
    for config in configs:
        model.check(config)
    name, _ = scorer(estimator.scoring, model.classifier)
    split = parse_cv(estimator.cv, len(configs))
    return Task(model, configs, split, name, int(estimator.min_rows), "local")
