"""Profiles on rented clusters through SkyPilot: launch, follow the log, take down."""

import os
import shlex
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .._check import positive, variables, whole, words
from .._errors import MissingExtra
from .._space import Deployment
from .._trial import Limits, Observation, Status
from ._local import script_variables
from ._process import thread_variables
from ._watch import Outcome, Watcher

_MARK = "mlcd-step "


@dataclass(frozen=True)
class SkyRequest:
    """What is asked of SkyPilot for one trial.

    Attributes:
        cluster: name of the cluster.
        run: shell commands of each node.
        setup: shell commands run once on each node before.
        workdir: folder synchronised to the nodes, or None.
        envs: environment variables.
        infra: such as ``"aws"`` or ``"aws/us-east-1"``; None lets SkyPilot choose.
        instance_type: the provider's name.
        num_nodes: machines.
        use_spot: whether to rent on the spot market.
        idle_minutes: the cluster takes itself down after so many idle minutes, should this
            process die.
    """

    cluster: str
    run: str
    setup: str | None
    workdir: str | None
    envs: Mapping[str, str]
    infra: str | None
    instance_type: str
    num_nodes: int
    use_spot: bool
    idle_minutes: int


class SkyClient(Protocol):
    """The few things that a trial needs of SkyPilot; replaced by a fake in tests."""

    def launch(self, request: SkyRequest) -> int:
        """Starts the cluster and the job; returns the job's number once it is submitted."""
        ...

    def lines(self, cluster: str, job: int) -> Iterator[str | None]:
        """Yields lines of the job's log as they come, None while there is none."""
        ...

    def status(self, cluster: str, job: int) -> Literal["running", "succeeded", "failed", "lost"]:
        """Returns how the job stands; ``"lost"`` if the cluster is gone."""
        ...

    def down(self, cluster: str) -> None:
        """Takes the cluster down; nothing happens if it is gone."""
        ...


class SkyProfiler:
    """Runs a training script on a rented cluster for a little while.

    The script is started with torchrun on every node; its ranks print their steps (the nodes
    share no disk with this process) and the log is followed. The cluster is taken down when the
    trial ends, however it ends, and takes itself down if this process dies.

    Args:
        script: the training script, a path within `workdir`.
        args: its arguments.
        workdir: folder to synchronise to the nodes.
        setup: shell commands that prepare a node, such as ``pip install -r requirements.txt
            mlcd-bo``.
        infra: such as ``"aws/us-east-1"``.
        probe_s: most seconds of measuring after the first step.
        startup_s: most seconds from the job's start until the first step.
        provision_s: seconds that renting and preparing may take; planned with, not enforced.
        least_s: seconds to measure at least.
        warmup_steps: steps never counted.
        env: further environment variables.
        client: how to reach SkyPilot; None uses the installed one.

    Raises:
        InvalidInput: a time is not above zero.
        MissingExtra: SkyPilot is not installed and no client is given.
    """

    def __init__(
        self,
        script: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        workdir: str | None = None,
        setup: str | None = None,
        infra: str | None = None,
        probe_s: float = 120.0,
        startup_s: float = 300.0,
        provision_s: float = 600.0,
        least_s: float = 5.0,
        warmup_steps: int = 5,
        env: Mapping[str, str] | None = None,
        client: SkyClient | None = None,
    ) -> None:
        self.script = os.fspath(script)
        self.args = words("args", args)
        self.workdir = workdir
        self.setup = setup
        self.infra = infra
        self.probe_s = positive("probe_s", probe_s)
        self.startup_s = positive("startup_s", startup_s)
        self.provision_s = positive("provision_s", provision_s)
        self.env = variables(env)
        self._watcher = Watcher(
            self.probe_s,
            self.startup_s,
            positive("least_s", least_s),
            whole("warmup_steps", warmup_steps),
        )
        self.client: SkyClient = _installed() if client is None else client

    def trial_seconds(self, deployment: Deployment) -> float:
        """Returns the most seconds that a trial is planned to last, renting included."""
        return self.provision_s + self.startup_s + self.probe_s

    def request(self, deployment: Deployment, limits: Limits) -> SkyRequest:
        """Returns what a trial of `deployment` asks of SkyPilot."""
        kind = deployment.instance_type
        ranks = max(int(kind.gpus or 0), 1)
        torchrun = (
            f"python -m torch.distributed.run --nnodes=$SKYPILOT_NUM_NODES "
            f"--node-rank=$SKYPILOT_NODE_RANK --nproc-per-node={ranks} --max-restarts=0 "
            '--master-addr=$(echo "$SKYPILOT_NODE_IPS" | head -n1) --master-port=29561 '
        )
        return SkyRequest(
            cluster=f"mlcd-{uuid.uuid4().hex[:8]}",
            run=torchrun + shlex.join([self.script, *self.args]),
            setup=self.setup,
            workdir=self.workdir,
            envs={
                "MLCD_REPORT_LINES": "1",
                "PYTHONUNBUFFERED": "1",
                **thread_variables(None if kind.gpus else kind.vcpus),
                **script_variables(deployment, limits),
                **self.env,
            },
            infra=self.infra,
            instance_type=kind.name,
            num_nodes=deployment.count,
            use_spot=deployment.spot,
            idle_minutes=5,
        )

    def profile(self, deployment: Deployment, limits: Limits) -> Observation:
        """Returns the steady speed of the script on a cluster rented for it.

        Args:
            deployment: what to rent.
            limits: when to stop.

        Returns:
            ``"quota"`` if the cluster could not be rented, ``"preempted"`` if it was taken away;
            dollars are those of the rented time by the catalogue, not the provider's bill.
        """
        request = self.request(deployment, limits)
        began = time.monotonic()
        try:
            try:
                job = self.client.launch(request)
            except SkyUnavailable as problem:
                return Observation.failed("quota", time.monotonic() - began, 0.0, str(problem))
            kind = deployment.instance_type
            ranks = max(int(kind.gpus or 0), 1) * deployment.count
            session = _Log(self.client, request.cluster, job, ranks)
            up = time.monotonic()
            outcome = self._watcher.run(session, limits, up, lambda words: None, up - began)
            if outcome.speed is None and session.lost:
                outcome = Outcome(None, "preempted", outcome.detail)
        finally:
            self.client.down(request.cluster)
        seconds = time.monotonic() - began
        dollars = deployment.price_per_hour * seconds / 3600
        if outcome.speed is None:
            status: Status = outcome.status
            return Observation.failed(status, seconds, dollars, outcome.detail)
        speed = outcome.speed
        return Observation(speed.value, speed.sem, seconds, dollars, detail=outcome.detail)


