"""Puts the outcomes of all chunks together, in the order of the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from kingpin_ray._engine import RESULT_FIELDS, Outcome, Task
from kingpin_ray._served import MISSING, Served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kingpin_ray._keys import KeyTable
    from kingpin_ray.models._base import Naming, Stack


def assemble(
    outcomes: Sequence[Outcome], keys: KeyTable, task: Task, naming: Naming
) -> tuple[pa.Table, Served]:
    """Returns all result rows, sorted, and the models, without a fallback yet.

    The outcomes lose their models one by one, so that these are not held twice.
    """
    groups = np.concatenate([np.zeros(0, np.int64), *(o.groups for o in outcomes)])
    slot = np.full(len(keys), MISSING)
    slot[np.sort(groups)] = np.arange(len(groups))
    config = np.zeros(len(groups), np.int64)
    stack: Stack = {}
    for outcome in outcomes:
        at = slot[outcome.groups]
        config[at] = outcome.config
        for name, values in outcome.stack.items():
            if name not in stack:
                stack[name] = np.empty((len(groups), *values.shape[1:]), values.dtype)
            stack[name][at] = values
        outcome.stack = {}
    empty = pa.schema(RESULT_FIELDS).empty_table()
    results = pa.concat_tables([empty, *(outcome.results for outcome in outcomes)])
    results = results.sort_by(
        [("group", "ascending"), ("config", "ascending"), ("fold", "ascending")]
    )
    return results, Served(
        model=task.model,
        configs=task.configs,
        keys=keys,
        naming=naming,
        stack=stack,
        config=config,
        slot=slot,
        constant=np.full(len(keys), -1),
        fallback=MISSING,
        parents=None,
        parent_slot=np.zeros(0, np.int64),
        skipped=np.zeros(len(keys), bool),
    )
