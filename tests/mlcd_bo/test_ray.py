import json
import os
import tempfile
import textwrap
from pathlib import Path

import pytest
import yaml

import mlcd_bo as mlcd

pytestmark = [
    pytest.mark.cluster,
    # Ray leaves its log handles to the collector, and hints at a change of a default.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Tip.*:FutureWarning"),
]

SPACE = mlcd.SearchSpace(mlcd.Catalog([mlcd.InstanceType("node", 2.0, vcpus=1)]), [1, 2, 3])
ONE, TWO, THREE = SPACE

SCRIPT = """
import os, socket, sys, time
import mlcd_bo
world = int(os.environ["WORLD_SIZE"])
assert os.environ["OMP_NUM_THREADS"] == "1"
begun = time.monotonic() + 0.2
for i in range(10**6):
    time.sleep(max(begun + 0.005 * i - time.monotonic(), 0))
    if sys.argv[1:] == ["fail"] and os.environ["RANK"] == "1" and i == 20:
        raise RuntimeError("the second node has had enough")
    mlcd_bo.step(32)
"""


@pytest.fixture(scope="module")
def cluster():
    """Two Ray nodes on this machine, one CPU each."""
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short:
        # Unix sockets have short paths.
        os.environ["RAY_TMPDIR"] = short
        two = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        try:
            two.add_node(num_cpus=1)
            two.wait_for_nodes()
            ray.init(address=two.address, log_to_driver=False)
            yield two
        finally:
            ray.shutdown()
            two.shutdown()
            os.environ.pop("RAY_TMPDIR")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def running(path):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(path).encode() in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found


def test_a_search_on_two_nodes_measures_them_as_one_job_and_learns_that_there_is_no_third(
    cluster, script
):
    import ray

    search = mlcd.DeploymentOptimizer(
        SPACE, mlcd.Scenario.fastest(), mlcd.Job(total_samples=1e7), seed=0
    )
    profiler = mlcd.RayProfiler(script, provision_s=1.0, probe_s=1.0, startup_s=60.0, least_s=0.3)
    best = search.run(profiler)
    assert best.deployment == TWO
    seen = {t.deployment: t.observation for t in search.trials}
    assert seen[TWO].speed == pytest.approx(2 * 32 / 0.005, rel=0.35)
    assert 0 < seen[TWO].dollars <= seen[TWO].seconds / 3600 * 4.0
    assert (seen[THREE].status, seen[THREE].dollars) == ("quota", 0.0)
    assert "no 3 nodes" in seen[THREE].detail
    assert running(script) == []
    # What was reserved is free again.
    assert ray.available_resources().get("CPU", 0) == 2


def test_a_failing_node_is_an_error_and_leaves_nothing(cluster, script):
    profiler = mlcd.RayProfiler(script, ["fail"], probe_s=30.0, startup_s=60.0, least_s=20.0)
    seen = profiler.profile(TWO, mlcd.Limits())
    assert seen.status == "error"
    assert "had enough" in seen.detail
    assert running(script) == []


def test_the_kuberay_entry_point_prints_what_it_saw(cluster, script, capsys):
    from mlcd_bo.profilers._ray_entry import main

    options = ["--count=1", "--price=2", "--probe-s=1", "--startup-s=60"]
    assert main([*options, str(script), "fine"]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("mlcd-observation"))
    seen = mlcd.Observation(**json.loads(line.partition(" ")[2]))
    assert seen.speed == pytest.approx(32 / 0.005, rel=0.35)


def test_kuberay_job_asks_for_the_machines():
    kind = mlcd.InstanceType("g5.xlarge", 1.0, vcpus=4, gpus=1)
    profiler = mlcd.RayProfiler("/app/train.py", ["--name", "two words"])
    job = yaml.safe_load(profiler.job_yaml(mlcd.Deployment(kind, 3), image="me/train:1"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 3
    pod = group["template"]["spec"]
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "g5.xlarge"}
    assert pod["containers"][0]["resources"]["limits"] == {"cpu": "4", "nvidia.com/gpu": 1}
    assert "'two words'" in job["spec"]["entrypoint"]
    assert json.dumps(job)


def test_refuses():
    with pytest.raises(mlcd.InvalidInput, match="provision_s"):
        mlcd.RayProfiler("x.py", provision_s=0)
