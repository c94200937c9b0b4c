"""Models of a fitted estimator, by key, made when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._errors import UnknownGroupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kingpin_ray._served import Served


class Estimators(Mapping[Any, Any]):
    """Makes the estimator of a key when it is asked for."""

    def __init__(self, served: Served) -> None:
        self._of = served

    def __getitem__(self, key: Any) -> Any:
        group = self._of.keys.find(key)
        if group < 0 or self._of.slot[group] < 0:
            raise UnknownGroupError(
                f"group {key!r} has no model of its own; results_ says why, if it was in the data"
            )
        return self._of.export(int(self._of.slot[group]))

    def __contains__(self, key: object) -> bool:
        group = self._of.keys.find(key)
        return group >= 0 and bool(self._of.slot[group] >= 0)

    def __iter__(self) -> Iterator[Any]:
        keys = self._of.keys.keys()
        return (keys[g] for g in np.flatnonzero(self._of.slot >= 0))

    def __len__(self) -> int:
        return int((self._of.slot >= 0).sum())
