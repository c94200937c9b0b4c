"""Kinds of model that `GroupedEstimator` trains; other distributions may add more.

A third party ships `kingpin_ray/models/<name>/` (without this file) and an entry point of the group
`kingpin_ray.models` that names a `GroupModel` subclass.
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib import import_module as _import_module
from importlib.metadata import entry_points as _entry_points

from kingpin_ray._errors import UnknownModelError as _UnknownModelError
from kingpin_ray.models._base import Fitted as Fitted
from kingpin_ray.models._base import GroupModel as GroupModel
from kingpin_ray.models._base import Naming as Naming
from kingpin_ray.models._base import Stack as Stack

GROUP = "kingpin_ray.models"

_BUILT_IN = {
    "gbdt": ("kingpin_ray.models._gbdt", "GBDT"),
    "linear": ("kingpin_ray.models._linear", "Linear"),
    "logistic": ("kingpin_ray.models._logistic", "Logistic"),
    "mlp": ("kingpin_ray.models._network", "MLP"),
    "ridge": ("kingpin_ray.models._linear", "Ridge"),
    "torch": ("kingpin_ray.models._network", "Torch"),
}


def available() -> tuple[str, ...]:
    """Returns the names of all installed kinds of model, sorted; nothing is imported for it."""
    return tuple(sorted({*_BUILT_IN, *(entry.name for entry in _entry_points(group=GROUP))}))


def get(name: str) -> type[GroupModel]:
    """Returns the class of a kind of model.

    Raises:
        UnknownModelError: no installed distribution offers that name.
    """
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        found: type[GroupModel] = getattr(_import_module(module), attribute)
        return found
    for entry in _entry_points(group=GROUP, name=name):
        loaded: type[GroupModel] = entry.load()
        return loaded
    raise _UnknownModelError(
        f"model={name!r} is not installed; available are {', '.join(available())}. "
        f"Another distribution can add it by an entry point of the group {GROUP!r}"
    )
