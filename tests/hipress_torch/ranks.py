"""What the processes of the distributed tests run."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hipress_torch
from hipress_torch import HiPressState, _state
from hipress_torch._inline import InlineEngine
from hipress_torch._plan import Term


def network(width: int = 300) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 5),
    )


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 20, generator=g)
    return x, (x[:, :5] * 2).argmax(1)


def train_step(
    ddp: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
) -> float:
    x, y = batch_of(rank, step)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(ddp(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def flat(module: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def train(
    rank: int, ranks: int, codec: str | None, steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Trains for some steps; counts the bytes given to every collective."""
    sent: list[tuple[str, str, int]] = []
    originals = {}
    for name in ("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_reduce"):
        if not hasattr(dist, name):
            continue
        original = originals[name] = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            tensor = args[0] if _name == "all_reduce" else args[1]
            sent.append((_name, str(tensor.dtype), tensor.numel() * tensor.element_size()))
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
    net = network()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.2, **options.pop("ddp", {}))
    options.setdefault("plan", "always")
    state = None if codec is None else hipress_torch.register(ddp, codec=codec, **options)
    sent.clear()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    losses = [train_step(ddp, optimizer, rank, step) for step in range(steps)]
    for name, original in originals.items():
        setattr(dist, name, original)
    result = {"losses": losses, "parameters": flat(net), "sent": sent}
    if state is not None:
        result["metrics"] = state.metrics()
        state.close()
    return result


def mismatched(rank: int, ranks: int, options: list[dict[str, Any]]) -> str:
    ddp = DistributedDataParallel(network())
    try:
        hipress_torch.register(ddp, timeout_s=120, **options[rank])
    except hipress_torch.HiPressError as error:
        return f"{type(error).__name__}: {error}"
    return "registered"


def register_twice(rank: int, ranks: int) -> str:
    ddp = DistributedDataParallel(network())
    hipress_torch.register(ddp)
    try:
        hipress_torch.register(ddp)
    except hipress_torch.RegistrationError as error:
        return str(error)
    return "registered"


def lose_a_peer(rank: int, ranks: int, how: int, timeout_s: float) -> tuple[str, str, float]:
    """The last rank kills or stops itself in the third step; returns what the others see."""
    net = network()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    began = time.monotonic()
    try:
        hipress_torch.register(ddp, timeout_s=timeout_s, plan="always")
        for step in range(4):
            if step == 2 and rank == ranks - 1:
                os.kill(os.getpid(), how)
            began = time.monotonic()
            train_step(ddp, optimizer, rank, step)
    except Exception as error:
        told = (type(error).__name__, str(error), time.monotonic() - began)
    else:
        told = ("nothing", "", 0.0)
    return told


def not_finite(rank: int, ranks: int, value: float, strategy: str = "ps") -> dict[str, Any]:
    """One rank has a bad value in one step; returns residuals around it and what all ranks got."""
    net = network()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
    state = hipress_torch.register(ddp, plan="always", strategy=strategy)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        train_step(ddp, optimizer, rank, step)
    residuals = state._registry.buffer("residual", torch.device("cpu"))
    before = residuals.clone()
    x, y = batch_of(rank, 3)
    if rank == 1:
        x[0, 0] = value
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(ddp(x), y).backward()
    bad = [not bool(torch.isfinite(p.grad).all()) for p in net.parameters()]
    moved, size = 0.0, 0.0
    for known, b in zip(state._registry.known, bad, strict=True):
        at = slice(known.residual, known.residual + known.count)
        if b:
            moved = max(moved, float((residuals[at] - before[at]).abs().max()))
            size = max(size, float(before[at].abs().max()))
    result = {"bad": bad, "moved": moved, "size": size}
    result["finite"] = bool(torch.isfinite(residuals).all())
    state.close()
    return result


