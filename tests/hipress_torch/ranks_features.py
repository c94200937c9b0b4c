"""What the processes of the tests of torch's features run."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hipress_torch
from tests.hipress_torch.ranks import batch_of, flat, network, train_step


def small_buckets(rank: int, ranks: int, cap: float) -> dict[str, Any]:
    """Counts the collectives of the last step."""
    net = network(60)
    ddp = DistributedDataParallel(net, bucket_cap_mb=cap)
    state = hipress_torch.register(ddp, plan="always", min_elements=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    calls: list[str] = []
    original = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("all_to_all")
        return original(*args, **kwargs)

    dist.all_to_all_single = counted
    try:
        for step in range(5):
            calls.clear()
            train_step(ddp, optimizer, rank, step)
    finally:
        dist.all_to_all_single = original
    result = {"calls": len(calls), "parameters": flat(net), "explained": state.explain()}
    state.close()
    return result


def subgroups(rank: int, ranks: int) -> dict[str, Any]:
    """Ranks 1 and 2 of three train by themselves; in their group they are 0 and 1."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return {}
    net = network()
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.2)
    state = hipress_torch.register(ddp, plan="always")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    losses = [train_step(ddp, optimizer, rank, step) for step in range(25)]
    result = {"losses": losses, "parameters": flat(net), "metrics": state.metrics()}
    state.close()
    return result


def two_modules(rank: int, ranks: int) -> dict[str, Any]:
    """Two DDP modules with a state each, in one loss."""
    first, second = network(), network(200)
    made = []
    for net, codec in ((first, "onebit"), (second, "nbit")):
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
        made.append((ddp, hipress_torch.register(ddp, codec=codec, plan="always")))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.2)
    losses = []
    for step in range(25):
        x, y = batch_of(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(made[0][0](x) + made[1][0](x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    result = {
        "losses": losses,
        "parameters": flat(first) + flat(second),
        "ratios": [s.metrics()["ratio"] for _, s in made],
    }
    for _, state in made:
        state.close()
    return result


def more_ranks(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Two ranks train, then all three go on: what was owed is owed still, and once."""
    pair = dist.new_group([0, 1])
    path = os.path.join(folder, "{}.pt")
    owed = torch.zeros(0)
    if rank < 2:
        net = network()
        ddp = DistributedDataParallel(net, process_group=pair, bucket_cap_mb=0.2)
        state = hipress_torch.register(ddp, plan="always")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        for step in range(8):
            train_step(ddp, optimizer, rank, step)
        torch.save({"net": net.state_dict(), "state": state.state_dict()}, path.format(rank))
        owed = torch.cat([r.flatten() for r in state.state_dict()["residuals"].values()])
        dist.all_reduce(owed, group=pair)
        state.close()
    dist.barrier()
    saved = torch.load(path.format(min(rank, 1)), weights_only=True)
    if rank == 2:
        saved["state"]["residuals"] = {}
    net = network()
    net.load_state_dict(saved["net"])
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
    state = hipress_torch.register(ddp, plan="always")
    state.load_state_dict(saved["state"])
    state._registry.buffer("residual", torch.device("cpu"))
    found = state.state_dict()["residuals"].values()
    now = torch.cat([r.flatten() for r in found])
    dist.all_reduce(now)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    losses = [train_step(ddp, optimizer, rank, step) for step in range(8, 30)]
    result = {
        "same": rank == 2 or torch.allclose(owed, now, rtol=1e-5, atol=1e-7),
        "losses": losses,
        "parameters": flat(net),
        "iteration": state.iteration,
    }
    state.close()
    return result


def compiled(rank: int, ranks: int, mode: str) -> dict[str, Any]:
    """Trains a compiled DDP module; the graph is cut at buckets, and the hook is DDP's."""
    import torch._dynamo

    torch._dynamo.reset()
    # Larger than the first bucket's megabyte, below which DDPOptimizer does not go.
    net = network(600)
    ddp = DistributedDataParallel(net, bucket_cap_mb=1.1)
    state = hipress_torch.register(ddp, plan="always")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    with torch._dynamo.config.patch(optimize_ddp=mode):
        # What cuts the graph is dynamo: a back end that compiles would only cost time.
        model = torch.compile(ddp, backend="eager")
        losses = []
        try:
            for step in range(20):
                losses.append(train_step(model, optimizer, rank, step))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    result = {"losses": losses, "parameters": flat(net), "ratio": state.metrics()["ratio"]}
    state.close()
    return result


class Strategy:
    """Does what Lightning's DDPStrategy does with a state and a hook, in its order."""

    def __init__(self, ddp_comm_state: Any = None, ddp_comm_hook: Any = None) -> None:
        self.state, self.hook = ddp_comm_state, ddp_comm_hook

    def setup(self, net: torch.nn.Module) -> DistributedDataParallel:
        model = DistributedDataParallel(net, bucket_cap_mb=0.2)
        model.register_comm_hook(state=self.state, hook=self.hook)
        return model


def lightning(rank: int, ranks: int) -> dict[str, Any]:
    """The form of Lightning: state and hook are made before the process group is used."""
    strategy = Strategy(
        ddp_comm_state=hipress_torch.HiPressState("onebit", plan="always"),
        ddp_comm_hook=hipress_torch.hipress_hook,
    )
    net = network()
    ddp = strategy.setup(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    losses = [train_step(ddp, optimizer, rank, step) for step in range(25)]
    result = {"losses": losses, "parameters": flat(net), "ratio": strategy.state.metrics()["ratio"]}
    strategy.state.close()
    return result


def rolled_back(rank: int, ranks: int, codec: str) -> dict[str, Any]:
    """One rank has a bad value in one layer of one step; compares all residuals around it."""
    net = network()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
    more = {"ratio": 0.02} if codec == "dgc" else {}
    state = hipress_torch.register(ddp, codec=codec, plan="always", rollback=True, **more)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        train_step(ddp, optimizer, rank, step)
    before = state.state_dict()
    x, y = batch_of(rank, 3)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(ddp(x), y)
    if rank == 1:
        # Only the first layer's gradients are bad, which are the last to be exchanged.
        for p in net[0].parameters():
            p.register_hook(lambda g: g * float("inf"))
    loss.backward()
    bad = [not bool(torch.isfinite(p.grad).all()) for p in net.parameters()]
    after = state.state_dict()
    same = all(
        torch.equal(before[kind][n], after[kind][n])
        for kind in ("residuals", "velocities")
        for n in before[kind]
    )
    moved = any(bool(r.any()) for r in before["residuals"].values())
    state.close()
    return {"bad": bad, "same": same, "moved": moved}
