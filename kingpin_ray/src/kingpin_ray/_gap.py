"""Gradient accumulation parallelism: groups whose rows are split over workers, trained in step.

Every worker holds some rows of every group of a chunk and sums each model's gradient (or Gram
matrix, or Newton terms) over them; one exchange per step then adds up all models of all groups at
once. The number of exchanges does not depend on how many groups and settings there are.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._blocks import offsets_of
from kingpin_ray._engine import Choice, Outcome, Task, choose, finish, screen
from kingpin_ray._errors import MissingDependencyError
from kingpin_ray._folds import fold_of_row
from kingpin_ray._scoring import scorer
from kingpin_ray._shuffle import join_pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kingpin_ray._blocks import Block
    from kingpin_ray._shuffle import Header

TIMEOUT_S = 120.0
"""A worker that hears nothing for so long gives up; the driver then rebuilds the group."""


class Exchange:
    """Sums and gathers over all workers, by gloo or NCCL.

    Args:
        rank: this worker's number.
        world: workers.
        address: "host:port" where worker 0 listens.
        backend: "gloo", or "nccl" where every worker has a GPU of its own.

    Raises:
        MissingDependencyError: PyTorch is not installed.
    """

    def __init__(self, rank: int, world: int, address: str, backend: str = "gloo") -> None:
        try:
            import torch
            from torch import distributed
        except ImportError as error:
            raise MissingDependencyError(
                "splitting groups over workers needs PyTorch: pip install 'kingpin-ray[torch]'"
            ) from error
        self._torch, self._dist = torch, distributed
        # Ray shows each worker its own GPU alone, so that is number 0.
        self._device = torch.device("cuda:0" if backend == "nccl" else "cpu")
        self.rank, self.world = rank, world
        self.count = 0
        self.sent_bytes = 0
        distributed.init_process_group(
            backend,
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT_S),
        )

    def __call__(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns what `add` returns: models take an exchange as the function that sums."""
        return self.add(values)

    def tensor(self, values: Any) -> None:
        """Sums a tensor over all workers in place, the same bytes on each.

        NCCL takes a tensor where it is, gloo sums on the CPU.
        """
        here = values if values.is_contiguous() else values.contiguous()
        here = here.to(self._device)
        self._dist.all_reduce(here)
        if here is not values:
            values.copy_(here)
        self.count += 1
        self.sent_bytes += values.nbytes

    def add(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the sum of an array over all workers, the same bytes on each."""
        found = self._torch.from_numpy(np.array(values, order="C"))
        self.tensor(found)
        return np.asarray(found.numpy())

    def gather(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Returns every worker's array, by rank; they may differ in their first length."""
        torch = self._torch
        length = torch.zeros(self.world, dtype=torch.int64, device=self._device)
        length[self.rank] = len(values)
        self._dist.all_reduce(length)
        length = length.cpu()
        padded = np.zeros((int(length.max()), *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        mine = torch.from_numpy(padded).to(self._device)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        self._dist.all_gather(found, mine)
        return [t.cpu().numpy()[: int(n)] for t, n in zip(found, length, strict=True)]

    def close(self) -> None:
        """Leaves the group."""
        self._dist.destroy_process_group()


class SplitWorker:
    """A Ray actor that holds some rows of every group."""

    def __init__(self) -> None:
        self._exchange: Exchange | None = None

    def ready(self) -> str:
        """Returns "host:port" at which this actor could listen."""
        import ray

        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def join(self, rank: int, world: int, address: str, backend: str) -> int:
        """Enters the group and returns the process id."""
        self._exchange = Exchange(rank, world, address, backend)
        return os.getpid()

    def fit(self, block: Block, task: Task) -> tuple[Outcome | None, dict[str, float]]:
        """Returns what became of the groups (from worker 0 only) and what the exchange cost."""
        assert self._exchange is not None
        before = self._exchange.count, self._exchange.sent_bytes
        began = time.perf_counter()
        outcome = fit_split(block, task, self._exchange)
        cost = {
            "exchanges": self._exchange.count - before[0],
            "bytes": self._exchange.sent_bytes - before[1],
            "seconds": time.perf_counter() - began,
        }
        return (outcome if self._exchange.rank == 0 else None), cost

    def fit_pieces(
        self, task: Task, header: Header, *pieces: Any
    ) -> tuple[Outcome | None, dict[str, float]]:
        """As `fit`, of rows that come as some parts of the data."""
        return self.fit(join_pieces(header, pieces), task)

    def time_sums(self, size: int, rounds: int) -> float:
        """Returns the seconds of one sum of `size` float64 over all workers; the first is warm-up.

        Every worker must be asked at the same time.
        """
        assert self._exchange is not None
        values = np.ones(size)
        self._exchange.add(values)
        began = time.perf_counter()
        for _ in range(rounds):
            self._exchange.add(values)
        return (time.perf_counter() - began) / rounds

    def take(self, values: NDArray[Any]) -> int:
        """Returns the bytes of an array, once it is here."""
        return int(values.nbytes)

    def leave(self) -> None:
        """Leaves the group."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None


def fit_split(block: Block, task: Task, exchange: Exchange) -> Outcome:
    """As `_engine.fit_block`, of which each worker holds some rows."""
    model = task.model
    _, score_of = scorer(task.scoring, model.classifier)
    counts = exchange.add(block.counts)
    status, error = screen(block, task, exchange.add)
    good = np.flatnonzero(status == "ok")
    part = _rebase(block.select(good), exchange)
    choice = Choice.none(len(good))
    if task.split is not None and len(good):
        began = time.perf_counter()
        shape = (len(good), len(task.configs), task.split.n_folds)
        scores = np.full(shape, np.nan)
        failed: dict[tuple[int, int, int], str] = {}
        folds = fold_of_row(part, task.split)
        for f in range(task.split.n_folds):
            train = _rebase(part.keep(folds != f), exchange)
            test = part.keep(folds == f)
            usable = exchange.add(test.counts) > 0
            if model.classifier:
                usable &= (exchange.add(train.class_counts()) > 0).sum(axis=1) >= 2
            for g in np.flatnonzero(~usable):
                failed.update({(int(g), c, f): "single_class" for c in range(shape[1])})
            at = np.flatnonzero(usable)
            if not len(at):
                continue
            train, test = train.select(at), test.select(at)
            for c, fitted in enumerate(model.fit_split(train, task.configs, exchange)):
                raw = model.predict(fitted.stack, test.X, test.group_of_row(), block.n_classes)
                score = _score_all(test, raw, score_of, exchange)
                for position, message in fitted.failed.items():
                    failed[int(at[position]), c, f] = message
                    score[position] = np.nan
                scores[at, c, f] = score
        choice = choose(scores, failed, time.perf_counter() - began)

    def fit(some: Block, config: Any) -> Any:
        fitted = model.fit_split(some, [config], exchange)[0]
        raw = model.predict(fitted.stack, some.X, some.group_of_row(), block.n_classes)
        return fitted, _score_all(some, raw, score_of, exchange)

    whole = replace(block, offsets=offsets_of(counts))
    return finish(whole, part, good, task, status, error, choice, fit)


def _rebase(block: Block, exchange: Exchange) -> Block:
    """Returns the block knowing how many of each group's rows lower workers hold."""
    counts = np.stack(exchange.gather(block.counts[None])).reshape(exchange.world, -1)
    return replace(block, first=counts[: exchange.rank].sum(axis=0))


def _score_all(block: Block, raw: NDArray[Any], score_of: Any, exchange: Exchange) -> NDArray[Any]:
    """Returns (G,) scores over the rows of all workers."""
    owner = np.concatenate(exchange.gather(block.group_of_row()))
    order = np.argsort(owner, kind="stable")
    y = np.concatenate(exchange.gather(block.y))[order]
    raw = np.concatenate(exchange.gather(raw))[order]
    offsets = offsets_of(np.bincount(owner, minlength=block.n_groups))
    return np.asarray(score_of(y, raw, offsets))
