import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import mlcd_bo as mlcd
from tests.mlcd_bo.worlds import World, two_types

ROOT = Path(__file__).parents[2]
JOB = mlcd.Job(total_samples=1000 * 3600 * 8, script="train.py", args=("--x", "1"))
SCENARIO = mlcd.Scenario.cheapest_by(deadline=20.0)


def world():
    return World(two_types(), bumps={"big x2": 0.4, "small x4": -0.2})


def begun(path, **options):
    return mlcd.DeploymentOptimizer(two_types(), SCENARIO, JOB, store=path, **options)


def test_resume_asks_the_same_after_every_trial(tmp_path):
    path = tmp_path / "search.db"
    here = world()
    search = begun(path, trial_cost=here.trial_seconds)
    while chosen := search.ask():
        search.tell(mlcd.Trial(chosen[0], here.profile(chosen[0], mlcd.Limits()), began=5.0))
        again = mlcd.DeploymentOptimizer.resume(path, trial_cost=here.trial_seconds)
        assert again.trials == search.trials
        assert again.ask() == search.ask()
        assert again.ask(3) == search.ask(3)
        assert again.ledger == search.ledger
        assert (again.scenario, again.job, again.strategy) == (SCENARIO, JOB, "gittins")
    assert again.recommend() == search.recommend()


@pytest.mark.parametrize("strategy", ["random", "convbo"])
def test_chance_is_the_same_after_a_resume(tmp_path, strategy):
    path = tmp_path / "search.db"
    here = world()
    search = begun(path, strategy=strategy, seed=7)
    (first,) = search.ask()
    search.tell(mlcd.Trial(first, here.profile(first, mlcd.Limits())))
    assert mlcd.DeploymentOptimizer.resume(path).ask() == search.ask()


def test_failures_and_knobs_survive(tmp_path):
    path = tmp_path / "search.db"
    kinds = [mlcd.InstanceType("s", 1.0, spot_price=0.3), mlcd.InstanceType("o", 2.0, gpus=2)]
    space = mlcd.SearchSpace(
        mlcd.Catalog(kinds, dated="today"), [2, 3], spot=True, knobs={"batch": [32, 64]}
    )
    search = mlcd.DeploymentOptimizer(space, mlcd.Scenario.fastest(), JOB, store=path)
    search.tell(mlcd.Trial(space[1], mlcd.Observation.failed("oom", 9.0, 0.5, "why"), batch=0))
    search.tell(mlcd.Trial(space[2], mlcd.Observation(3.0, 0.1, 9.0, 0.5, work_done=4.0), batch=0))
    again = mlcd.DeploymentOptimizer.resume(path)
    assert list(again.space) == list(space)
    assert again.space.catalog.dated == "today"
    assert again.trials[0].observation.detail == "why"
    assert again.trials[0].observation.status == "oom"
    assert again.trials[1] == mlcd.Trial(
        space[2], search.trials[1].observation, 0, space[2].price_per_hour
    )
    assert again.work_left == JOB.work - 4.0


def test_numpy_figures_are_kept(tmp_path):
    path = tmp_path / "search.db"
    search = begun(path)
    seen = mlcd.Observation(np.float32(3), np.float32(0.5), np.int64(9), np.float32(0.5))
    search.tell(mlcd.Trial(search.space[1], seen, np.int64(0), np.float32(0.25), np.float32(5)))
    search.tell(mlcd.Trial(search.space[2], mlcd.Observation.failed("oom", np.float32(9), 0.5)))
    again = mlcd.DeploymentOptimizer.resume(path)
    assert again.trials[0] == search.trials[0]
    assert again.trials[1].observation.status == "oom"


def test_a_space_of_numpy_figures_is_kept(tmp_path):
    path = tmp_path / "search.db"
    kind = mlcd.InstanceType("a", np.float32(1), quota=np.int64(8))
    space = mlcd.SearchSpace(
        mlcd.Catalog([kind]), np.array([1, 2]), knobs={"batch": np.array([32, 64])}
    )
    scenario = mlcd.Scenario.fastest_within(np.float32(5))
    job = mlcd.Job(total_samples=np.float32(100))
    mlcd.DeploymentOptimizer(space, scenario, job, seed=np.int64(3), store=path)
    again = mlcd.DeploymentOptimizer.resume(path, space)
    assert list(again.space) == list(space)
    assert (again.scenario, again.job, again.seed) == (scenario, job, 3)
    with pytest.raises(mlcd.InvalidInput, match="space must be a SearchSpace"):
        mlcd.DeploymentOptimizer.resume(path, 5)


