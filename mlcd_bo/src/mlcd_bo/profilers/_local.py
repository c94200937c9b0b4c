"""Profiles a real training script on this machine with torchrun."""

import contextlib
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from .._check import positive
from .._errors import InvalidInput
from .._space import Deployment
from .._steady import Speed, steady_speed
from .._trial import Limits, Observation, Status
from ._reports import StepReports

_SUPERVISE = Path(__file__).with_name("_supervise.py")
_POLL_S = 0.05
_TAIL_LINES = 25
# Ranks must all see the order to stop before they reach its step.
_STOP_AHEAD_S = 0.5
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|Cannot allocate memory|MemoryError|exitcode\s*:\s*-9\b", re.I
)


class LocalTorchrun:
    """Launches a training script with torchrun and stops it as soon as its speed is steady.

    The world size is the deployment's count, times its GPUs if it has any; `vcpus` of the
    instance type becomes the number of threads of each rank. The script reports its steps with
    `mlcd_bo.step`. Every trial runs in a session of its own; all of it is killed when the trial
    ends and also when this process dies.

    Args:
        script: the training script, one that torchrun can start.
        args: its arguments.
        probe_s: most seconds of measuring after the first step.
        startup_s: most seconds until the first step.
        grace_s: most seconds that the script may take to save and end when asked to; only if
            the job has a checkpoint.
        least_s: seconds to measure at least; shorter windows give intervals that are too good.
        warmup_steps: steps never counted.
        env: further environment variables.
        python: the interpreter; None takes this one.

    Raises:
        InvalidInput: the script does not exist, or a time is not above zero.

    Example:
        >>> best = DeploymentOptimizer(space, scenario, job).run(LocalTorchrun("train.py"))
        ... # doctest: +SKIP
    """

    def __init__(
        self,
        script: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        probe_s: float = 30.0,
        startup_s: float = 60.0,
        grace_s: float = 30.0,
        least_s: float = 1.0,
        warmup_steps: int = 5,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
    ) -> None:
        self.script = Path(script)
        if not self.script.is_file():
            raise InvalidInput(f"script {str(script)!r} is not a file; give the path of a script")
        self.args = tuple(args)
        self.probe_s = positive("probe_s", probe_s)
        self.startup_s = positive("startup_s", startup_s)
        self.grace_s = positive("grace_s", grace_s)
        self.least_s = positive("least_s", least_s)
        self.warmup_steps = warmup_steps
        self.env = dict(env or {})
        self.python = python or sys.executable

    def trial_seconds(self, deployment: Deployment) -> float:
        """Returns the most seconds that a trial lasts, saving a checkpoint not included."""
        return self.startup_s + self.probe_s

    def profile(self, deployment: Deployment, limits: Limits) -> Observation:
        """Returns the steady speed of the script on `deployment`.

        Args:
            deployment: world size and threads to run with.
            limits: when to stop.

        Returns:
            Status ``"ok"`` with the speed and its error; ``"oom"``, ``"error"`` (with the end
            of the log) or ``"timeout"`` otherwise. Seconds and dollars are those of the whole
            trial, start-up and tear-down included.
        """
        began = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="mlcd-"))
        # disable=None: silent where standard error is no terminal.
        with tqdm(bar_format="{desc}", leave=False, disable=None) as line:
            try:
                outcome = self._run(deployment, limits, folder, began, line.set_description_str)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        seconds = time.monotonic() - began
        dollars = deployment.price_per_hour * seconds / 3600
        if outcome.speed is None:
            return Observation.failed(outcome.status, seconds, dollars, outcome.detail)
        speed = outcome.speed
        return Observation(
            *(speed.value, speed.sem, seconds, dollars),
            detail=outcome.detail,
            work_done=outcome.work_done,
        )

    def _run(
        self,
        deployment: Deployment,
        limits: Limits,
        folder: Path,
        began: float,
        say: Callable[[str], None],
    ) -> "_Outcome":
        kind = deployment.instance_type
        world = deployment.count * max(int(kind.gpus or 0), 1)
        reports = StepReports(folder, world)
        wall = time.time()
        log = folder / "log"
        with open(log, "wb") as sink:
            process = subprocess.Popen(
                self._command(world, folder),
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self._environment(deployment, limits, folder),
                start_new_session=True,
            )
        try:
            outcome = self._watch(
                process, reports, limits, log, began, lambda words: say(f"{deployment}: {words}")
            )
            if limits.checkpoint is not None and outcome.speed is not None:
                outcome = self._keep(process, reports, limits, outcome, wall)
            return outcome
        finally:
            # Closing the pipe is the order to kill every rank.
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()

    def _command(self, world: int, folder: Path) -> list[str]:
        torchrun = [
            *("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
            # Its own folder: torchrun would leave one in the temporary directory when killed.
            *(f"--nproc-per-node={world}", "--max-restarts=0", f"--log-dir={folder}"),
        ]
        supervisor = [sys.executable, "-I", str(_SUPERVISE), uuid.uuid4().hex]
        return [*supervisor, self.python, *torchrun, str(self.script), *self.args]

    def _environment(self, deployment: Deployment, limits: Limits, folder: Path) -> dict[str, str]:
        threads = str(max(int(deployment.instance_type.vcpus or 1), 1))
        knobs = {f"MLCD_KNOB_{name.upper()}": str(value) for name, value in deployment.knobs}
        return {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            "MLCD_REPORT": str(folder),
            **({} if limits.checkpoint is None else {"MLCD_CHECKPOINT": limits.checkpoint}),
            **knobs,
            **self.env,
        }

    def _watch(
        self,
        process: "subprocess.Popen[bytes]",
        reports: StepReports,
        limits: Limits,
        log: Path,
        began: float,
        say: Callable[[str], None],
    ) -> "_Outcome":
        end = began + min(limits.seconds, self.startup_s + self.probe_s)
        first: float | None = None
        speed: Speed | None = None
        while True:
            ended = process.poll()
            now = time.monotonic()
            try:
                if reports.read():
                    first = now if first is None else first
                    speed = steady_speed(*reports.series(limits.unit), self.warmup_steps)
            except InvalidInput as problem:
                return _Outcome(None, "error", str(problem))
            if limits.unit == "samples" and reports.steps >= 5 and not reports.samples:
                return _Outcome(
                    None,
                    "error",
                    "mlcd_bo.step() was called without samples, but the job is stated in samples; "
                    "pass the number of samples of the step, or give Job(total_steps=...)",
                )
            say(_progress(speed, limits.unit, now - began))
            if speed is not None and self._enough(speed, limits, now - (first or now)):
                return _Outcome(speed)
            if ended is not None:
                return self._ended(ended, speed, reports.steps, log)
            if first is None and now > began + self.startup_s:
                return _Outcome(None, "timeout", _no_step(now - began, reports, log))
            if now > end or (first is not None and now > first + self.probe_s):
                break
            time.sleep(_POLL_S)
        if speed is not None:
            detail = f"stopped at the time limit, half-width {speed.half_width:.1%}"
            return _Outcome(speed, detail=detail)
        return _Outcome(None, "timeout", _no_step(time.monotonic() - began, reports, log))

    def _keep(
        self,
        process: "subprocess.Popen[bytes]",
        reports: StepReports,
        limits: Limits,
        outcome: "_Outcome",
        began: float,
    ) -> "_Outcome":
        """Lets the script save and end; what it has trained then counts."""
        assert outcome.speed is not None
        pace = reports.steps / max(reports.span_s, 1e-3)
        reports.ask_to_stop(after=math.ceil(_STOP_AHEAD_S * pace) + 2)
        try:
            code = process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            why = f"it did not end within {self.grace_s:.0f} s of mlcd_bo.step returning False"
            return replace(outcome, detail=f"progress was not kept: {why}")
        reports.read()
        if code != 0 or not _written_since(Path(str(limits.checkpoint)), began):
            why = f"it ended with status {code} and wrote nothing to {limits.checkpoint!r}"
            return replace(outcome, detail=f"progress was not kept: {why}")
        return replace(outcome, work_done=float(reports.series(limits.unit)[1].sum()))

    def _enough(self, speed: Speed, limits: Limits, measured_s: float) -> bool:
        if measured_s < self.least_s:
            return False
        if speed.half_width <= limits.half_width:
            return True
        # Surely too slow to be chosen: the rest of the probe would be wasted.
        return speed.value * (1 + speed.half_width) < limits.useful_speed

    def _ended(self, code: int, speed: Speed | None, steps: int, log: Path) -> "_Outcome":
        if code == 0 and speed is not None:
            return _Outcome(speed, detail=f"the script ended by itself after {steps} steps")
        if code == 0:
            return _Outcome(
                None,
                "error",
                f"the script ended after {steps} reported steps, too few to measure; let it "
                "train longer and call mlcd_bo.step(samples) after every step",
            )
        tail = _tail(log)
        status: Status = "oom" if _OUT_OF_MEMORY.search(tail) else "error"
        return _Outcome(None, status, tail)


@dataclass(frozen=True)
class _Outcome:
    speed: Speed | None
    status: Status = "ok"
    detail: str = ""
    work_done: float = 0.0


def _written_since(path: Path, began: float) -> bool:
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    # A second of tolerance: some file systems keep whole seconds.
    return any(file.is_file() and file.stat().st_mtime >= began - 1.0 for file in files)


def _progress(speed: Speed | None, unit: str, seconds: float) -> str:
    if speed is None:
        return f"starting, {seconds:.0f} s"
    return f"{speed.value:,.4g} {unit}/s ± {speed.half_width:.1%}, {seconds:.0f} s"


def _no_step(waited_s: float, reports: StepReports, log: Path) -> str:
    if reports.steps:
        return f"only {reports.steps} steps in {waited_s:.0f} s, too few to measure; raise probe_s"
    silent = reports.silent_ranks()
    if reports.ranks_seen and silent:
        return (
            f"ranks {silent} reported no step within {waited_s:.0f} s while the others did; "
            f"call mlcd_bo.step on every rank\n{_tail(log)}"
        )
    return (
        f"no step was reported within {waited_s:.0f} s; call mlcd_bo.step(samples) after every "
        f"optimizer step, or raise startup_s\n{_tail(log)}"
    )


def _tail(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - 65536, 0))
        text = file.read().decode(errors="replace")
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if "] failed (exitcode:" in line:
            # What follows is torchrun's account of itself; the script's own words came before.
            lines = lines[: number + 1]
            break
    return "\n".join(lines[-_TAIL_LINES:])
