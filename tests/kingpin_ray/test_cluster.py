"""On real Ray: the same answers as in one process, and nothing lost when workers die."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kingpin_ray as kp
from kingpin_ray import GroupedEstimator, Logistic, Ridge, _driver, _estimator
from kingpin_ray._session import ray_session
from kingpin_ray._source import Files, dataset_table
from kingpin_ray._store import Store
from tests.kingpin_ray.data import FEATURES, grouped_frame, two_files
from tests.kingpin_ray.faulty import Deadly, Gated

# Nothing here waits that long unless it hangs: a busy machine may be slow, never wrong.
PATIENCE_S = 400

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(500),
    # Ray 2.55 collects neither its Popen objects nor the /dev/null files it gave them.
    pytest.mark.filterwarnings("ignore:.*Popen.__del__:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*/dev/null:pytest.PytestUnraisableExceptionWarning"),
    # Ray Data touches its own deprecated settings when its context is shown.
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning:ray.data.context"),
]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver, "_CHUNK_ROWS", (500, 1000))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_session(2) as connected:
        yield connected


def same_bytes(first: Path, second: Path) -> None:
    """All files of two stores are equal, but for clocks and plans in results and manifest."""
    names = {path.name for path in first.iterdir()}
    assert names == {path.name for path in second.iterdir()}
    assert {"models.arrow", "keys.arrow", "groups.arrow"} <= names
    for name in names - {"results.arrow", "manifest.json"}:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    tables = [Store(path).results().drop(["seconds", "plan"]) for path in (first, second)]
    assert tables[0].equals(tables[1])


def task(model: Any, target: str = "value", **options: Any) -> GroupedEstimator:
    options = {"plan": "task", "random_state": 0, **options}
    return GroupedEstimator(model, "key", target, FEATURES, **options)


def test_a_run_of_its_own_equals_local_and_leaves_nothing_behind() -> None:
    code = """
import glob, os, sys, tempfile
import numpy as np
from kingpin_ray import GroupedEstimator, Logistic
from tests.kingpin_ray.data import FEATURES, grouped_frame, two_files
frame = grouped_frame(n_groups=60)
before = set(glob.glob(tempfile.gettempdir() + "/kpr-*"))
runs = [
    GroupedEstimator(Logistic(), "key", "label", FEATURES, {"C": [0.1, 1.0]}, cv=2, plan=plan,
                     num_actors=2, random_state=0).fit(frame)
    for plan in ("local", "task")
]
assert runs[1].plan_ == "task"
assert set(runs[1].results_.column("plan").to_pylist()) == {"task"}
np.testing.assert_array_equal(*(run.predict_proba(frame) for run in runs))
assert set(glob.glob(tempfile.gettempdir() + "/kpr-*")) == before
"""
    ours = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    assert ours.wait(timeout=PATIENCE_S) == 0
    assert not _processes_of(ours.pid)


def wait_for(happened: Callable[[], bool], seconds: float = 120) -> bool:
    """Returns whether something happened, looking until it did or time is up."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _processes_of(session: int) -> list[int]:
    """Living processes of a session, after some time in which they may end."""

    def living() -> list[int]:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found

    wait_for(lambda: not living(), 60)
    return living()


@pytest.mark.usefixtures("small_chunks")
def test_a_dead_actor_costs_its_chunk_alone(ray: Any, tmp_path: Path) -> None:
    frame = grouped_frame(n_groups=40)
    frame = frame.drop(frame[frame.key == "g007"].index[11:])
    model = task(Deadly(11, str(tmp_path / "died")), store=tmp_path / "killed").fit(frame)
    assert (tmp_path / "died").exists()
    task(Ridge(), store=tmp_path / "whole").fit(frame)
    same_bytes(tmp_path / "killed", tmp_path / "whole")
    assert set(model.results_.column("status").to_pylist()) == {"ok"}
    np.testing.assert_array_equal(
        model.predict(frame), task(Ridge(), plan="local").fit(frame).predict(frame)
    )


