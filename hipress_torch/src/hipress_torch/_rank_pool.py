"""Processes on this machine that form a gloo group and run what they are told."""

import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection, get_context
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


class RankPool:
    """Processes that form a gloo process group and run functions together, until it is closed.

    Starting a process costs seconds, most of it importing torch: a pool runs many functions.

    Example:
        >>> with RankPool(2) as pool:  # doctest: +SKIP
        ...     results = pool.run(train, "onebit")
    """

    def __init__(self, ranks: int, *, threads: int = 1) -> None:
        """Starts the processes.

        Args:
            ranks: how many.
            threads: torch threads of each.
        """
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="hipress-")
        self._pipes: list[connection.Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, ranks, theirs, os.path.join(self._folder.name, "store"), threads),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 120.0,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Returns what ``function(rank, ranks, *args)`` returned in each process.

        Args:
            function: a function at the top level of a module.
            args: further arguments, which can be pickled; so must be what is returned.
            timeout_s: how long to wait, in seconds.
            ranks: wait for these alone; the others are expected not to answer.

        Raises:
            RuntimeError: a process raised (its traceback is in the message), ended, or took too
                long; the pool is closed then.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        expected = range(len(self._pipes)) if ranks is None else ranks
        waiting = {self._pipes[r]: r for r in expected}
        results: dict[int, Any] = {}
        while waiting:
            ready = connection.wait(list(waiting), timeout_s)
            if not ready:
                self.close()
                raise RuntimeError(
                    f"ranks {sorted(waiting.values())} were still running after {timeout_s} s"
                )
            for pipe in [p for p in waiting if p in ready]:
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = pipe.recv()
                except EOFError:
                    succeeded, value = False, "its process ended"
                if not succeeded:
                    self.close()
                    raise RuntimeError(f"rank {rank} of {len(self._pipes)} failed:\n{value}")
                results[rank] = value
        return [results[r] for r in expected]

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 120.0, threads: int = 1
) -> list[Any]:
    """Returns what ``function(rank, ranks, *args)`` returned in each of ``ranks`` new processes.

    Args:
        function: a function at the top level of a module.
        ranks: how many processes; they form a gloo process group.
        args: further arguments, which can be pickled; so must be what is returned.
        timeout_s: after how many seconds the processes are ended.
        threads: torch threads of each process.

    Raises:
        RuntimeError: a process raised (its traceback is in the message), ended, or took too long.
    """
    with RankPool(ranks, threads=threads) as pool:
        return pool.run(function, *args, timeout_s=timeout_s)


def _serve(rank: int, ranks: int, pipe: connection.Connection, store: str, threads: int) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(rank, ranks, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
