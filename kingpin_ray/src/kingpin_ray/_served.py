"""The trained models as one table, and predictions for rows of any mix of groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._errors import UnknownGroupError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kingpin_ray._keys import KeyTable
    from kingpin_ray.models._base import GroupModel, Naming, Stack

MISSING = -1


@dataclass
class Served:
    """Models of all groups, in one stack.

    Attributes:
        model: the kind of model.
        configs: parameter settings; `config` points into it.
        keys: the groups.
        naming: feature names and classes.
        stack: parameters of M models.
        config: (M,) the setting of each model.
        slot: (G,) the model of each group; MISSING when it has none.
        constant: (G,) class code of a group that held one class only and has no fallback; -1.
        fallback: the model for groups without one; MISSING when there is none.
        parent_slot: (parents,) the model of each parent key; empty without parents.
        parents: keys of the parents; None without them.
        skipped: (G,) groups that must not be predicted (`on_bad="skip"`).
    """

    model: GroupModel
    configs: tuple[Mapping[str, Any], ...]
    keys: KeyTable
    naming: Naming
    stack: Stack
    config: NDArray[np.int64]
    slot: NDArray[np.int64]
    constant: NDArray[np.int64]
    fallback: int
    parents: KeyTable | None
    parent_slot: NDArray[np.int64]
    skipped: NDArray[np.bool_]

    def predict(
        self, X: NDArray[np.floating], key_columns: list[Any], n_classes: int
    ) -> NDArray[np.float64]:
        """Returns (N,) values or (N, n_classes) probabilities.

        Raises:
            UnknownGroupError: rows belong to groups that nothing can serve.
        """
        group = self.keys.lookup(key_columns)
        slot = np.where(group >= 0, self.slot[group], MISSING)
        constant = np.where(group >= 0, self.constant[group], -1)
        open_rows = (slot == MISSING) & (constant < 0)
        if open_rows.any():
            slot = self._fall_back(slot, open_rows, group, key_columns)
        shape = (len(X), n_classes) if n_classes else (len(X),)
        out = np.zeros(shape)
        modelled = slot != MISSING
        if modelled.all():
            out = self.model.predict(self.stack, X, slot, n_classes)
        elif modelled.any():
            out[modelled] = self.model.predict(self.stack, X[modelled], slot[modelled], n_classes)
        if n_classes:
            alone = ~modelled
            out[alone, constant[alone]] = 1.0
        return out

    def _fall_back(
        self,
        slot: NDArray[np.int64],
        open_rows: NDArray[np.bool_],
        group: NDArray[np.int64],
        key_columns: list[Any],
    ) -> NDArray[np.int64]:
        barred = open_rows & (group >= 0) & self.skipped[group]
        slot = slot.copy()
        if self.parents is not None:
            at = np.flatnonzero(open_rows & ~barred)
            parent = self.parents.lookup([column.take(at) for column in key_columns[:-1]])
            slot[at] = np.where(parent >= 0, self.parent_slot[parent], MISSING)
        rest = open_rows & ~barred & (slot == MISSING)
        slot[rest] = self.fallback
        lost = open_rows & (slot == MISSING)
        if lost.any():
            row = int(np.flatnonzero(lost)[0])
            values = tuple(column[row].as_py() for column in key_columns)
            key = values[0] if len(values) == 1 else values
            why = "was skipped in training (on_bad='skip')" if barred[row] else "has no model"
            raise UnknownGroupError(
                f"{int(lost.sum())} rows have no model; the first, row {row}, is in "
                f"group {key!r}, which {why}. Fit with fallback='global', or leave such rows out"
            )
        return slot

    def best_params(self) -> dict[Any, dict[str, Any]]:
        """Returns the setting of each group that has a model of its own, by key."""
        keys = self.keys.keys()
        return {
            keys[g]: dict(self.configs[int(self.config[slot])])
            for g, slot in enumerate(self.slot)
            if slot >= 0
        }

    def export(self, slot: int) -> Any:
        """Returns one model as an object of its host library."""
        config = self.configs[int(self.config[slot])]
        return self.model.export(self.stack, slot, self.naming, config)