class SkyUnavailable(Exception):
    """A client could not rent what was asked: no capacity, no quota."""


class _Log:
    """Step reports out of a followed log: ``mlcd-step RANK SECONDS STEP SAMPLES``."""

    def __init__(self, client: SkyClient, cluster: str, job: int, ranks: int) -> None:
        self._client, self._cluster, self._job = client, cluster, job
        self._lines = client.lines(cluster, job)
        self._times: list[list[float]] = [[] for _ in range(ranks)]
        self._samples: list[list[float]] = [[] for _ in range(ranks)]
        self._last: list[str] = []
        self.lost = False

    @property
    def steps(self) -> int:
        return min(map(len, self._times))

    @property
    def samples(self) -> float:
        return sum(map(sum, self._samples))

    def poll(self) -> int | None:
        status = self._client.status(self._cluster, self._job)
        self.lost = status == "lost"
        return {"running": None, "succeeded": 0, "failed": 1, "lost": 1}[status]

    def read(self) -> bool:
        before = self.steps
        for line in self._available():
            place = line.find(_MARK)
            if place < 0:
                self._last = [*self._last[-24:], line.rstrip("\n")]
                continue
            fields = line[place + len(_MARK) :].split()
            # Lines of ranks that print at once may be torn: such a step is lost, not the trial.
            try:
                rank, seconds, samples = int(fields[0]), float(fields[1]), float(fields[3])
                self._times[rank].append(seconds)
                self._samples[rank].append(samples)
            except (IndexError, ValueError):
                continue
        return self.steps > before

    def _available(self) -> Iterable[str]:
        for line in self._lines:
            if line is None:
                return
            yield line

    def series(
        self, unit: Literal["steps", "samples"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        n = self.steps
        # Clocks of different nodes are not comparable: the first rank's is used.
        times = np.array(self._times[0][:n])
        if unit == "steps":
            return times, np.ones(n)
        return times, np.array([samples[:n] for samples in self._samples]).sum(axis=0)

    def silent_ranks(self) -> list[int]:
        return [rank for rank, times in enumerate(self._times) if not times]

    def tail(self) -> str:
        return "\n".join(self._last)


def _installed() -> SkyClient:
    try:
        from ._sky_client import InstalledSky
    except ImportError as problem:
        raise MissingExtra(
            "SkyProfiler needs SkyPilot; install mlcd-bo with its extra in an environment of its "
            "own: pip install 'mlcd-bo[sky]'"
        ) from problem
    return InstalledSky()
