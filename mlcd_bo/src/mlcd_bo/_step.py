"""What a training script calls: `step`, and where its progress is kept.

This module is imported by every rank of a user's script, so it needs the standard library alone.
"""

import os
import time

_REPORT_FOLDER = "MLCD_REPORT"
_REPORT_LINES = "MLCD_REPORT_LINES"


class _Reporter:
    """Appends one line a step to this rank's file, or prints it where there is no shared disk."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.count = 0
        self.last_samples = 0.0
        folder = os.environ.get(_REPORT_FOLDER)
        self.lines = os.environ.get(_REPORT_LINES) == "1"
        self.file: int | None = None
        self.stop_file = ""
        if folder:
            self.stop_file = os.path.join(folder, "stop")
            # O_APPEND: one write a line, which the profiler can read while it grows.
            self.file = os.open(
                os.path.join(folder, f"rank-{self.rank}"),
                os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                0o600,
            )

    def step(self, samples: float) -> bool:
        self.count += 1
        if self.file is None and not self.lines:
            return True
        line = f"{time.monotonic():.6f} {self.count} {samples:g}\n"
        if self.file is not None:
            os.write(self.file, line.encode())
            return self._wanted()
        print(f"mlcd-step {self.rank} {line}", end="", flush=True)
        return True

    def _wanted(self) -> bool:
        try:
            with open(self.stop_file, encoding="ascii") as file:
                return self.count < int(file.read())
        except (FileNotFoundError, ValueError):
            return True


_reporter: _Reporter | None = None


def step(samples: float = 0) -> bool:
    """Reports one finished training step to the profiler; True means: carry on.

    Call it once after every optimizer step, on every rank. It writes one short line (a few
    microseconds). Outside a trial it does nothing, so it may stay in the script for good.

    When a profiler asks for progress to be kept, the result becomes False on all ranks at the
    same step; a script that has a checkpoint then saves it and returns:

        if not mlcd_bo.step(len(batch)):
            save(); break

    Args:
        samples: training samples *this* rank has just processed; may be left out if the job is
            stated in steps.

    Returns:
        True while training should carry on.
    """
    global _reporter
    if _reporter is None:
        _reporter = _Reporter()
    return _reporter.step(samples)
