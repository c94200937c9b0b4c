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


class Slow(Ridge):
    """Takes its time over every block, so that a test can interfere."""

    name = "slow"

    def __init__(
        self, seconds: float = 0.2, alpha: float = 1.0, fit_intercept: bool = True
    ) -> None:
        super().__init__(alpha, fit_intercept=fit_intercept)
        self.seconds = seconds

    def fit(self, block: Any, configs: Any) -> Any:
        time.sleep(self.seconds)
        return super().fit(block, configs)
