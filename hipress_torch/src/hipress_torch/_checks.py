"""Checks of arguments and of state dicts, before anything is changed."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hipress_torch._errors import PlanError, StateError


def check_arguments(
    process_group: object, error_feedback: object, seed: object, timeout_s: object = None
) -> None:
    """Checks what all states take.

    Raises:
        PlanError: an argument is of another type, or out of its range.
    """
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise PlanError(
            f"process_group must be a torch.distributed process group that this rank is in, or "
            f"None, got {process_group!r}"
        )
    if error_feedback is not None and not isinstance(error_feedback, bool):
        raise PlanError(f"error_feedback must be True, False or None, got {error_feedback!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise PlanError(f"seed must be a whole number, got {seed!r}")
    if timeout_s is None:
        return
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    # A year: what torch is given must fit its own type.
    if not number or not 0 < timeout_s <= 3.2e7:  # type: ignore[operator]
        raise PlanError(
            f"timeout_s must be more than 0 seconds and at most a year, or None, got {timeout_s!r}"
        )


def check_state(state: object, needed: tuple[str, ...], version: int, seed: int) -> None:
    """Checks what all state dicts have.

    Raises:
        StateError: it is no state dict, lacks a key, or is of another version or seed.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"state dict: got {type(state).__name__}; pass what state_dict() returned")
    missing = [k for k in ("version", "seed", *needed) if k not in state]
    if missing:
        raise StateError(
            f"state dict: {', '.join(missing)} missing; pass what state_dict() returned"
        )
    if state["version"] != version:
        raise StateError(
            f"state dict: version {state['version']!r}, this release reads {version}; "
            f"load it with the release that wrote it"
        )
    if state["seed"] != seed:
        raise StateError(
            f"state dict: seed {state['seed']}, but this state has seed {seed}; make "
            f"it with seed={state['seed']} so that random rounding goes on as it would have"
        )


def saved_count(value: object, what: str) -> int:
    """Returns a saved number of iterations.

    Raises:
        StateError: it is no whole number of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateError(f"state dict: {what} must be a whole number from 0, got {value!r}")
    return value


def saved_mapping(value: object, what: str) -> Mapping[str, Any]:
    """Returns a saved mapping by name.

    Raises:
        StateError: it is something else.
    """
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise StateError(f"state dict: {what} must be a dict by name, got {type(value).__name__}")
    return value


def saved_tensors(value: object, what: str) -> Mapping[str, torch.Tensor]:
    """Returns saved tensors by name.

    Raises:
        StateError: it is something else.
    """
    found = saved_mapping(value, what)
    for name, tensor in found.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise StateError(
                f"state dict: {what} of {name!r} must be a tensor of floats, got "
                f"{type(tensor).__name__}"
            )
    return found


def is_time(value: object) -> bool:
    """Returns whether a value can be a time: a finite number of at least 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0  # type: ignore[operator,arg-type]