def test_json_lines_tell_the_same_story(tmp_path):
    path = tmp_path / "search.db"
    here = world()
    search = begun(path)
    search.run(here)
    events = [json.loads(line) for line in (tmp_path / "search.db.jsonl").read_text().splitlines()]
    assert events[0]["event"] == "search"
    told = [e for e in events if e["event"] == "trial"]
    assert [e["deployment"] for e in told] == [d.key for d in here.seen]
    assert all(e["price_per_hour"] > 0 for e in told)
    assert all(e["began"] > 1e9 for e in told)
    assert [e["event"] for e in events[1:]] == ["start", "trial"] * len(told)


def test_an_outcome_is_kept_while_those_beside_it_still_run(tmp_path):
    path = tmp_path / "search.db"
    search = begun(path)
    here = world()
    chosen = search.ask(3)
    profile, seen = here.profile, []

    def slow(deployment, limits):
        if deployment == chosen[-1]:
            until = time.monotonic() + 120.0
            while len(seen) < 2 and time.monotonic() < until:
                time.sleep(0.01)
                seen[:] = mlcd.DeploymentOptimizer.look(path).trials
        return profile(deployment, limits)

    here.profile = slow
    search.run(here, parallel=3)
    assert {t.deployment for t in seen} == set(chosen[:2])
    # By the order of the space, not by which ended first.
    assert [t.deployment for t in search.trials[:3]] == sorted(chosen, key=search.space.position)
    assert mlcd.DeploymentOptimizer.resume(path).trials == search.trials


def test_an_interrupted_trial_is_charged_and_may_be_tried_again(tmp_path):
    path = tmp_path / "search.db"
    search = begun(path)
    (first,) = search.ask()
    row = search.space.position(first)
    search._store.start([row], 0, 1000.0)
    search._store.alive(1000.0 + 360.0)
    again = mlcd.DeploymentOptimizer.resume(path)
    assert again.ledger.hours == pytest.approx(0.1)
    assert again.ledger.dollars == pytest.approx(0.1 * first.price_per_hour)
    assert again.ask() == [first]
    # Charged once, however often it is resumed.
    assert mlcd.DeploymentOptimizer.resume(path).ledger == again.ledger


def test_trials_cut_short_side_by_side_are_charged_their_hours_once(tmp_path):
    path = tmp_path / "search.db"
    search = begun(path)
    first, second, third = search.ask(3)
    rows = [search.space.position(d) for d in (first, second, third)]
    search._store.start(rows, 0, 1000.0)
    search._store.alive(1000.0 + 360.0)
    # The first had ended before the process was killed, the others had not.
    search.tell(mlcd.Trial(first, mlcd.Observation(9.0, 0.1, 180.0, 0.5), batch=0))
    again = mlcd.DeploymentOptimizer.resume(path)
    assert again.ledger.hours == pytest.approx(0.1)
    both = second.price_per_hour + third.price_per_hour
    assert again.ledger.dollars == pytest.approx(0.5 + 0.1 * both)
    # What comes next is a batch of its own.
    again.run(world())
    assert again.trials[1].batch == 1
    later = sum(t.observation.seconds for t in again.trials[1:]) / 3600
    assert again.ledger.hours == pytest.approx(0.1 + later)
    assert mlcd.DeploymentOptimizer.resume(path).ledger == again.ledger


