"""Result rows under the user's own column names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kingpin_ray._engine import SERVED, Task
from kingpin_ray._errors import BadGroupError

if TYPE_CHECKING:
    from kingpin_ray._frame import Frame
    from kingpin_ray._parts import Parts


def with_keys(results: pa.Table, frame: Frame | Parts, task: Task, by: Any) -> pa.Table:
    group = results.column("group")
    names = [
        str(b)
        for b in (by if isinstance(by, (list, tuple)) else [by if by is not None else "group"])
    ]
    columns: dict[str, Any] = {}
    for j, name in enumerate(frame.keys.names):
        shown = names[j] if j < len(names) and len(names) == len(frame.keys.names) else name
        taken = shown in results.column_names or shown == "params"
        columns[f"by_{shown}" if taken else shown] = frame.keys.table.column(j).take(group)
    config = results.column("config")
    params = pa.array([json.dumps(c, default=str, sort_keys=True) for c in task.configs])
    columns["config"] = config
    columns["params"] = params.take(config.combine_chunks())
    for name in results.column_names[2:]:
        columns[name] = results.column(name)
    return pa.table(columns)


def raise_bad(results: pa.Table, frame: Frame | Parts) -> None:
    status = np.array(results.column("status").to_pylist(), object)
    fold = results.column("fold").is_null().to_numpy(zero_copy_only=False)
    bad = np.flatnonzero(fold & ~np.isin(status, SERVED))
    if len(bad):
        group = results.column("group").to_numpy()
        errors = results.column("error")
        first = "; ".join(
            f"{frame.keys.key(int(group[row]))!r} ({status[row]}: {errors[int(row)].as_py()})"
            for row in bad[:3]
        )
        raise BadGroupError(
            f"{len(bad)} of {len(frame.keys)} groups could not be trained: {first}. "
            "Use on_bad='fallback' or 'skip' to go on without them"
        )


def final_rows(results: pa.Table) -> pa.Table:
    """Returns the row of each group's final model."""
    return results.filter(pc.is_null(results.column("fold")))


def bad_groups(results: pa.Table) -> tuple[pa.Table, dict[str, int]]:
    """Returns keys and errors of the groups without a model, and how many have each status."""
    final = final_rows(results)
    statuses = final.column("status").to_pylist()
    counts = {status: statuses.count(status) for status in set(statuses)}
    bad = final.filter(pc.invert(pc.is_in(final.column("status"), pa.array(SERVED))))
    stop = final.schema.get_field_index("config")
    return bad.select([*final.column_names[:stop], "error"]), counts
