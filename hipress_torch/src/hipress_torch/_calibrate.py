"""Measures what a plan needs to know: the network's collectives and the codecs' kernels."""

import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hipress_torch._codec import Batch, Codec, Segment
from hipress_torch._groups import all_gather_flat, guarded, require_group, wire_device
from hipress_torch._making import make_codec
from hipress_torch._plan import Profile, Term
from hipress_torch._ring import send_round

BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
ELEMENTS = (1 << 12, 1 << 18)
ROUNDS = 3


def calibrate(
    process_group: dist.ProcessGroup | None = None,
    *,
    codecs: Sequence[str | Codec] = ("onebit", "fp16"),
    budget_s: float = 2.0,
    device: torch.device | str = "cpu",
) -> Profile:
    """Returns the measured profile of a group; every rank of it gets the same.

    Every rank must call it, with nothing else under way on the group. Sizes grow from 4 KB to 4 MB
    while they are within the budget.

    Args:
        process_group: the group; the default one if None.
        codecs: codecs to time, beside plain all-reduce.
        budget_s: about how many seconds the network may be probed.
        device: where the gradients will be: times the kernels of that device.

    Raises:
        UnsupportedError: torch.distributed is not initialized.
        UnknownCodecError: a codec is not installed.
        PeerError: another rank failed or did not come in time.
    """
    group = require_group(process_group)
    ranks = group.size()
    where = torch.device(device)
    wire = wire_device(group, where)
    collectives, busy = {}, {}
    probes = {"all_reduce": _all_reduce, "all_to_all": _all_to_all, "all_gather": _all_gather}
    # With two ranks a ring is the same exchange; on a GPU there is none.
    if ranks > 2 and where.type == "cpu":
        probes["hop"] = _hop
    for name, run in probes.items():
        taken, worked = _probe(group, run, wire, budget_s / len(probes))
        collectives[name], busy[name] = Term.fit(taken), Term.fit(worked)
    kernels = {}
    for wanted in codecs:
        codec = make_codec(wanted, {}) if isinstance(wanted, str) else wanted
        stages = {
            n: _slowest(group, t, wire) for n, t in _kernel_times(codec, ranks, where).items()
        }
        kernels[codec.name] = {name: Term.fit(points) for name, points in stages.items()}
    # On a GPU the kernels and the network stack do not compete with what the host computes.
    contention = _contention(group) if where.type == "cpu" else 0.0
    return Profile(ranks, collectives, kernels, busy, contention)


