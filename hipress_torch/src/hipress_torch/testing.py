"""Helpers for tests of codecs and of training code: real processes on this machine."""

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 120.0, threads: int = 1
) -> list[Any]:
    """Returns what ``function(rank, ranks, *args)`` returned in each of ``ranks`` new processes.

    The processes form a gloo process group on this machine. When one fails, the others are ended.

    Args:
        function: a function at the top level of a module.
        ranks: how many processes.
        args: further arguments, which can be pickled; so must be what is returned.
        timeout_s: after how many seconds the processes are ended.
        threads: torch threads of each process.

    Raises:
        RuntimeError: a process raised (its traceback is in the message), died, or took too long.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="hipress-") as folder:
        processes: list[BaseProcess] = []
        try:
            for rank in range(ranks):
                process: BaseProcess = context.Process(
                    target=_rank_main,
                    args=(function, rank, ranks, args, folder, threads),
                    daemon=True,
                )
                process.start()
                processes.append(process)
            _wait_all(processes, Path(folder), timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"result{r}").read_bytes()) for r in range(ranks)]


def _wait_all(processes: Sequence[BaseProcess], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(p.is_alive() for p in processes):
        failed = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for rank, process in enumerate(processes):
        if process.exitcode not in (None, 0):
            errors = folder / f"error{rank}"
            told = errors.read_text() if errors.exists() else f"exit status {process.exitcode}"
            raise RuntimeError(f"rank {rank} of {len(processes)} failed:\n{told}")
    if any(p.is_alive() for p in processes):
        alive = [r for r, p in enumerate(processes) if p.is_alive()]
        raise RuntimeError(
            f"ranks {alive} of {len(processes)} were still running after {timeout_s} s"
        )


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    args: tuple[Any, ...],
    folder: str,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    try:
        store = FileStore(os.path.join(folder, "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        result = function(rank, ranks, *args)
        (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        (Path(folder) / f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