@pytest.mark.usefixtures("small_chunks")
def test_a_group_that_kills_every_worker_is_found_and_recorded(ray: Any) -> None:
    frame = grouped_frame(n_groups=4)
    frame = frame.drop(frame[frame.key == "g002"].index[11:])
    model = task(Deadly(11), fallback=None).fit(frame)
    rows = {row["key"]: row for row in model.results_.to_pylist()}
    assert rows.pop("g002")["status"] == "error"
    assert {row["status"] for row in rows.values()} == {"ok"}


def test_too_many_actors_are_refused_instead_of_waiting_for_ever(ray: Any) -> None:
    frame = grouped_frame(n_groups=3)
    with pytest.raises(kp.ResourceError, match="num_actors=99, but the Ray cluster has 2 CPUs"):
        task(Ridge(), num_actors=99).fit(frame)

    @ray.remote(num_cpus=2)
    class Hog:
        def ready(self) -> None: ...

    hog = Hog.remote()
    ray.get(hog.ready.remote())
    with pytest.raises(kp.ResourceError, match="all 2 CPUs of the Ray cluster are taken"):
        task(Ridge()).fit(frame)
    ray.kill(hog)
    assert wait_for(lambda: ray.available_resources().get("CPU", 0) == 2)


def test_actors_import_the_package_and_see_read_only_data_copied(ray: Any) -> None:
    from sklearn.tree import DecisionTreeRegressor

    frame = grouped_frame(n_groups=4)
    tree = DecisionTreeRegressor(max_depth=3)
    got = task(tree).fit(frame).predict(frame)
    np.testing.assert_array_equal(got, task(tree, plan="local").fit(frame).predict(frame))


DRIVER = """
import os, signal, sys
from kingpin_ray import GroupedEstimator, _driver, _estimator, _store
from tests.kingpin_ray.data import FEATURES
from tests.kingpin_ray.faulty import Gated
folder, deadly = sys.argv[1], int(sys.argv[2])
_driver._CHUNK_ROWS = (300, 400)
_estimator.SEGMENT_EVERY_S = 0.0
replaced = []
def dies_before_renaming(*names, rename=os.replace):
    replaced.append(names)
    if len(replaced) == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*names)
_store.os.replace = dies_before_renaming
GroupedEstimator(Gated(folder + "/gate", 70), "key", "value", FEATURES, plan="local",
                 random_state=0, store=folder + "/store").fit(folder + "/data.parquet")
"""


@pytest.mark.parametrize("deadly", [0, 6, 7])
def test_a_killed_driver_resumes_from_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadly: int
) -> None:
    """Killed while it trains, or between making a temporary file and renaming it."""
    grouped_frame(n_groups=60).to_parquet(tmp_path / "data.parquet")
    store = tmp_path / "store"
    command = [sys.executable, "-c", DRIVER, str(tmp_path), str(deadly)]
    driver = subprocess.Popen(command)
    wait_for(lambda: driver.poll() is not None or len(list(store.glob("segment-*.models.*"))) >= 3)
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    left = [path.name for path in store.iterdir() if path.name.endswith(".part")]
    # The first file to be renamed is a manifest; then results, models and manifest of a segment.
    assert left or not deadly
    assert all(name.startswith((".segment-", ".manifest.json.")) for name in left)
    (store / ".notes.txt.part").touch()  # not ours
    segments = len(Store(store).manifest()["segments"])
    assert segments >= 1

    (tmp_path / "gate").touch()
    monkeypatch.setattr(_driver, "_CHUNK_ROWS", (300, 400))
    again: list[int] = []
    real = _driver.fit_block
    monkeypatch.setattr(_driver, "fit_block", lambda *a: (again.append(1), real(*a))[1])
    model = task(Gated(f"{tmp_path}/gate", 70), plan="local").resume(store)
    assert model.results_.num_rows == 60
    (store / ".notes.txt.part").unlink()
    chunks = len(again) + segments
    task(Ridge(), plan="local", store=tmp_path / "whole").fit(str(tmp_path / "data.parquet"))
    same_bytes(store, tmp_path / "whole")
    assert len(again) == 2 * chunks - segments  # what the segments held was not done again