def test_a_clock_that_is_set_back_spoils_no_store(tmp_path, monkeypatch):
    path = tmp_path / "search.db"
    search = begun(path)
    here = world()
    clock = iter(range(10**6, 0, -1))
    monkeypatch.setattr(mlcd._optimizer.time, "time", lambda: float(next(clock)))
    monkeypatch.setattr(mlcd._trial_loop, "_HEARTBEAT_S", 0.01)
    kept = []

    def profile(deployment, limits):
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            with closing(sqlite3.connect(path)) as database:
                kept[:] = database.execute("SELECT began, alive FROM running").fetchall()
            if kept[0][1] > kept[0][0]:
                break
            time.sleep(0.01)
        raise ConnectionError

    here.profile = profile
    with pytest.raises(ConnectionError):
        search.run(here)
    ((began, alive),) = kept
    # Seconds that have passed, although the clock was set back.
    assert 0.0 < alive - began < 60.0
    assert mlcd.DeploymentOptimizer.resume(path).ledger == search.ledger


def test_a_search_that_runs_elsewhere_is_left_alone(tmp_path):
    path = tmp_path / "search.db"
    search = begun(path)
    elsewhere = os.getppid()
    with search._store.owned():
        search._store.start([0], 0, 1000.0)
        with closing(sqlite3.connect(path)) as database, database:
            born = mlcd._store._birth(elsewhere)
            database.execute("UPDATE owner SET process = ?, born = ?", [elsewhere, born])
        with pytest.raises(mlcd.StoreError, match=f"is being run by process {elsewhere}"):
            mlcd.DeploymentOptimizer.resume(path)
        with pytest.raises(mlcd.StoreError, match=f"is being run by process {elsewhere}"):
            search.run(world())
        assert mlcd.DeploymentOptimizer.look(path).ledger.hours == 0.0
    # What the owner leaves to others when it ends is its own claim alone.
    with pytest.raises(mlcd.StoreError, match="is being run by process"):
        mlcd.DeploymentOptimizer.resume(path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE owner SET born = 'before the machine was started again'")
    assert mlcd.DeploymentOptimizer.resume(path).run(world()).trials > 0


def test_two_searches_do_not_share_a_store(tmp_path):
    path = tmp_path / "search.db"
    begun(path)._store.start([0], 0, 1000.0)
    # Killed in its very first trial: what that cost is charged by a resume, not forgotten.
    with pytest.raises(mlcd.StoreError, match="mlcd resume"):
        begun(path)


def test_a_changed_catalogue_is_refused_unless_accepted(tmp_path):
    path = tmp_path / "search.db"
    here = world()
    search = begun(path)
    search.tell(mlcd.Trial(here.space[0], here.profile(here.space[0], mlcd.Limits())))
    spent = search.ledger.dollars
    kinds = [mlcd.InstanceType("small", 0.7, vcpus=4), mlcd.InstanceType("big", 1.6, vcpus=16)]
    dearer = mlcd.SearchSpace(mlcd.Catalog(kinds), [1, 2, 4, 8])
    with pytest.raises(mlcd.CatalogChanged, match=r"small.price: 0.5 -> 0.7.*accept_prices"):
        mlcd.DeploymentOptimizer.resume(path, dearer)
    again = mlcd.DeploymentOptimizer.resume(path, dearer, accept_prices=True)
    assert again.ledger.dollars == spent
    assert again.trials[0].price_per_hour == 0.5
    assert again.trials[0].deployment.price_per_hour == 0.7
    fewer = mlcd.SearchSpace(mlcd.Catalog(kinds), [1, 2])
    with pytest.raises(mlcd.CatalogChanged, match="other deployments"):
        mlcd.DeploymentOptimizer.resume(path, fewer, accept_prices=True)


def test_stores_are_not_mixed_up(tmp_path):
    path = tmp_path / "search.db"
    search = begun(path)
    search.tell(mlcd.Trial(search.space[0], mlcd.Observation(1.0, 0.0, 1.0, 1.0)))
    with pytest.raises(mlcd.StoreError, match="already holds trials"):
        begun(path)
    with pytest.raises(mlcd.StoreError, match="another search"):
        begun(path, seed=1)
    with pytest.raises(mlcd.StoreError, match="is not there"):
        mlcd.DeploymentOptimizer.resume(tmp_path / "no.db")
    (tmp_path / "bad.db").write_text("this is not a database, it is a text of some length")
    with pytest.raises(mlcd.StoreError, match="cannot be used"):
        mlcd.DeploymentOptimizer.resume(tmp_path / "bad.db")
    with pytest.raises(mlcd.StoreError, match="cannot be used"):
        begun(tmp_path / "no" / "such" / "folder.db")
    sqlite3.connect(tmp_path / "empty.db").close()
    (tmp_path / "empty.db").touch()
    with pytest.raises(mlcd.StoreError, match="no search"):
        mlcd.DeploymentOptimizer.resume(tmp_path / "empty.db")


PROGRAM = """
import sys, time
import mlcd_bo as mlcd
from tests.mlcd_bo.test_store import JOB, SCENARIO, begun, world

class Slow(type(world())):
    def profile(self, deployment, limits):
        time.sleep(0.06)
        return super().profile(deployment, limits)

here = world()
here.__class__ = Slow
path = sys.argv[1]
if sys.argv[2] == "begin":
    search = begun(path)
else:
    search = mlcd.DeploymentOptimizer.resume(path)
print("up", flush=True)
best = search.run(here)
print(best.deployment.key, len(search.trials), flush=True)
"""


@pytest.mark.cluster
def test_killed_at_any_point_a_resume_ends_the_same(tmp_path):
    straight = begun(tmp_path / "straight.db")
    best = straight.run(world())
    assert len(straight.trials) >= 3
    delay = random.Random(0)
    path, first = tmp_path / "search.db", True
    for _ in range(20):
        mode = "begin" if first else "resume"
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path), mode],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout.readline() == "up\n"
        first = False
        time.sleep(delay.uniform(0.05, 0.3))
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
        child.wait()
        child.stdout.close()
        if rest:
            break
    else:
        again = mlcd.DeploymentOptimizer.resume(path)
        rest = f"{again.run(world()).deployment.key} {len(again.trials)}"
    assert rest.split() == f"{best.deployment.key} {len(straight.trials)}".split()


