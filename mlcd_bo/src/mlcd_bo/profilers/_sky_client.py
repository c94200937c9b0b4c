"""The installed SkyPilot (0.10 and later), behind the small client that `SkyProfiler` uses.

SkyPilot's calls return request numbers at once; results are fetched. It pins versions of click and
uvicorn that other frameworks cannot live with, so it belongs in an environment of its own.
"""

import io
import queue
import threading
from collections.abc import Iterator
from typing import Any, Literal

import sky
from sky import exceptions

from .._errors import InvalidInput
from ._sky import SkyRequest, SkyUnavailable


class InstalledSky:
    """SkyPilot's own client.

    Args:
        dryrun: only resolve the request against SkyPilot's catalogue; nothing is rented.
    """

    def __init__(self, dryrun: bool = False) -> None:
        self.dryrun = dryrun

    def task(self, request: SkyRequest) -> Any:
        """Returns the SkyPilot task of a request."""
        task = sky.Task(
            name=request.cluster,
            run=request.run,
            setup=request.setup,
            workdir=request.workdir,
            envs=dict(request.envs),
            num_nodes=request.num_nodes,
        )
        task.set_resources(
            sky.Resources(
                infra=request.infra,
                instance_type=request.instance_type,
                use_spot=request.use_spot,
            )
        )
        return task

    def launch(self, request: SkyRequest) -> int:
        """Starts cluster and job; returns the job's number.

        Raises:
            InvalidInput: SkyPilot knows no such instance type or place.
            SkyUnavailable: no place that SkyPilot knows has the machines.
        """
        try:
            number = sky.launch(
                self.task(request),
                cluster_name=request.cluster,
                idle_minutes_to_autostop=request.idle_minutes,
                down=True,
                dryrun=self.dryrun,
            )
            job, _ = sky.stream_and_get(number)
        except exceptions.ResourcesUnavailableError as problem:
            raise SkyUnavailable(str(problem)) from problem
        except ValueError as problem:
            raise InvalidInput(
                f"SkyPilot refuses instance_type={request.instance_type!r} with "
                f"infra={request.infra!r}: {problem}; give the provider's name of the type"
            ) from problem
        return int(job or 0)

    def lines(self, cluster: str, job: int) -> Iterator[str | None]:
        """Yields lines of the job's log as they come, None while there is none."""
        coming: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A daemon: following ends when the cluster is taken down, whatever hangs.
        threading.Thread(
            target=sky.tail_logs,
            kwargs={
                "cluster_name": cluster,
                "job_id": job,
                "follow": True,
                "output_stream": _Lines(coming),
            },
            daemon=True,
        ).start()
        while True:
            try:
                yield coming.get_nowait()
            except queue.Empty:
                yield None

    def status(self, cluster: str, job: int) -> Literal["running", "succeeded", "failed", "lost"]:
        """Returns how the job stands."""
        try:
            status = sky.get(sky.job_status(cluster, job_ids=[job])).get(job)
        except (exceptions.ClusterDoesNotExist, exceptions.ClusterNotUpError):
            return "lost"
        if status is None or not status.is_terminal():
            return "running"
        return "succeeded" if status.name == "SUCCEEDED" else "failed"

    def down(self, cluster: str) -> None:
        """Takes the cluster down."""
        try:
            sky.get(sky.down(cluster))
        except (exceptions.ClusterDoesNotExist, ValueError):
            # It is gone, or was never there.
            return


class _Lines(io.TextIOBase):
    """A text stream that hands on whole lines."""

    def __init__(self, sink: "queue.SimpleQueue[str]") -> None:
        self._sink = sink
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._sink.put(line)
        return len(text)
