"""When a plan is made anew: once the backward pass is known, and when measured times drift.

All of it happens at step boundaries, with nothing under way, and every decision follows from
numbers that one collective made equal on all ranks.
"""

import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from hipress_torch._groups import guarded, wire_device

# DDP fills its buckets anew after the first pass, and kernels are compiled on first use.
WARM_UP = 2
LEARN = 6
EVERY = 50
DRIFT = 1.25
# Windows in a row that have to differ: one may have been disturbed by something that is gone.
PATIENCE = 2


class Watch:
    """Watches one state's exchanges.

    Attributes:
        every: passes in a window; a window's median is compared with the first window's.
        drift: the ratio of the two from which on a window counts as drifted;
            ``PATIENCE`` of them in a row and the plan is made anew.
    """

    def __init__(self) -> None:
        self.every = EVERY
        self.drift = DRIFT
        self._gaps: dict[int, tuple[int, list[float]]] = {}
        self._periods: list[float] = []
        self._began = self._left = 0.0
        self._baseline = 0.0
        self._since = 0
        self._beyond = 0

    def began(self) -> None:
        """Notes that a backward pass reached its first bucket: a step after the last did."""
        now = time.perf_counter()
        if self._began:
            self._periods.append(now - self._began)
        self._began = now

    def arrived(self, index: int, elements: int) -> None:
        """Notes that a bucket's hook was called: how long the backward pass computed for it."""
        gap = 0.0 if index == 0 else time.perf_counter() - self._left
        known = self._gaps.get(index)
        if known is None or known[0] != elements:
            known = self._gaps[index] = (elements, [])
        known[1].append(gap)

    def left(self) -> None:
        """Notes that the hook returned."""
        self._left = time.perf_counter()

    def forget(self) -> None:
        """Drops what was measured before the buckets were filled anew, or under another plan."""
        self._gaps.clear()
        self._periods.clear()
        self._began = 0.0
        self._baseline = 0.0
        self._since = 0
        self._beyond = 0

    def backward(
        self, group: dist.ProcessGroup, device: torch.device
    ) -> tuple[tuple[tuple[int, int, float], ...], float]:
        """Returns what was learned of a step, as means over the ranks.

        Returns:
            (index, elements, seconds since the previous one) of the buckets, and the seconds from
            one step to the next.

        Raises:
            PeerError: another rank failed or did not answer in time.
        """
        found = [(i, *self._gaps[i]) for i in sorted(self._gaps)]
        mine = [statistics.median(times) for _, _, times in found]
        mine.append(statistics.median(self._periods) if self._periods else 0.0)
        means = [s / group.size() for s in agreed(group, mine, device, dist.ReduceOp.SUM)]
        buckets = tuple((i, n, s) for (i, n, _), s in zip(found, means[:-1], strict=True))
        return buckets, means[-1]

    def drifted(
        self, taken: Mapping[int, list[float]], group: dist.ProcessGroup, device: torch.device
    ) -> bool:
        """Returns whether exchanges take other times than they did; told of one window at a time.

        Args:
            taken: seconds of exchanges by bucket, as measured in this window.
            group: the ranks, which all get the same answer.
            device: where the gradients are.

        Raises:
            PeerError: another rank failed or did not answer in time.
        """
        mine = sum(statistics.median(t) for t in taken.values())
        (slowest,) = agreed(group, [mine], device, dist.ReduceOp.MAX)
        return self.judge(slowest)

    def judge(self, seconds: float) -> bool:
        """Returns whether this window and those right before it differ from the first one.

        Args:
            seconds: what a pass's exchanges took in the window that ended, the same on all ranks.
        """
        if not self._baseline:
            self._baseline = seconds
            return False
        within = self._baseline / self.drift <= seconds <= self._baseline * self.drift
        self._beyond = 0 if within else self._beyond + 1
        return self._beyond >= PATIENCE

    def window_ends(self) -> bool:
        """Counts a pass; returns whether it was the last of a window."""
        self._since += 1
        return self._since % self.every == 0


def agreed(
    group: dist.ProcessGroup, values: list[float], device: torch.device, op: dist.ReduceOp.RedOpType
) -> list[float]:
    """Returns values after one all-reduce: the same on all ranks.

    Raises:
        PeerError: another rank failed or did not answer in time.
    """
    shared = torch.tensor(values, dtype=torch.float64, device=wire_device(group, device))
    guarded(lambda: dist.all_reduce(shared, op, group=group), "plan")
    found: list[float] = shared.tolist()
    return found