def _all_reduce(group: dist.ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    values = torch.zeros(size // 4, device=device)
    return lambda: dist.all_reduce(values, group=group)


def _all_to_all(group: dist.ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    ranks, rank = group.size(), group.rank()
    # `size` bytes in all go to the other ranks, as in the first hop.
    each = max(1, size // max(1, ranks - 1))
    sizes = [0 if r == rank else each for r in range(ranks)]
    given, taken = (torch.zeros(sum(sizes), dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: dist.all_to_all_single(taken, given, sizes, sizes, group=group)


def _all_gather(group: dist.ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    own = torch.zeros(size, dtype=torch.uint8, device=device)
    out = torch.zeros(size * group.size(), dtype=torch.uint8, device=device)
    return lambda: all_gather_flat(out, own, group).wait()


def _hop(group: dist.ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    given, taken = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: send_round(group, given, taken)


def _probe(
    group: dist.ProcessGroup,
    prepare: Callable[[dist.ProcessGroup, int, torch.device], Callable[[], object]],
    device: torch.device,
    budget_s: float,
) -> tuple[dict[int, float], dict[int, float]]:
    """Returns seconds, and processor seconds of all threads, by bytes."""
    points: dict[int, float] = {}
    busy: dict[int, float] = {}
    for size in BYTES:
        run = prepare(group, size, device)
        guarded(run, "calibrate")
        times, worked = [], []
        for _ in range(ROUNDS):
            began, computed = time.perf_counter(), time.process_time()
            guarded(run, "calibrate")
            _finish(device)
            times.append(time.perf_counter() - began)
            worked.append(time.process_time() - computed)
        points.update(_slowest(group, {size: min(times)}, device))
        busy.update(_slowest(group, {size: min(worked)}, device))
        spent = sum(points.values()) * (ROUNDS + 1)
        # The times are the slowest rank's: all ranks stop at the same size.
        if spent + (ROUNDS + 1) * 4 * points[size] > budget_s:
            break
    return points, busy


def _kernel_times(codec: Codec, ranks: int, device: torch.device) -> dict[str, dict[int, float]]:
    """Returns the seconds of each stage by elements."""
    times: dict[str, dict[int, float]] = {"encode": {}, "merge": {}, "decode": {}}
    for count in ELEMENTS:
        for name, seconds in _stage_times(codec, ranks, count, device).items():
            times[name][count] = seconds
    return times


def _stage_times(codec: Codec, ranks: int, count: int, device: torch.device) -> dict[str, float]:
    size = codec.wire_bytes(count)
    batch = Batch((Segment(0, 0, count, 0, 1, 0),))
    grad, out = torch.randn(count, device=device), torch.empty(count, device=device)
    residual = torch.zeros(count, device=device)
    wire = torch.zeros(size, dtype=torch.uint8, device=device)
    incoming = torch.zeros(max(1, ranks - 1), size, dtype=torch.uint8, device=device)
    for row in incoming:
        codec.encode(batch, grad, 1.0, None, None, row, 1)
    stages: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(batch, grad, 1.0, residual, None, wire, 1),
        "merge": lambda: codec.encode(batch, grad, 1.0, residual, incoming, wire, 1),
        "decode": lambda: codec.decode(batch, wire, out),
    }
    best: dict[str, float] = {}
    # One more round, whose first calls compile the kernels, and which is not the best.
    for _ in range(ROUNDS + 1):
        for name, run in stages.items():
            began = time.perf_counter()
            run()
            _finish(device)
            took = time.perf_counter() - began
            best[name] = min(took, best.get(name, took))
    return best


def _contention(group: dist.ProcessGroup) -> float:
    """Returns the seconds this thread loses for each second another one computes, on all ranks."""
    a = torch.randn(384, 384)
    rounds = 12

    def compute() -> float:
        began = time.perf_counter()
        for _ in range(rounds):
            a @ a
        return time.perf_counter() - began

    guarded(lambda: dist.barrier(group=group), "calibrate")
    alone = min(compute() for _ in range(ROUNDS))
    stop, worked = threading.Event(), [0.0]

    def disturb() -> None:
        x, y = torch.randn(1 << 18), torch.empty(1 << 18)
        began = time.thread_time()
        while not stop.is_set():
            # Long enough without the interpreter lock to take a core, as the kernels do.
            torch.mul(x, 2.0, out=y)
        worked[0] = time.thread_time() - began

    helper = threading.Thread(target=disturb, name="hipress-calibrate", daemon=True)
    guarded(lambda: dist.barrier(group=group), "calibrate")
    began = time.perf_counter()
    helper.start()
    disturbed = sum(compute() for _ in range(ROUNDS))
    stop.set()
    helper.join()
    spent = time.perf_counter() - began
    lost = max(0.0, disturbed - ROUNDS * alone)
    found = min(1.0, lost / max(worked[0] * disturbed / spent, 1e-9))
    return _slowest(group, {0: found}, torch.device("cpu"))[0]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(
    group: dist.ProcessGroup, points: dict[int, float], device: torch.device
) -> dict[int, float]:
    """Returns each time as the slowest rank measured it: the same numbers on all ranks."""
    values = torch.tensor(list(points.values()), dtype=torch.float64, device=device)
    guarded(lambda: dist.all_reduce(values, dist.ReduceOp.MAX, group=group), "calibrate")
    return dict(zip(points, values.tolist(), strict=True))
