"""One torchrun on this machine, its step reports and its end."""

import contextlib
import math
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from ._reports import StepReports

_SUPERVISE = Path(__file__).with_name("_supervise.py")
_TAIL_LINES = 25
_TAIL_WIDTH = 500
# Ranks must all see the order to stop before they reach its step.
_STOP_AHEAD_S = 0.5


class TorchrunProcess(StepReports):
    """A torchrun of one machine, killed whole by `close` or when this process dies.

    Args:
        folder: an empty folder of this trial for reports and log.
        ranks: ranks on this machine.
        script: the training script and its arguments.
        torchrun: further options of torchrun, such as those of a rendezvous.
        env: environment beyond this process's own.
        python: the interpreter.
        first_rank: number of the first rank here, of several machines.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        script: Sequence[str],
        torchrun: Sequence[str],
        env: Mapping[str, str],
        python: str,
        first_rank: int = 0,
    ) -> None:
        super().__init__(folder, ranks, first_rank)
        self._log = folder / "log"
        command = [
            *(sys.executable, "-I", str(_SUPERVISE), uuid.uuid4().hex),
            *(python, "-m", "torch.distributed.run", *torchrun, f"--nproc-per-node={ranks}"),
            # Its own folder: torchrun would leave one in the temporary directory when killed.
            *("--max-restarts=0", f"--log-dir={folder}", *script),
        ]
        with open(self._log, "wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "MLCD_REPORT": str(folder), **env},
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Returns the exit status once it has ended by itself, None before."""
        return self._process.poll()

    def finish(self, patience_s: float) -> int | None:
        """Asks all ranks to stop at one step; returns the exit status, None if they do not."""
        pace = self.steps / max(self.span_s, 1e-3)
        self.ask_to_stop(after=math.ceil(_STOP_AHEAD_S * pace) + 2)
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.read()

    def close(self) -> None:
        """Kills every process of the trial and waits for their end."""
        assert self._process.stdin is not None
        # The closed pipe is the order to kill; the word before it says that we are still here.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"done")
            self._process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def tail(self) -> str:
        """Returns the last lines that the script printed."""
        with open(self._log, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - 65536, 0))
            lines = file.read().decode(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if "] failed (exitcode:" in line:
                # What follows is torchrun's account of itself; the script's own words came before.
                lines = lines[: number + 1]
                break
        # The end of a line says more than its begin, but of a very long one neither says all.
        return "\n".join(line[-_TAIL_WIDTH:] for line in lines[-_TAIL_LINES:])


def thread_variables(threads: float | None) -> dict[str, str]:
    """Returns the environment that gives each rank so many threads."""
    count = str(max(int(threads or 1), 1))
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
