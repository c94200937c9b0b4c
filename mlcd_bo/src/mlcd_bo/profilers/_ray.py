"""Profiles a training script on the nodes of a Ray cluster, one placement group a trial."""

import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

from .._check import positive, variables, whole, words
from .._errors import MissingExtra, ProfilingFailed
from .._space import Deployment
from .._trial import Limits, Observation
from ._local import script_variables
from ._process import TorchrunProcess, thread_variables
from ._watch import Outcome, Watcher

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


class RayProfiler:
    """Runs a training script on as many nodes of a Ray cluster as a deployment has machines.

    A placement group spreads one bundle to each node (``STRICT_SPREAD``); a node agent in each
    starts torchrun with its node rank, all of them one job. Nodes need the script at the same
    path, and this package. The trial ends as `LocalTorchrun`'s does; all ranks are killed and
    the placement group is removed. A cluster that cannot place the group within `provision_s`
    gives status ``"quota"``, a node that is lost ``"preempted"``.

    Args:
        script: the training script, a path on every node.
        args: its arguments.
        resources: custom Ray resources by instance type name, which tell nodes of that type
            apart, such as ``{"g5.xlarge": {"g5": 1.0}}``.
        address: of the cluster, if this process is not connected yet.
        provision_s: most seconds until the nodes are there.
        probe_s: most seconds of measuring after the first step.
        startup_s: most seconds until the first step.
        least_s: seconds to measure at least.
        warmup_steps: steps never counted.
        env: further environment variables.

    Raises:
        InvalidInput: a time is not above zero.
        MissingExtra: Ray is not installed.
    """

    def __init__(
        self,
        script: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        resources: Mapping[str, Mapping[str, float]] | None = None,
        address: str | None = None,
        provision_s: float = 600.0,
        probe_s: float = 60.0,
        startup_s: float = 120.0,
        least_s: float = 2.0,
        warmup_steps: int = 5,
        env: Mapping[str, str] | None = None,
    ) -> None:
        _ray()
        self.script = os.fspath(script)
        self.args = words("args", args)
        self.resources = {name: dict(needs) for name, needs in (resources or {}).items()}
        self.address = address
        self.provision_s = positive("provision_s", provision_s)
        self.probe_s = positive("probe_s", probe_s)
        self.startup_s = positive("startup_s", startup_s)
        self.env = variables(env)
        self._watcher = Watcher(
            self.probe_s,
            self.startup_s,
            positive("least_s", least_s),
            whole("warmup_steps", warmup_steps),
        )

    def trial_seconds(self, deployment: Deployment) -> float:
        """Returns the most seconds that a trial lasts once its nodes are there."""
        return self.startup_s + self.probe_s

    def bundle(self, deployment: Deployment) -> dict[str, float]:
        """Returns what one machine of `deployment` asks of a node."""
        kind = deployment.instance_type
        needs: dict[str, float] = {"CPU": float(kind.vcpus or 1)}
        if kind.gpus:
            needs["GPU"] = float(kind.gpus)
        return {**needs, **self.resources.get(kind.name, {})}

    def profile(self, deployment: Deployment, limits: Limits) -> Observation:
        """Returns the steady speed of the script on `deployment`.

        Args:
            deployment: how many nodes of what kind.
            limits: when to stop.

        Raises:
            ProfilingFailed: there is no Ray cluster to connect to.
        """
        ray = _ray()
        self._connect()
        from ray.util.placement_group import placement_group, remove_placement_group

        waiting = time.monotonic()
        group = placement_group(
            [self.bundle(deployment)] * deployment.count, strategy="STRICT_SPREAD"
        )
        try:
            if not group.wait(self.provision_s):
                asked = self.bundle(deployment)
                # Nothing was rented yet, so nothing is charged but the time.
                return Observation.failed(
                    "quota",
                    time.monotonic() - waiting,
                    0.0,
                    f"no {deployment.count} nodes with {asked} within {self.provision_s:.0f} s",
                )
            began = time.monotonic()
            try:
                outcome = self._run(group, deployment, limits, began)
            except ray.exceptions.RayActorError as problem:
                outcome = Outcome(None, "preempted", f"a node was lost: {problem}")
            rented = time.monotonic() - began
        finally:
            remove_placement_group(group)
        seconds = time.monotonic() - waiting
        dollars = deployment.price_per_hour * rented / 3600
        if outcome.speed is None:
            return Observation.failed(outcome.status, seconds, dollars, outcome.detail)
        speed = outcome.speed
        return Observation(speed.value, speed.sem, seconds, dollars, detail=outcome.detail)

    def job_yaml(
        self,
        deployment: Deployment,
        image: str,
        name: str = "mlcd",
        namespace: str = "default",
    ) -> str:
        """Returns the KubeRay RayJob that profiles the script on `deployment`, as YAML.

        Each worker is a pod of its own on a node of the instance type. The job prints one line
        ``mlcd-observation {...}`` with the fields of `Observation`, and ends.

        Args:
            deployment: how many nodes of what kind.
            image: container image with Ray, this package and the script.
            name: of the job.
            namespace: of the job.
        """
        kind = deployment.instance_type
        asked: dict[str, Any] = {"cpu": f"{kind.vcpus or 1:g}"}
        if kind.gpus:
            asked["nvidia.com/gpu"] = int(kind.gpus)
        worker = {
            "nodeSelector": {"node.kubernetes.io/instance-type": kind.name},
            # Pods of one job never share a node: a machine is a machine.
            "affinity": {
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "labelSelector": {"matchLabels": {"mlcd/job": name}},
                            "topologyKey": "kubernetes.io/hostname",
                        }
                    ]
                }
            },
            "containers": [
                {
                    "name": "worker",
                    "image": image,
                    "resources": {"requests": asked, "limits": asked},
                }
            ],
        }
        entry = [
            *("python", "-m", "mlcd_bo.profilers._ray_entry", f"--type={kind.name}"),
            *(f"--count={deployment.count}", f"--price={kind.price:g}"),
            *(f"--vcpus={kind.vcpus or 1:g}", f"--gpus={kind.gpus or 0:g}"),
            *(f"--probe-s={self.probe_s:g}", f"--startup-s={self.startup_s:g}"),
            *(self.script, *self.args),
        ]
        manifest = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "entrypoint": shlex.join(entry),
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": 60,
                "rayClusterSpec": {
                    "headGroupSpec": {
                        # No work on the head: it is no machine of the deployment.
                        "rayStartParams": {"num-cpus": "0"},
                        "template": {"spec": {"containers": [{"name": "head", "image": image}]}},
                    },
                    "workerGroupSpecs": [
                        {
                            "groupName": "machines",
                            "replicas": deployment.count,
                            "minReplicas": deployment.count,
                            "maxReplicas": deployment.count,
                            "rayStartParams": {},
                            "template": {
                                "metadata": {"labels": {"mlcd/job": name}},
                                "spec": worker,
                            },
                        }
                    ],
                },
            },
        }
        return str(yaml.safe_dump(manifest, sort_keys=False))

    def _connect(self) -> None:
        ray = _ray()
        if ray.is_initialized():
            return
        try:
            ray.init(address=self.address or "auto", log_to_driver=False)
        except ConnectionError as problem:
            raise ProfilingFailed(
                "there is no Ray cluster to connect to; start one, call ray.init(), or give "
                f"address=: {problem}"
            ) from problem

    def _run(
        self, group: "PlacementGroup", deployment: Deployment, limits: Limits, began: float
    ) -> Outcome:
        ray = _ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self.bundle(deployment)
        agent = ray.remote(NodeAgent)
        agents = [
            agent.options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(deployment.count)
        ]
        kind = deployment.instance_type
        ranks = max(int(kind.gpus or 0), 1)
        variables = {
            **thread_variables(kind.vcpus),
            **script_variables(deployment, limits),
            **self.env,
        }
        try:
            host, port = ray.get(agents[0].rendezvous.remote())
            torchrun = [f"--nnodes={deployment.count}", f"--master-addr={host}"]
            torchrun += [f"--master-port={port}"]
            script = [self.script, *self.args]
            ray.get(
                [
                    one.start.remote(ranks, index, script, torchrun, variables)
                    for index, one in enumerate(agents)
                ]
            )
            return self._watcher.run(_Cluster(agents, ranks), limits, began, lambda words: None)
        finally:
            _end(agents)