def _content(**changes):
    def edit(content):
        return {**content, **changes}

    return "search", edit


def _trial(**changes):
    def edit(content):
        return {**content, **changes}

    return "trial", edit


@pytest.mark.parametrize(
    ("table", "edit"),
    [
        ("search", lambda content: [content]),
        ("search", lambda content: {"format": 1}),
        _content(scenario={"objective": "speed"}),
        _content(scenario=[1]),
        _content(job={"total_samples": "many"}),
        _content(types=[{"name": "small"}]),
        _content(types=5),
        _content(deployments=[["large", 1, False, []]]),
        _content(deployments=[["small"]]),
        _content(strategy="luck"),
        _content(strategy=["gittins"]),
        _content(seed=-1),
        _content(seed="a"),
        _content(earlier=[[{"type": {}}]]),
        _content(earlier=3),
        ("trial", lambda content: []),
        ("trial", lambda content: {}),
        _trial(observation={"speed": 1.0}),
        _trial(observation=None),
        _trial(price_per_hour=-1),
        _trial(batch="first"),
    ],
)
def test_an_edited_store_is_refused_in_words(tmp_path, table, edit):
    path = tmp_path / "search.db"
    search = begun(path)
    search.tell(mlcd.Trial(search.space[0], mlcd.Observation(1.0, 0.0, 1.0, 1.0)))
    with closing(sqlite3.connect(path)) as database, database:
        (content,) = database.execute(f"SELECT content FROM {table}").fetchone()
        changed = json.dumps(edit(json.loads(content)))
        database.execute(f"UPDATE {table} SET content = ?", [changed])
    for opened in (mlcd.DeploymentOptimizer.resume, mlcd.DeploymentOptimizer.look):
        with pytest.raises(mlcd.StoreError, match=r"search\.db"):
            opened(path)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE search SET content = 'not JSON'",
        "UPDATE trial SET content = '{'",
        "UPDATE trial SET deployment = -1",
        "UPDATE trial SET deployment = 99",
        "UPDATE trial SET deployment = 'small x1'",
        "INSERT INTO lost VALUES (0, -1, 2)",
        "INSERT INTO lost VALUES (0, 'a', 2)",
        "INSERT INTO lost VALUES (-1, 1, 2)",
        "INSERT INTO running VALUES (99, 0, 1, 2)",
        "INSERT INTO running VALUES (-1, 0, 1, 2)",
        "INSERT INTO running VALUES (0, 0, 'a', 2)",
        "INSERT INTO running VALUES (0, 0, 5, 2)",
    ],
)
def test_a_damaged_store_is_refused_in_words(tmp_path, statement):
    path = tmp_path / "search.db"
    search = begun(path)
    search.tell(mlcd.Trial(search.space[0], mlcd.Observation(1.0, 0.0, 1.0, 1.0)))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)
    with pytest.raises(mlcd.StoreError, match="damaged or was edited"):
        mlcd.DeploymentOptimizer.resume(path)


