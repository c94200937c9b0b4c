"""The extension point: quantizers by name, ours and those that other distributions bring.

Another distribution adds one by an entry point ``name = "module:SpecClass"`` in the group
``bifeat_pyg.quantizers``; the class derives from `Spec` and its `fit` returns a `Codec`. It may
live in ``bifeat_pyg/quantizers/<name>/`` without shipping this file.
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib.metadata import entry_points as _entry_points

from bifeat_pyg._errors import SpecError as _SpecError
from bifeat_pyg.quantizers._base import Codec as Codec
from bifeat_pyg.quantizers._base import Spec as Spec
from bifeat_pyg.quantizers._base import Summary as Summary

_GROUP = "bifeat_pyg.quantizers"


def available() -> tuple[str, ...]:
    """Returns the names of all installed quantizers, sorted; imports none of them."""
    return tuple(sorted({point.name for point in _entry_points(group=_GROUP)}))


def get(name: str) -> type[Spec]:
    """Returns the Spec class of this name.

    Raises:
        SpecError: no installed quantizer has this name, or what has it is not a Spec.
    """
    for point in _entry_points(group=_GROUP, name=name):
        found = point.load()
        if not (isinstance(found, type) and issubclass(found, Spec)):
            raise _SpecError(
                f"the entry point {name!r} of {_GROUP} gives {found!r}; it must name a Spec class"
            )
        return found
    raise _SpecError(f"no quantizer is called {name!r}; installed: {', '.join(available())}")