class NodeAgent:
    """What runs on each node: one torchrun and the reading of its reports."""

    def rendezvous(self) -> tuple[str, int]:
        """Returns this node's address and a free port."""
        import socket

        ray = _ray()
        with socket.socket() as free:
            free.bind(("", 0))
            return str(ray.util.get_node_ip_address()), int(free.getsockname()[1])

    def start(
        self,
        ranks: int,
        node: int,
        script: Sequence[str],
        torchrun: Sequence[str],
        env: Mapping[str, str],
    ) -> None:
        """Starts this node's part of the job."""
        self.folder = Path(tempfile.mkdtemp(prefix="mlcd-"))
        options = [*torchrun, f"--node-rank={node}"]
        self.trial = TorchrunProcess(
            self.folder, ranks, script, options, env, sys.executable, first_rank=node * ranks
        )

    def look(self) -> tuple[int | None, NDArray[np.float64], NDArray[np.float64], list[int]]:
        """Returns exit status, step ends, samples of each step, and ranks without a step."""
        ended = self.trial.poll()
        self.trial.read()
        times, samples = self.trial.series("samples")
        return ended, times, samples, self.trial.silent_ranks()

    def tail(self) -> str:
        """Returns the last lines that the script printed here."""
        return self.trial.tail()

    def end(self) -> None:
        """Kills the ranks of this node and removes what they left."""
        if hasattr(self, "trial"):
            self.trial.close()
            shutil.rmtree(self.folder, ignore_errors=True)


