"""Progress of a script that cannot be changed, read from the lines it prints anyway."""

import re
import threading
import time
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .._errors import InvalidInput
from ._process import TorchrunProcess

_LOOK_S = 0.005
_GROUPS = ("step", "samples")


def compiled(pattern: str) -> "re.Pattern[str]":
    """Returns the compiled pattern.

    Raises:
        InvalidInput: it is no regular expression, or has neither of the groups.
    """
    try:
        found = re.compile(pattern)
    except (re.error, TypeError) as problem:
        raise InvalidInput(f"pattern {pattern!r} is no regular expression: {problem}") from problem
    if not set(_GROUPS) & set(found.groupindex):
        raise InvalidInput(
            f"pattern {pattern!r} needs a group (?P<step>...) for the steps or (?P<samples>...) "
            "for the samples done so far"
        )
    return found


class LoggedTorchrun(TorchrunProcess):
    """A torchrun whose progress is a count in its log; a line's time is when it appears."""

    def follow(self, pattern: "re.Pattern[str]") -> "LoggedTorchrun":
        """Starts to read the log; returns itself."""
        self._pattern = pattern
        self._seen: list[tuple[float, float, float]] = []
        self._taken = 0
        self._ended = threading.Event()
        # A thread of its own: the time of a line must not wait for the watcher's next look.
        self._reader = threading.Thread(target=self._read_log, name="mlcd-log", daemon=True)
        self._reader.start()
        return self

    def _read_log(self) -> None:
        rest = ""
        with open(Path(self.folder) / "log", encoding="utf-8", errors="replace") as log:
            while not self._ended.is_set():
                text = log.read()
                if not text:
                    time.sleep(_LOOK_S)
                    continue
                now = time.monotonic()
                *lines, rest = (rest + text).split("\n")
                for line in lines:
                    self._take(line, now)

    def _take(self, line: str, now: float) -> None:
        match = self._pattern.search(line)
        if match is None:
            return
        groups = match.groupdict()
        try:
            step, samples = (float((groups.get(g) or "nan").replace(",", "")) for g in _GROUPS)
        except ValueError:
            return
        # Every rank may print the same line, and a count may start again: only growth counts.
        _, last_step, last_samples = self._seen[-1] if self._seen else (0.0, -np.inf, -np.inf)
        if step > last_step or samples > last_samples:
            self._seen.append((now, step, samples))

    @property
    def steps(self) -> int:
        """Lines that showed progress."""
        return self._taken

    @property
    def samples(self) -> float:
        """Samples done so far, by the log."""
        return self._seen[self._taken - 1][2] if self._taken else 0.0

    def read(self) -> bool:
        """Takes in what the log has shown since the last call; True if there was progress."""
        before, self._taken = self._taken, len(self._seen)
        return self._taken > before

    def series(
        self, unit: Literal["steps", "samples"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the time of each line and the work since the line before.

        Raises:
            InvalidInput: the pattern has no group for this unit.
        """
        group = "step" if unit == "steps" else "samples"
        if group not in self._pattern.groupindex:
            raise InvalidInput(
                f"the job is stated in {unit}, but pattern has no group (?P<{group}>...)"
            )
        seen = np.array(self._seen[: self._taken])
        counts = seen[:, 1 if unit == "steps" else 2]
        return seen[:, 0], np.diff(counts, prepend=counts[:1])

    def silent_ranks(self) -> list[int]:
        """Returns nothing: a log does not say which rank is silent."""
        return []

    def close(self) -> None:
        """Kills every process of the trial and stops reading."""
        super().close()
        self._ended.set()
        self._reader.join()
