import importlib.util
import itertools
import os
import subprocess
import sys

import pytest

import mlcd_bo as mlcd
from mlcd_bo.profilers._sky import SkyUnavailable

KIND = mlcd.InstanceType("g5.xlarge", 3.6, vcpus=4, gpus=1, spot_price=1.8)
TWO = mlcd.Deployment(KIND, 2)


class FakeSky:
    """A cloud that trains at a known pace, or fails in a known way."""

    def __init__(self, pace=0.01, steps=10**9, fails=None, noise=()):
        self.pace, self.steps, self.fails, self.noise = pace, steps, fails, list(noise)
        self.up, self.requests, self.told = set(), [], 0

    def launch(self, request):
        self.requests.append(request)
        if self.fails == "quota":
            raise SkyUnavailable("no g5.xlarge anywhere: MaxSpotInstanceCountExceeded")
        self.up.add(request.cluster)
        return 7

    def lines(self, cluster, job):
        assert (cluster in self.up, job) == (True, 7)
        yield from self.noise
        for step in range(1, self.steps + 1):
            for rank in range(2):
                self.told += 1
                # SkyPilot puts the node's name before each line.
                yield f"(worker{rank}, rank={rank}) mlcd-step {rank} {step * self.pace} {step} 16\n"
            if step % 20 == 0:
                yield None
        for _ in itertools.repeat(None):
            yield None

    def status(self, cluster, job):
        if self.fails in ("lost", "failed") and self.told >= 2 * self.steps:
            return self.fails
        return "running"

    def down(self, cluster):
        self.up.discard(cluster)


def profile(client, **options):
    options = {"least_s": 0.1, "probe_s": 3.0, "startup_s": 1.0, **options}
    profiler = mlcd.SkyProfiler("train.py", ["--x", "a b"], client=client, **options)
    return profiler.profile(TWO, mlcd.Limits())


def test_speed_is_read_from_the_log_and_the_cluster_taken_down():
    client = FakeSky(noise=["Launching...\n", "garbled mlcd-step 0 1.\n", "mlcd-step x y z w\n"])
    seen = profile(client)
    assert seen.status == "ok", seen.detail
    assert seen.speed == pytest.approx(2 * 16 / 0.01)
    assert seen.dollars == pytest.approx(seen.seconds / 3600 * 7.2)
    assert client.up == set()
    (request,) = client.requests
    assert (request.instance_type, request.num_nodes, request.use_spot) == ("g5.xlarge", 2, False)
    assert request.run.endswith("train.py --x 'a b'")
    assert "--node-rank=$SKYPILOT_NODE_RANK" in request.run
    assert request.envs["MLCD_REPORT_LINES"] == "1"
    assert request.idle_minutes > 0


@pytest.mark.parametrize(
    ("client", "status", "says"),
    [
        (FakeSky(fails="quota"), "quota", "MaxSpotInstanceCountExceeded"),
        (FakeSky(steps=3, fails="lost"), "preempted", ""),
        (FakeSky(steps=3, fails="failed", noise=["CUDA out of memory\n"]), "oom", "memory"),
        (FakeSky(steps=3, fails="failed", noise=["no such file\n"]), "error", "no such file"),
        (FakeSky(steps=0), "timeout", "no step was reported"),
    ],
)
def test_failures_are_typed_and_the_cluster_taken_down(client, status, says):
    seen = profile(client)
    assert seen.status == status, seen.detail
    assert says in seen.detail
    assert client.up == set()
    assert seen.dollars == 0.0 if status == "quota" else seen.dollars > 0


def test_an_interrupt_takes_the_cluster_down():
    client = FakeSky()
    client.status = lambda cluster, job: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        profile(client)
    assert client.up == set()


