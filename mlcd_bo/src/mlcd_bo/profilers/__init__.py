"""Profilers: what runs a job on a deployment for a little while and measures its speed.

Another distribution adds one by shipping ``mlcd_bo/profilers/<name>/`` (without this file) and an
entry point of the group ``mlcd_bo.profilers`` that names the class.
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib.metadata import entry_points as _entry_points
from typing import Any as _Any

from .._errors import UnknownName as _UnknownName

_GROUP = "mlcd_bo.profilers"


def available() -> tuple[str, ...]:
    """Returns the names of all installed profilers, sorted; nothing is imported."""
    return tuple(sorted({point.name for point in _entry_points(group=_GROUP)}))


def get(name: str) -> _Any:
    """Returns the profiler class registered as `name`.

    Raises:
        UnknownName: no installed distribution registers it; the message lists those that are.
    """
    for point in _entry_points(group=_GROUP):
        if point.name == name:
            return point.load()
    raise _UnknownName(
        f"profiler {name!r} is not installed; available: {', '.join(available()) or 'none'}"
    )
