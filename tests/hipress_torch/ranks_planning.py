"""What the processes of the tests of planning run."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hipress_torch
from hipress_torch._plan import Choice
from tests.hipress_torch.ranks import flat, network, train_step


def slowed_down(rank: int, ranks: int) -> dict[str, Any]:
    """The network becomes slow in the middle of a run with the default plan."""
    net = network()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
    state = hipress_torch.register(ddp)
    assert state._planner._watch is not None
    state._planner._watch.every = 6
    # What slows down is 10 times as slow; a busy machine is not, window by window.
    state._planner._watch.drift = 4.0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    originals = {
        name: getattr(dist, name)
        for name in ("all_reduce", "all_to_all_single", "all_gather_single")
        if hasattr(dist, name)
    }

    def slow(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0]
            # 500 ms a MB: what is sent costs, and not that something is.
            time.sleep(0.5e-6 * tensor.numel() * tensor.element_size())
            return original(*args, **kwargs)

        return call

    plans = []
    try:
        for step in range(40):
            if step == 22:
                plans.append(state.plan)
                for name, original in originals.items():
                    setattr(dist, name, slow(original))
            train_step(ddp, optimizer, rank, step)
            if state.metrics()["plans_made_anew"]:
                break
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    plans.append(state.plan)
    result = {
        "anew": state.metrics()["plans_made_anew"],
        "steps": step,
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