def test_spot_and_knobs_reach_the_request():
    profiler = mlcd.SkyProfiler("train.py", client=FakeSky(), infra="aws/us-east-1")
    deployment = mlcd.Deployment(KIND, 1, spot=True, knobs=(("local_batch", 64),))
    request = profiler.request(deployment, mlcd.Limits())
    assert request.use_spot
    assert request.envs["MLCD_KNOB_LOCAL_BATCH"] == "64"
    assert request.infra == "aws/us-east-1"
    assert profiler.trial_seconds(deployment) == 1020.0


@pytest.mark.skipif(importlib.util.find_spec("sky") is not None, reason="SkyPilot is installed")
def test_without_skypilot_it_says_what_to_install():
    with pytest.raises(mlcd.MissingExtra, match=r"mlcd-bo\[sky\]"):
        mlcd.SkyProfiler("train.py")


VMS = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,\
AvailabilityZone,Arch
g5.xlarge,A10G,1.0,4.0,16.0,,1.006,0.5,us-east-1,us-east-1a,x86_64
"""


@pytest.mark.skipif(
    importlib.util.find_spec("sky") is None,
    reason="SkyPilot is not installed (extra sky; it needs an environment of its own)",
)
def test_dry_run_of_the_installed_skypilot(tmp_path):
    """SkyPilot's own optimizer places the adapter's task; in a process with a home of its own."""
    program = f"""
import os, sys
from pathlib import Path
from sky.skylet import constants
folder = Path.home() / ".sky" / "catalogs" / constants.CATALOG_SCHEMA_VERSION / "aws"
folder.mkdir(parents=True)
(folder / "vms.csv").write_text({VMS!r})
from sky.clouds import aws
# The names of the default images change from release to release.
tags = {{v for k, v in vars(aws).items() if k.startswith("_DEFAULT") and "IMAGE_ID" in k}}
(folder / "images.csv").write_text("Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId\\n" +
    "".join(f"{{tag}},us-east-1,ubuntu,22.04,ami-1,20240101,ami-1\\n" for tag in sorted(tags)))
(folder / "instance_quota_mapping.csv").write_text("InstanceType,OnDemandInstanceQuotaCode,"
    "SpotInstanceQuotaCode,QuotaName\\n")
import sky
from sky import check, clouds, execution, global_user_state
# As if `sky check` had found credentials; nothing is asked of a cloud in a dry run.
allowed = check._get_workspace_allowed_clouds("default")
global_user_state.set_allowed_clouds(allowed, "default")
global_user_state.set_enabled_clouds(["AWS"], clouds.CloudCapability.COMPUTE, "default")
# In this process rather than in a server that would outlive it.
sky.launch = lambda task, **options: execution.launch(task, **dict(options, down=False))
sky.stream_and_get = lambda result: result
import mlcd_bo as mlcd
from mlcd_bo.profilers._sky_client import InstalledSky
kind = mlcd.InstanceType("g5.xlarge", 1.006, vcpus=4, gpus=1, spot_price=0.5)
client = InstalledSky(dryrun=True)
profiler = mlcd.SkyProfiler("train.py", client=client, infra="aws")
for spot in (False, True):
    request = profiler.request(mlcd.Deployment(kind, 2, spot), mlcd.Limits())
    task = client.task(request)
    (resources,) = task.resources
    assert (task.num_nodes, resources.instance_type) == (2, "g5.xlarge")
    assert resources.use_spot == spot
    assert client.launch(request) == 0
try:
    client.launch(profiler.request(mlcd.Deployment(mlcd.InstanceType("z9.huge", 1.0), 1),
                                   mlcd.Limits()))
except mlcd.InvalidInput as problem:
    print("refused:", problem)
"""
    # SkyPilot asks for rsync even where nothing is copied.
    for tool in ("rsync", "socat", "nc"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    variables = {
        "HOME": str(tmp_path),
        "PATH": f"{os.environ['PATH']}{os.pathsep}{tmp_path}",
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout + done.stderr
    # The optimizer's table: the one candidate, and what an hour of two machines costs.
    assert "g5.xlarge" in said
    assert "2.01" in said
    assert "refused: SkyPilot refuses instance_type='z9.huge'" in said
    assert said.count("Dryrun finished") == 2