NODES = """
import logging, os, threading, time
import ray
from pathlib import Path
from ray.cluster_utils import Cluster
from kingpin_ray import GroupedEstimator, Ridge, _driver
from tests.kingpin_ray.data import FEATURES, grouped_frame, two_files
from tests.kingpin_ray.faulty import Gated

_driver._CHUNK_ROWS = (300, 400)
frame = grouped_frame(n_groups=60)
size = 150 << 20
cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 1, "object_store_memory": size, "include_dashboard": False},
)
second = cluster.add_node(num_cpus=1, object_store_memory=size)
ray.init(address=cluster.address, log_to_driver=False)
cluster.wait_for_nodes()
deaths = []
logging.getLogger("kingpin_ray._driver").addFilter(lambda record: not deaths.append(record))
gate = Path("gate").absolute()

def lose_a_node_when_both_train():
    while len(list(gate.parent.glob("gate.*"))) < 2:
        time.sleep(0.05)
    cluster.remove_node(second, allow_graceful=False)
    gate.touch()

threading.Thread(target=lose_a_node_when_both_train, daemon=True).start()
model = GroupedEstimator(
    Gated(str(gate), 10**9), "key", "value", FEATURES, plan="task", num_actors=2, random_state=0,
    store="killed", fallback=None,
).fit(frame)
assert len(deaths) == 1, deaths
assert set(model.results_.column("status").to_pylist()) == {"ok"}
GroupedEstimator(
    Ridge(), "key", "value", FEATURES, plan="local", random_state=0, store="whole", fallback=None
).fit(frame)
ray.shutdown()
cluster.shutdown()
"""


def test_a_lost_node_costs_its_chunks_alone() -> None:
    with tempfile.TemporaryDirectory(prefix="kp", dir="/tmp") as folder:
        env = {**os.environ, "RAY_TMPDIR": folder}
        root = str(Path(__file__).parents[2])
        env["PYTHONPATH"] = os.pathsep.join([root, env.get("PYTHONPATH", "")])
        command = [sys.executable, "-c", NODES]
        run = subprocess.Popen(command, env=env, cwd=folder, start_new_session=True)
        assert run.wait(timeout=PATIENCE_S) == 0
        assert not _processes_of(run.pid)
        same_bytes(Path(folder, "killed"), Path(folder, "whole"))


def test_flights_on_actors_equal_scikit_learn(ray: Any) -> None:
    path = Path(__file__).parents[3] / "shared" / "data" / "grouped" / "nycflights_flights.parquet"
    if not path.exists():
        pytest.skip(f"the optional data folder ../shared/data is absent ({path.name})")
    columns = ["dep_delay", "distance", "month", "day", "hour"]
    frame = pd.read_parquet(path, columns=[*columns, "tailnum", "arr_delay"])
    frame = frame[frame.arr_delay.notna()]
    frame["late"] = frame.arr_delay > 15
    model = GroupedEstimator(
        Logistic(), "tailnum", "late", columns, plan="task", random_state=0
    ).fit(frame)
    assert len(model.results_) == frame.tailnum.nunique(dropna=False)
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    sample = rng.choice(list(model.estimators_), 60, replace=False)
    for key, rows in frame[frame.tailnum.isin(sample)].groupby("tailnum"):
        theirs = LogisticRegression(solver="newton-cholesky", tol=1e-10, max_iter=1000)
        theirs.fit(rows[columns], rows.late)
        np.testing.assert_allclose(
            model.estimators_[key].predict_proba(rows[columns]),
            theirs.predict_proba(rows[columns]),
            atol=1e-6,
        )


@pytest.fixture
def parquet(tmp_path: Path) -> tuple[pd.DataFrame, str]:
    return two_files(tmp_path, 40, 1000, (300, 400))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("fallback", ["global", None])
