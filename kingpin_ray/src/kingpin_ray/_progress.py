"""The progress bar: groups done, rows a second, failures; silent off a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """Counts finished groups on standard error.

    Args:
        n_groups: groups of the run.
        show: the user's wish; a bar appears only on a terminal, or where a notebook is.
    """

    def __init__(self, n_groups: int, show: bool) -> None:
        self.rows = 0
        self.failures = 0
        self.began = time.perf_counter()
        self._bar: Any = None
        if show and sys.stderr is not None and sys.stderr.isatty():
            from tqdm.auto import tqdm

            self._bar = tqdm(total=n_groups, unit="group", smoothing=0.05)

    def add(self, groups: int, rows: int, failures: int) -> None:
        """Counts one finished chunk."""
        self.rows += rows
        self.failures += failures
        if self._bar is not None:
            rate = self.rows / max(time.perf_counter() - self.began, 1e-9)
            self._bar.set_postfix_str(f"{rate:,.0f} rows/s, {self.failures} bad", refresh=False)
            self._bar.update(groups)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
