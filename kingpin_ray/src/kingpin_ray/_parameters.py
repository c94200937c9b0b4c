"""An estimator's parameters, checked and put in the form of a task."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.model_selection import ParameterGrid

from kingpin_ray._engine import Task
from kingpin_ray._errors import ParameterError
from kingpin_ray._folds import parse_cv
from kingpin_ray._scoring import scorer
from kingpin_ray.models._base import GroupModel
from kingpin_ray.models._sklearn import PerGroup

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


def task_of(estimator: Any) -> Task:
    """Returns what an estimator's parameters ask for.

    Raises:
        ParameterError: one of them has a value that is not allowed.
    """
    model = as_model(estimator.model)
    if estimator.on_bad not in _ON_BAD:
        raise ParameterError(f"on_bad={estimator.on_bad!r}: choose one of {_ON_BAD}")
    if estimator.fallback not in _FALLBACKS:
        raise ParameterError(f"fallback={estimator.fallback!r}: choose one of {_FALLBACKS}")
    if not isinstance(estimator.min_rows, (int, np.integer)) or estimator.min_rows < 1:
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
    try:
        configs = tuple(ParameterGrid(estimator.param_grid)) if estimator.param_grid else ({},)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"param_grid={estimator.param_grid!r}: {error}") from error
    for config in configs:
        model.check(config)
    name, _ = scorer(estimator.scoring, model.classifier)
    split = parse_cv(estimator.cv, len(configs))
    return Task(model, configs, split, name, int(estimator.min_rows), "local")
