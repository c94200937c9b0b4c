import importlib.util
import itertools

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


@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed")
def test_dry_run_of_the_installed_skypilot(tmp_path, monkeypatch):
    from mlcd_bo.profilers._sky_client import InstalledSky

    monkeypatch.setenv("HOME", str(tmp_path))
    profiler = mlcd.SkyProfiler("train.py", client=InstalledSky(dryrun=True), infra="aws")
    task = profiler.client.task(profiler.request(TWO, mlcd.Limits()))
    assert task.num_nodes == 2
    (resources,) = task.resources
    assert resources.instance_type == "g5.xlarge"
