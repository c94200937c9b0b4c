"""Local fine-tuning of a finished global model by emulated clients, to score settings for it.

`fine_tune` is the reference, one client after another; `fine_tune_batched` trains all clients under
all settings at once and must agree with it. Each client is scored on examples of its own kind that
it did not train on.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ._batched import MAX_LANES, final_states, lane_parameters
from ._simulate import Candidate, Emulation, final_state, score, train_client
from ._space import Scalar
from ._task import ProxyTask

if TYPE_CHECKING:
    import torch

Values = dict[str, Scalar]


def global_model(
    task: ProxyTask, emulation: Emulation, candidate: Candidate, rounds: int, *, batched: bool
) -> "dict[str, torch.Tensor]":
    """The global model that training with a candidate ends in."""
    if batched:
        return final_states(task, [(emulation, candidate)], rounds)[0]
    return final_state(task, (emulation, candidate), rounds)


def fine_tune(
    task: ProxyTask, emulation: Emulation, settings: Sequence[Sequence[Values]]
) -> np.ndarray:
    """Own accuracy of each client after fine-tuning `emulation.initial`.

    Args:
        task: how to train and score.
        emulation: has held-out examples; its initial model is the one to start from.
        settings: S settings, each with values for all K clients.

    Returns:
        float64 of shape (S, K).
    """
    scores = np.zeros((len(settings), len(emulation.y)))
    model = task.model_fn()
    for s, values_K in enumerate(settings):
        for k, values in enumerate(values_K):
            model.load_state_dict(emulation.initial)
            train_client(task, emulation, model, k, values, 0)
            scores[s, k] = score(task, model, emulation.x_own[k], emulation.y_own[k])
    return scores


def fine_tune_batched(
    task: ProxyTask, emulation: Emulation, settings: Sequence[Sequence[Values]]
) -> np.ndarray:
    """The same as `fine_tune`, up to rounding, for tasks that can be batched."""
    clients = len(emulation.y)
    everyone = replace(emulation, per_round=clients)
    at_once = max(1, MAX_LANES // clients)
    parts = []
    for first in range(0, len(settings), at_once):
        part = settings[first : first + at_once]
        runs = [(everyone, Candidate(tuple(values), np.zeros(clients))) for values in part]
        forward, trained = lane_parameters(task, runs)
        scores = np.zeros((len(part), clients))
        for k in range(clients):
            lanes = {name: value[k::clients] for name, value in trained.items()}
            x = emulation.x_own[k]
            right = forward(lanes, x.expand(len(part), *x.shape)).argmax(dim=2)
            scores[:, k] = (right == emulation.y_own[k]).double().mean(dim=1).numpy()
        parts.append(scores)
    return np.concatenate(parts)
