"""Profiles a real training script on this machine with torchrun."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from .._check import positive, script_of, variables, whole, words
from .._errors import InvalidInput
from .._space import Deployment
from .._trial import Limits, Observation
from ._log_lines import LoggedTorchrun, compiled
from ._process import TorchrunProcess, thread_variables
from ._watch import Outcome, Watcher


class LocalTorchrun:
    """Launches a training script with torchrun and stops it as soon as its speed is steady.

    The world size is the deployment's count, times its GPUs if it has any; `vcpus` of the
    instance type becomes the number of threads of each rank. The script reports its steps with
    `mlcd_bo.step`. Every trial runs in a session of its own; all of it is killed when the trial
    ends and also when this process dies.

    Args:
        script: the training script, one that torchrun can start.
        args: its arguments.
        pattern: for a script that cannot call `step`: a regular expression that finds progress in
            the lines it prints, with a group ``(?P<step>...)`` for the optimizer steps or
            ``(?P<samples>...)`` for the samples (of all ranks) done so far.
        probe_s: most seconds of measuring after the first step.
        startup_s: most seconds until the first step.
        grace_s: most seconds that the script may take to save and end when asked to; only if
            the job has a checkpoint.
        least_s: seconds to measure at least; shorter windows give intervals that are too good.
        warmup_steps: steps never counted.
        env: further environment variables.
        python: the interpreter; None takes this one.

    Raises:
        InvalidInput: the script does not exist, the pattern lacks its group, or a time is not
            above zero.

    Example:
        >>> best = DeploymentOptimizer(space, scenario, job).run(LocalTorchrun("train.py"))
        ... # doctest: +SKIP
    """

    def __init__(
        self,
        script: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        pattern: str | None = None,
        probe_s: float = 30.0,
        startup_s: float = 60.0,
        grace_s: float = 30.0,
        least_s: float = 1.0,
        warmup_steps: int = 5,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
    ) -> None:
        self.script = script_of(script)
        self.args = words("args", args)
        self.pattern = None if pattern is None else compiled(pattern)
        self.probe_s = positive("probe_s", probe_s)
        self.startup_s = positive("startup_s", startup_s)
        self.grace_s = positive("grace_s", grace_s)
        self._watcher = Watcher(
            self.probe_s,
            self.startup_s,
            positive("least_s", least_s),
            whole("warmup_steps", warmup_steps),
        )
        self.env = variables(env)
        self._interrupts = 0
        self.python = python or sys.executable
        if not isinstance(self.python, str) or shutil.which(self.python) is None:
            raise InvalidInput(f"python {python!r} cannot be started; give an interpreter's path")

    def interrupt(self) -> None:
        """Gives up every trial under way; each raises KeyboardInterrupt where it runs."""
        self._interrupts += 1

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
    ) -> Outcome:
        kind = deployment.instance_type
        wall = time.time()
        kind_of_run = TorchrunProcess if self.pattern is None else LoggedTorchrun
        trial = kind_of_run(
            folder,
            deployment.count * max(int(kind.gpus or 0), 1),
            [str(self.script), *self.args],
            ["--standalone", "--local-addr=127.0.0.1"],
            {**thread_variables(kind.vcpus), **script_variables(deployment, limits), **self.env},
            self.python,
        )
        if isinstance(trial, LoggedTorchrun) and self.pattern is not None:
            trial.follow(self.pattern)
        interrupts = self._interrupts
        try:
            outcome = self._watcher.run(
                trial,
                limits,
                began,
                lambda words: say(f"{deployment}: {words}"),
                interrupted=lambda: self._interrupts != interrupts,
            )
            if limits.checkpoint is not None and outcome.speed is not None:
                outcome = self._keep(trial, limits, outcome, wall)
            return outcome
        finally:
            trial.close()

    def _keep(
        self, trial: TorchrunProcess, limits: Limits, outcome: Outcome, began: float
    ) -> Outcome:
        """Lets the script save and end; what it has trained then counts."""
        code = trial.finish(self.grace_s)
        if code is None:
            why = f"it did not end within {self.grace_s:.0f} s of mlcd_bo.step returning False"
            return replace(outcome, detail=f"progress was not kept: {why}")
        if code != 0 or not _written_since(Path(str(limits.checkpoint)), began):
            why = f"it ended with status {code} and wrote nothing to {limits.checkpoint!r}"
            return replace(outcome, detail=f"progress was not kept: {why}")
        return replace(outcome, work_done=float(trial.series(limits.unit)[1].sum()))


def script_variables(deployment: Deployment, limits: Limits) -> dict[str, str]:
    """Returns what the script is told of its deployment by the environment."""
    told = {f"MLCD_KNOB_{name.upper()}": str(value) for name, value in deployment.knobs}
    if limits.checkpoint is not None:
        told["MLCD_CHECKPOINT"] = limits.checkpoint
    return told


def _written_since(path: Path, began: float) -> bool:
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    # A second of tolerance: some file systems keep whole seconds.
    return any(file.is_file() and file.stat().st_mtime >= began - 1.0 for file in files)
