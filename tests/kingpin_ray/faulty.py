"""Models that take their worker down, for the tests of faults."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from kingpin_ray import Ridge


class Deadly(Ridge):
    """Kills its process (SIGKILL) when it meets a group of `rows` rows; once, or every time.

    Args:
        rows: size of the deadly group.
        marker: file that remembers the first death; "" to die every time.
    """

    name = "deadly"

    def __init__(
        self, rows: int = 0, marker: str = "", alpha: float = 1.0, fit_intercept: bool = True
    ) -> None:
        super().__init__(alpha, fit_intercept=fit_intercept)
        self.rows = rows
        self.marker = marker

    def fit(self, block: Any, configs: Any) -> Any:
        if (block.counts == self.rows).any() and not (self.marker and Path(self.marker).exists()):
            if self.marker:
                Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(block, configs)


class Gated(Ridge):
    """Trains large groups at once and small ones when a file is there, so that a test can act.

    Args:
        gate: the file; each process that comes to it leaves a file beside it, "<gate>.<pid>".
        rows: blocks without a group of as many rows wait.
    """

    name = "gated"

    def __init__(
        self, gate: str = "", rows: int = 0, alpha: float = 1.0, fit_intercept: bool = True
    ) -> None:
        super().__init__(alpha, fit_intercept=fit_intercept)
        self.gate = gate
        self.rows = rows

    def fit(self, block: Any, configs: Any) -> Any:
        if block.counts.max() < self.rows:
            Path(f"{self.gate}.{os.getpid()}").touch()
            while not Path(self.gate).exists():
                time.sleep(0.02)
        return super().fit(block, configs)
