"""Reads the step reports that the ranks of one trial append to their files."""

import os
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray


class StepReports:
    """The steps of one trial, as `mlcd_bo.step` wrote them, one file a rank.

    A step of the whole job is done when its slowest rank is done with it; its samples are the
    sum over the ranks.

    Args:
        folder: where the ranks write.
        world: number of ranks that write there.
        first_rank: number of the first of them.
    """

    def __init__(self, folder: Path, world: int, first_rank: int = 0) -> None:
        self.folder = folder
        self.first_rank = first_rank
        self.world = world
        self._offsets = [0] * world
        self._rests = [b""] * world
        self._times: list[list[float]] = [[] for _ in range(world)]
        self._samples: list[list[float]] = [[] for _ in range(world)]

    @property
    def steps(self) -> int:
        """Steps that every rank has finished."""
        return min(map(len, self._times))

    @property
    def span_s(self) -> float:
        """Seconds from the first reported step to the last."""
        ends = [times for times in self._times if times]
        return max((times[-1] - times[0] for times in ends), default=0.0)

    def ask_to_stop(self, after: int) -> None:
        """Makes `mlcd_bo.step` return False on all ranks, `after` steps from the last seen."""
        part = self.folder / "stop.part"
        part.write_text(str(max(map(len, self._times)) + after), encoding="ascii")
        # Renamed, so that no rank reads half a number.
        os.replace(part, self.folder / "stop")

    @property
    def samples(self) -> float:
        """Samples that all ranks have reported so far."""
        return sum(map(sum, self._samples))

    def silent_ranks(self) -> list[int]:
        """Returns the ranks that have reported no step."""
        return [self.first_rank + i for i, times in enumerate(self._times) if not times]

    def read(self) -> bool:
        """Takes in what the ranks have written since the last call; True if steps were added."""
        before = self.steps
        for rank in range(self.world):
            try:
                with open(self.folder / f"rank-{self.first_rank + rank}", "rb") as file:
                    file.seek(self._offsets[rank])
                    data = file.read()
            except FileNotFoundError:
                continue
            self._offsets[rank] += len(data)
            *lines, self._rests[rank] = (self._rests[rank] + data).split(b"\n")
            for line in lines:
                stamp, _, samples = line.split()
                self._times[rank].append(float(stamp))
                self._samples[rank].append(float(samples))
        return self.steps > before

    def series(
        self, unit: Literal["steps", "samples"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the end of each step in seconds and its work in `unit`."""
        n = self.steps
        times = np.array([times[:n] for times in self._times]).max(axis=0)
        if unit == "steps":
            return times, np.ones(n)
        return times, np.array([samples[:n] for samples in self._samples]).sum(axis=0)