def test_files_read_by_tasks_give_the_same_models_and_each_byte_is_read_once(
    ray: Any, parquet: tuple[pd.DataFrame, str], fallback: str | None
) -> None:
    frame, path = parquet
    options: dict[str, Any] = {"param_grid": {"C": [0.1, 1.0]}, "cv": 2, "fallback": fallback}
    here = task(Logistic(), "label", plan="local", **options).fit(frame)
    there = task(Logistic(), "label", **options).fit(path)
    np.testing.assert_array_equal(here.predict_proba(frame), there.predict_proba(frame))
    drop = ["seconds", "plan"]
    assert here.results_.drop(drop).equals(there.results_.drop(drop))
    needed = Files(path, ["key", "label", *FEATURES]).column_bytes()
    assert needed <= there.bytes_read_ <= 1.01 * needed
    if fallback == "global":
        new = frame.head(9).assign(key="new")
        np.testing.assert_array_equal(here.predict_proba(new), there.predict_proba(new))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("plan", ["grouped", "data"])
def test_files_stay_with_the_workers_that_read_them_when_groups_are_split(
    ray: Any, parquet: tuple[pd.DataFrame, str], plan: str
) -> None:
    frame, path = parquet
    giant = frame.assign(key=frame.key.where(frame.key < "g005", "giant"))
    for j, part in enumerate(np.array_split(np.arange(len(giant)), 3)):
        giant.iloc[part].to_parquet(Path(path).parent / f"{'abc'[j]}.parquet", row_group_size=400)
    options: dict[str, Any] = {"param_grid": {"C": [0.1, 1.0]}, "cv": 2}
    here = task(Logistic(), "label", **{**options, "plan": "local"}).fit(giant)
    there = task(Logistic(), "label", **{**options, "plan": plan}).fit(path)
    plans = {row["key"]: row["plan"] for row in there.results_.to_pylist()}
    assert plans["giant"] == plan
    assert plans["g001"] == ("task" if plan == "grouped" else "data")
    np.testing.assert_allclose(here.predict_proba(giant), there.predict_proba(giant), atol=1e-6)
    needed = Files(path, ["key", "label", *FEATURES]).column_bytes()
    assert needed <= there.bytes_read_ <= 1.01 * needed


@pytest.mark.usefixtures("small_chunks")
def test_ray_datasets_are_taken(ray: Any, parquet: tuple[pd.DataFrame, str]) -> None:
    frame, path = parquet
    data = ray.data.read_parquet(str(Path(path).parent)).drop_columns(["unused"])
    here = task(Logistic(), "label", plan="local").fit(frame)
    there = task(Logistic(), "label").fit(data)
    assert there.plan_ == "task"
    # Ray Data promises no order of rows, so sums may round differently.
    np.testing.assert_allclose(
        here.predict_proba(frame), there.predict_proba(frame), rtol=1e-7, atol=1e-9
    )
    assert here.predict(data).sum() == here.predict(frame).sum()
    served = data.map_batches(here.as_map_batches(), batch_format="pyarrow", batch_size=200)
    found = dataset_table(served).to_pandas()
    assert len(found) == len(frame)
    np.testing.assert_array_equal(found.prediction, here.predict(found))
    proba = data.map_batches(here.as_map_batches(proba=True), batch_format="pyarrow")
    proba = dataset_table(proba).to_pandas()
    np.testing.assert_array_equal(proba.proba_True, here.predict_proba(proba)[:, 1])


def test_a_killed_run_over_files_resumes_on_actors(
    ray: Any, parquet: tuple[pd.DataFrame, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame, path = parquet
    monkeypatch.setattr(_driver, "_CHUNK_ROWS", (500, 1000))
    monkeypatch.setattr(_estimator, "SEGMENT_EVERY_S", 0.0)
    real = Store.append
    calls: list[int] = []

    def dies(self: Store, outcomes: Any) -> None:
        real(self, outcomes)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "append", dies)
    with pytest.raises(KeyboardInterrupt):
        task(Ridge(), store=tmp_path / "s").fit(path)
    monkeypatch.setattr(Store, "append", real)
    model = task(Ridge()).resume(tmp_path / "s")
    here = task(Ridge(), plan="local").fit(frame)
    np.testing.assert_array_equal(model.predict(frame), here.predict(frame))
    assert model.results_.num_rows == 40
