"""A real search with a real DDP script, killed at random points and resumed."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

import mlcd_bo as mlcd
from tests.mlcd_bo.test_local import processes_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch, mlcd_bo
from torch import distributed as dist, nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    mlcd_bo.step(32)
"""
PROGRAM = """
import sys
import mlcd_bo as mlcd
from tests.mlcd_bo.test_killed import begun, profiler
store, script = sys.argv[1:3]
search = mlcd.DeploymentOptimizer.resume(store) if sys.argv[3] == "resume" else begun(store)
search.run(profiler(script))
"""
# Nothing is waited for longer, on however busy a machine.
PATIENCE_S = 120.0


def begun(store=None):
    space = mlcd.SearchSpace(mlcd.Catalog([mlcd.InstanceType("thin", 3.0, vcpus=1)]), [1, 2])
    return mlcd.DeploymentOptimizer(
        space, mlcd.Scenario.fastest(), mlcd.Job(total_samples=1e9), store=store
    )


class Quick(mlcd.LocalTorchrun):
    """Content with little, and with longest times out of reach: however slow, a trial is ok."""

    def profile(self, deployment, limits):
        return super().profile(deployment, replace(limits, half_width=0.5))


def profiler(script):
    return Quick(script, probe_s=PATIENCE_S, startup_s=PATIENCE_S, least_s=0.1)


def wait_for(point, store, before, script, child):
    """Waits until the search is at that point, or has ended before."""
    until = time.monotonic() + PATIENCE_S
    while child.poll() is None and time.monotonic() < until:
        new = [e["event"] for e in events(store)[before:]]
        launched = len(processes_of(script)) >= 3
        if {"begun": "start" in new, "launched": launched, "kept": "trial" in new}[point]:
            return
        time.sleep(0.02)


def events(store):
    lines = Path(f"{store}.jsonl")
    # Whatever a kill left of a last line is no event.
    found = lines.read_text().split("\n")[:-1] if lines.exists() else []
    return [json.loads(line) for line in found if line]


def trials_of(search):
    return [(t.deployment, t.observation, t.batch, t.price_per_hour) for t in search.trials]


@pytest.mark.parametrize("seed", [1])
def test_killed_at_random_points_and_resumed(seed, tmp_path):
    script, store = tmp_path / "train.py", tmp_path / "search.db"
    script.write_text(textwrap.dedent(SCRIPT))
    chance = random.Random(seed)
    told, charged = [], 0.0
    for kill in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, store, script, "resume" if kill else "begin"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        before = len(events(store))
        # A point of the search, not of the clock, and some time beyond it.
        point = chance.choice(["begun", "launched", "kept"])
        wait_for(point, store, before, script, child)
        time.sleep(chance.uniform(0.0, 1.5))
        child.send_signal(signal.SIGKILL)
        child.wait()
        until = time.monotonic() + PATIENCE_S
        while processes_of(script) and time.monotonic() < until:
            time.sleep(0.02)
        assert processes_of(script) == [], f"ranks outlived a kill at {point!r}"

        search = mlcd.DeploymentOptimizer.resume(store)
        # What was told before is kept as it was, nothing twice.
        assert trials_of(search)[: len(told)] == told
        assert len({t.deployment for t in search.trials}) == len(search.trials)
        told = trials_of(search)
        paid = [t.observation for t in search.trials]
        lost_h = search.ledger.hours - sum(o.seconds for o in paid) / 3600
        lost_d = search.ledger.dollars - sum(o.dollars for o in paid)
        # Each cut trial is charged once more at most, and none is forgotten again.
        assert lost_h >= charged - 1e-9
        assert (lost_h > 1e-12) == (lost_d > 1e-12)
        charged = lost_h
        assert mlcd.DeploymentOptimizer.resume(store).ledger == search.ledger
        # The next question is that of a search which nothing has interrupted.
        straight = begun()
        for trial in search.trials:
            straight.tell(trial)
        assert search.ask() == straight.ask()
        assert search.ask(2) == straight.ask(2)

    best = search.run(profiler(script))
    assert processes_of(script) == []
    assert trials_of(search)[: len(told)] == told
    straight = begun()
    for trial in search.trials:
        # Each trial was what an uninterrupted search would have asked for by then.
        assert straight.ask() == [trial.deployment]
        assert trial.observation.status == "ok", trial.observation.detail
        straight.tell(trial)
    assert straight.ask() == []
    same = straight.recommend()
    assert (best.deployment, best.hours, best.dollars) == (
        same.deployment,
        same.hours,
        same.dollars,
    )
    assert best.reason == same.reason
    assert best.spent_hours == pytest.approx(same.spent_hours + charged)
