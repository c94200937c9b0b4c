"""What the processes of the tests of planning run."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hipress_torch
from hipress_torch._plan import Choice, Term
from tests.hipress_torch.ranks import flat, network, train_step


def slowed_down(rank: int, ranks: int) -> dict[str, Any]:
    """Exchanges become slow in the middle of a run with the default plan, on one rank only.

    The seconds are given, in place of those that this machine would measure.
    """
    net = network()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
    state = hipress_torch.register(ddp)
    assert state._planner._watch is not None
    state._planner._watch.every = 3
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    measured = state._recorder.exchanged
    step = 0

    def exchanged(bucket: int, seconds: float) -> None:
        # One slow window, which is borne, and slow windows from step 24 on, which are not.
        slow = rank == 1 and (14 <= step < 17 or step >= 24)
        measured(bucket, 0.013 if slow else 0.01)

    state._recorder.exchanged = exchanged  # type: ignore[method-assign]
    plans, anew = [state.plan], []
    for step in range(50):
        train_step(ddp, optimizer, rank, step)
        anew.append(state.metrics()["plans_made_anew"])
        if state.plan is not plans[-1]:
            plans.append(state.plan)
    result = {
        "anew": anew,
        "profiles": [p.profile.to_dict() for p in plans],
        "backward": [p.backward for p in plans],
        "explained": state.explain(),
        "parameters": flat(net),
    }
    state.close()
    return result


def switched(rank: int, ranks: int) -> dict[str, Any]:
    """A bucket that was compressed is summed plainly: what it owed is sent."""
    net = torch.nn.Linear(64, 64, bias=False)
    ddp = DistributedDataParallel(net)
    state = hipress_torch.register(ddp, codec="onebit", plan="always")
    given, taken = torch.zeros(64, 64), torch.zeros(64, 64)
    for step in range(5):
        if step == 4:
            state._planner._choices = {(0, 4096): Choice("none", 1 << 20)}
        g = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(8, 64, generator=g)
        net.zero_grad()
        out = ddp(x)
        (mine,) = torch.autograd.grad(out.square().sum(), net.weight, retain_graph=True)
        given += mine
        out.square().sum().backward()
        taken += net.weight.grad
    dist.all_reduce(given)
    result = {
        "lost": float((given / ranks - taken).abs().max()),
        "size": float(taken.abs().max()),
        "residual": float(state._registry.buffer("residual", taken.device).abs().max()),
    }
    state.close()
    return result


def by_ring(rank: int, ranks: int) -> dict[str, Any]:
    """Calibrates three ranks, then trains by a plan in which only a ring is cheap, and by ring."""
    profile = hipress_torch.calibrate(codecs=("onebit",), budget_s=0.2)
    slow, fast = Term(0.1, 0.1, 1e-5), Term(1e-6, 1e-6, 1e-12)
    only = replace(
        profile,
        collectives={"all_reduce": slow, "all_to_all": slow, "all_gather": fast, "hop": fast},
    )
    found: dict[str, Any] = {"measured": sorted(profile.collectives)}
    for name, options in (
        ("planned", {"plan": hipress_torch.Plan(only, ("onebit",))}),
        ("ring", {"plan": "always", "strategy": "ring"}),
    ):
        net = network()
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
        state = hipress_torch.register(ddp, codec="onebit", **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            train_step(ddp, optimizer, rank, step)
        found[name] = flat(net)
        found[f"{name} explained"] = state.explain()
        state.close()
    return found
