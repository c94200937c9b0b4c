"""The Ray actor: trains the blocks it is handed and keeps nothing between them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kingpin_ray._engine import fit_block
from kingpin_ray._shuffle import join_pieces

if TYPE_CHECKING:
    from kingpin_ray._blocks import Block
    from kingpin_ray._engine import Outcome, Task
    from kingpin_ray._shuffle import Header


class Worker:
    """Trains one block at a time on one CPU.

    Nothing is lost with a worker but the block it was on: data arrives as arguments from Ray's
    object store, results go back at once.
    """

    def ready(self) -> int:
        """Returns the process id, once the actor runs."""
        return os.getpid()

    def fit(self, block: Block, task: Task) -> Outcome:
        """Returns what became of the block's groups.

        Arrays of the object store are read-only, which some Cython estimators refuse; those get
        a copy.
        """
        if task.model.needs_pickle:
            from dataclasses import replace

            block = replace(block, X=block.X.copy(), y=block.y.copy())
        return fit_block(block, task)

    def fit_pieces(self, task: Task, header: Header, *pieces: Any) -> Outcome:
        """Returns what became of a chunk whose rows come from several parts."""
        return self.fit(join_pieces(header, pieces), task)