@pytest.mark.parametrize("path", [".", "", 5, b"s.db"])
def test_a_store_is_a_file(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mlcd.StoreError, match="store"):
        begun(path)
    with pytest.raises(mlcd.StoreError, match="is not there"):
        mlcd.DeploymentOptimizer.resume(path)


def test_a_byte_that_is_no_text_is_refused_in_words(tmp_path):
    path = tmp_path / "search.db"
    begun(path)
    content = bytearray(path.read_bytes())
    content[content.find(b'"format"') + 2] = 0xE9
    path.write_bytes(content)
    with pytest.raises(mlcd.StoreError, match=r"search\.db"):
        mlcd.DeploymentOptimizer.resume(path)


def test_a_line_cut_short_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "search.db"
    search = begun(path)
    lines = tmp_path / "search.db.jsonl"
    search.tell(mlcd.Trial(search.space[0], mlcd.Observation(1.0, 0.0, 1.0, 1.0)))
    lines.write_bytes(lines.read_bytes()[:-40])
    again = mlcd.DeploymentOptimizer.resume(path)
    again.tell(mlcd.Trial(search.space[1], mlcd.Observation(1.0, 0.0, 1.0, 1.0)))
    last = lines.read_text().splitlines()[-1]
    assert json.loads(last)["deployment"] == search.space[1].key


def test_looking_changes_nothing(tmp_path):
    (tmp_path / "empty.db").touch()
    with closing(sqlite3.connect(tmp_path / "foreign.db")) as database, database:
        database.execute("CREATE TABLE theirs (a)")
    for name in ("empty.db", "foreign.db"):
        before = (tmp_path / name).read_bytes()
        for opened in (mlcd.DeploymentOptimizer.look, mlcd.DeploymentOptimizer.resume):
            with pytest.raises(mlcd.StoreError, match="holds no search"):
                opened(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


def test_what_was_paid_for_is_known_although_the_store_fails(tmp_path):
    path = tmp_path / "search.db"
    search = begun(path)
    path.unlink()
    with pytest.raises(mlcd.StoreError, match="cannot be used"):
        search.run(world())
    assert len(search.trials) == 0  # nothing was paid for: the start could not be kept
    with pytest.raises(mlcd.StoreError, match="cannot be used"):
        search.tell(mlcd.Trial(search.space[0], mlcd.Observation(1e4, 0.0, 1.0, 1.0)))
    assert not path.exists()
    assert search.recommend().deployment == search.space[0]
    assert search.ledger.dollars == 1.0


def test_types_in_another_order_are_the_same_catalogue(tmp_path):
    path = tmp_path / "search.db"
    search = begun(path)
    search.tell(mlcd.Trial(search.space[0], mlcd.Observation(1.0, 0.0, 1.0, 1.0)))
    kinds = reversed(list(search.space.catalog.values()))
    turned = mlcd.SearchSpace(mlcd.Catalog(kinds), [1, 2, 4, 8])
    assert list(turned) != list(search.space)
    again = mlcd.DeploymentOptimizer.resume(path, turned)
    assert list(again.space) == list(search.space)
    assert again.trials == search.trials


def test_a_search_that_runs_on_another_machine_is_left_alone(tmp_path):
    path = tmp_path / "search.db"
    search = begun(path)
    search._store.start([0], 0, time.time())
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO owner VALUES (1, 'otherhost', 1, '')")
    with pytest.raises(mlcd.StoreError, match="is being run on 'otherhost'"):
        mlcd.DeploymentOptimizer.resume(path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE running SET began = began - 100, alive = alive - 90")
    assert mlcd.DeploymentOptimizer.resume(path).ledger.hours == pytest.approx(10 / 3600)