class _Cluster:
    """The node agents of one trial as one session."""

    def __init__(self, agents: Sequence[Any], ranks: int) -> None:
        self._agents = agents
        self._looks: list[Any] = []
        self._ranks = ranks
        self.steps = 0

    @property
    def samples(self) -> float:
        return float(sum(look[2].sum() for look in self._looks))

    def poll(self) -> int | None:
        self._looks = _ray().get([agent.look.remote() for agent in self._agents])
        codes = [look[0] for look in self._looks]
        failed = [code for code in codes if code not in (None, 0)]
        if failed:
            return int(failed[0] or 0)
        return None if None in codes else 0

    def read(self) -> bool:
        before, self.steps = self.steps, min(len(look[1]) for look in self._looks)
        return self.steps > before

    def series(
        self, unit: Literal["steps", "samples"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        n = self.steps
        # Steps are synchronous; clocks of different nodes are not, so one node's clock is used.
        times = self._looks[0][1][:n]
        if unit == "steps":
            return times, np.ones(n)
        return times, np.sum([look[2][:n] for look in self._looks], axis=0)

    def silent_ranks(self) -> list[int]:
        return [rank for look in self._looks for rank in look[3]]

    def tail(self) -> str:
        tails = _ray().get([agent.tail.remote() for agent in self._agents])
        failed = [t for t, look in zip(tails, self._looks, strict=True) if look[0]]
        return str((failed or tails)[0])


def _end(agents: Sequence[Any]) -> None:
    ray = _ray()
    for agent in agents:
        try:
            ray.get(agent.end.remote(), timeout=30.0)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            # Its node is gone, and the ranks on it with it.
            continue
        finally:
            ray.kill(agent)


def _ray() -> Any:
    try:
        import ray
    except ImportError as problem:
        raise MissingExtra(
            "RayProfiler needs Ray; install mlcd-bo with its extra: pip install 'mlcd-bo[ray]'"
        ) from problem
    return ray