def raw_hook(rank: int, ranks: int, dtype: str) -> dict[str, Any]:
    """The state made before the group is known and registered by hand, on another dtype."""
    state = HiPressState("onebit", plan="always")
    net = network().to(getattr(torch, dtype))
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(state, hipress_torch.hipress_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for step in range(30):
        x, y = batch_of(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(x.to(net[0].weight.dtype)), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    result = {"losses": losses, "parameters": flat(net), "metrics": state.metrics()}
    state.close()
    return result


def continued(
    rank: int, ranks: int, codec: str, folder: str, caps: tuple[float, float]
) -> dict[str, Any]:
    """Trains 8 steps in one go, and again with a restart from files in the middle."""

    def start(cap: float, path: str | None) -> tuple[Any, ...]:
        net = network()
        if path is not None:
            saved = torch.load(path, weights_only=True)
            net.load_state_dict(saved["net"])
        ddp = DistributedDataParallel(net, bucket_cap_mb=cap)
        more = {"ratio": 0.01, "warmup": 6} if codec == "dgc" else {}
        state = hipress_torch.register(ddp, codec=codec, seed=5, plan="always", **more)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)
        if path is not None:
            state.load_state_dict(saved["state"])
            optimizer.load_state_dict(saved["optimizer"])
        return net, ddp, state, optimizer

    net, ddp, state, optimizer = start(caps[0], None)
    for step in range(8):
        train_step(ddp, optimizer, rank, step)
        if step == 3:
            path = os.path.join(folder, f"{codec}{rank}.pt")
            saved = {
                "net": net.state_dict(),
                "state": state.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(saved, path)
    whole = flat(net)
    residuals = state.state_dict()["residuals"]
    state.close()
    net, ddp, state, optimizer = start(caps[1], path)
    for step in range(4, 8):
        train_step(ddp, optimizer, rank, step)
    after = state.state_dict()
    same = all(torch.equal(residuals[n], after["residuals"][n]) for n in residuals)
    trace = os.path.join(folder, f"trace{rank}.json")
    state.trace(trace)
    state.close()
    return {
        "equal": whole == flat(net),
        "residuals": same and len(residuals) == (0 if codec == "terngrad" else 6),
        "iteration": after["iteration"],
        "trace": trace,
    }


def features(rank: int, ranks: int, feature: str) -> dict[str, Any]:
    """Trains with one of DDP's features, plainly and compressed; returns both."""
    found = {}
    for codec in ("none", "onebit"):
        torch.manual_seed(0)
        net: torch.nn.Module = network()
        options: dict[str, Any] = {"bucket_cap_mb": 0.2}
        if feature == "unused":
            net = Branches()
            options["find_unused_parameters"] = True
        elif feature == "static_graph":
            options["static_graph"] = True
        elif feature == "bucket_view":
            options["gradient_as_bucket_view"] = True
        elif feature == "sparse":
            net = Words()
        ddp = DistributedDataParallel(net, **options)
        state = hipress_torch.register(ddp, codec=codec, plan="always")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        losses = []
        if feature == "join":
            with ddp.join():
                for step in range(10 + 5 * rank):
                    losses.append(train_step(ddp, optimizer, rank, step))
        else:
            for step in range(30):
                if feature == "no_sync" and step % 3:
                    with ddp.no_sync():
                        x, y = batch_of(rank, step)
                        loss = torch.nn.functional.cross_entropy(ddp(x), y)
                        loss.backward()
                        losses.append(float(loss.detach()))
                elif feature == "no_sync":
                    x, y = batch_of(rank, step)
                    loss = torch.nn.functional.cross_entropy(ddp(x), y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(float(loss.detach()))
                else:
                    losses.append(train_step(ddp, optimizer, rank, step))
        found[codec] = {
            "losses": losses,
            "parameters": flat(net),
            "iterations": state.metrics()["iterations"],
        }
        state.close()
    return found


class Branches(torch.nn.Module):
    """Uses one of two branches, by the step."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.step = network(), network(200), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        chosen: torch.nn.Module = self.left if self.step % 2 else self.right
        return chosen(x)


class Words(torch.nn.Module):
    """Has an embedding with sparse gradients in front."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 20, sparse=True)
        self.net = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x + self.table((x[:, 0].abs() * 10).long().clamp(max=49)))


def planned(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Trains with the default plan; returns what was planned and measured."""
    net = network()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
    state = hipress_torch.register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        train_step(ddp, optimizer, rank, step)
    assert isinstance(state.plan, hipress_torch.Plan)
    profile = state.plan.profile
    result = {
        "profile": profile.to_dict(),
        "explained": state.explain(),
        "parameters": flat(net),
        "saved": state.state_dict()["plan"],
    }
    state.close()
    # A profile of another network, given by hand: everything is compressed.
    slow = hipress_torch.Profile(
        ranks,
        {name: Term(t.floor_s, t.offset_s, 1e-5) for name, t in profile.collectives.items()},
        profile.codecs,
    )
    net = network()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
    state = hipress_torch.register(ddp, plan=hipress_torch.Plan(slow, ("onebit",)))
    for step in range(4):
        train_step(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank, step)
    result["slow"] = state.explain()
    result["ratio"] = state.metrics()["ratio"]
    state.close()
    return result


def sharded(rank: int, ranks: int, kind: str, codec: str | None) -> dict[str, Any]:
    """Trains with FSDP, plainly or compressed; returns losses and what was sent."""
    net = network()
    state = None
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        fully_shard(net[2], mesh=mesh)
        model: torch.nn.Module = fully_shard(net, mesh=mesh)
        if codec is not None:
            state = hipress_torch.apply_fsdp(model, codec=codec)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
        if codec is not None:
            state = hipress_torch.FSDPState(codec)
            model.register_comm_hook(state, hipress_torch.fsdp1_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [train_step(model, optimizer, rank, step) for step in range(30)]
    result: dict[str, Any] = {"losses": losses}
    if state is not None:
        result["metrics"] = state.metrics()
        result["saved"] = sorted(state.state_dict()["residuals"])
        again = hipress_torch.FSDPState(codec or "none")
        again.load_state_dict(state.state_dict())
    return result


def inline(rank: int, ranks: int, codec: str, device: str, value: float) -> dict[str, Any]:
    """Trains with the engine that GPUs use; a bad value in the last step if ``value`` is one."""
    if device == "cpu":
        original = _state.Engine
        _state.Engine = InlineEngine  # type: ignore[misc,assignment]
    try:
        net = network().to(device)
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
        more = {"ratio": 0.02} if codec == "graddrop" else {}
        state = hipress_torch.register(ddp, codec=codec, plan="always", **more)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        losses = []
        for step in range(12):
            x, y = batch_of(rank, step)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        parameters = flat(net)
        x, y = batch_of(rank, 12)
        if rank == 1:
            x[0, 0] = value
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(x.to(device)), y.to(device)).backward()
        bad = [not bool(torch.isfinite(p.grad).all()) for p in net.parameters()]
        residual = state._registry.buffer("residual", torch.device(device))
        result = {
            "losses": losses,
            "parameters": parameters,
            "bad": bad,
            "finite": bool(torch.isfinite(residual).all()),
            "ratio": state.metrics()["ratio"],
        }
        state.close()
    finally:
        if device == "cpu":
            _state.Engine = original  # type: ignore[misc]
    return result


def scaled(rank: int, ranks: int) -> dict[str, Any]:
    """Trains with a loss scale that overflows on rank 1 alone at first."""
    net = network()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
    state = hipress_torch.register(ddp, plan="always")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales, losses = [], []
    for step in range(20):
        x, y = batch_of(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        if step == 3 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(float(loss.detach()))
    result = {"scales": scales, "losses": losses, "parameters": flat(net)}
    result["not_finite"] = state.metrics()["not_finite"]
    state.close()
    return result
