"""A policy against simple rivals, on emulated federations that nothing was tuned on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ._batched import can_batch, simulate_batched
from ._cube import PolicyCube
from ._emulate import Emulator
from ._metrics import as_matrix
from ._policy import WEIGHT, Policy
from ._simulate import candidate, simulate
from ._threads import intra_op_threads


@dataclass(frozen=True)
class Arm:
    """One way to choose hyperparameters, and how it fared.

    Attributes:
        name: what it does.
        scores: its score in each emulation.
        difference: mean of the policy's score minus this one's.
        standard_error: of that difference, paired by emulation.
    """

    name: str
    scores: tuple[float, ...]
    difference: float
    standard_error: float


def rivals(policy: Policy, metrics: Sequence[Mapping[str, float]]) -> dict[str, Policy]:
    """The policy and what it has to beat, all with its values for the client that gets most."""
    most = {n: float(c.max()) for n, c in policy.coordinates_many(as_matrix(metrics)).items()}
    plain = replace(policy.scaled(0.0), base=most)
    cube = PolicyCube(policy.space, policy.scaler, weight=True)
    by_loss = {p: s for p, s in cube.prior.items() if p == (WEIGHT, "reference-loss")}
    return {
        "policy": policy,
        "its values for all": plain,
        "for all, weights n": replace(plain, weight_exponent=1.0),
        "for all, equal weights": replace(plain, weight_exponent=0.0),
        "for all, weights n exp(-1.5 loss)": replace(
            plain, weight_exponent=1.0, slopes=by_loss, centroids=()
        ),
    }


def compare(
    policy: Policy,
    emulator: Emulator,
    metrics: Sequence[Mapping[str, float]],
    *,
    emulations: int = 8,
    rounds: int = 20,
    fraction: float = 1.0,
) -> list[Arm]:
    """Scores the policy and its rivals on the same fresh emulations, the policy first.

    Args:
        policy: what to judge.
        emulator: makes the federations; its proxy task scores them.
        metrics: what the clients reported.
        emulations: how many, at least 2.
        rounds: length of each.
        fraction: share of the clients that train in a round.

    Raises:
        ProxyError: the proxy cannot emulate these clients, or would ignore a hyperparameter.
    """
    emulator.task.check_space(policy.space)
    arms = rivals(policy, metrics)
    with intra_op_threads(1):
        # Numbers that neither tuning nor its confirmation uses.
        fresh = [emulator.emulate(metrics, 5000 + i, fraction) for i in range(emulations)]
        runs = [(e, candidate(p, e)) for p in arms.values() for e in fresh]
        run = simulate_batched if can_batch(emulator.task) else simulate
        curves = run(emulator.task, runs, rounds, max(1, rounds // 5))
    scores_AE = curves.mean(axis=1).reshape(len(arms), len(fresh))
    result = []
    for name, own in zip(arms, scores_AE, strict=True):
        gap = scores_AE[0] - own
        error = float(np.std(gap, ddof=1) / math.sqrt(len(gap)))
        result.append(Arm(name, tuple(own.tolist()), float(gap.mean()), error))
    return result
