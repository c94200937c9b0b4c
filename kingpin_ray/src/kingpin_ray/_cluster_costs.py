"""Measures what Ray and the sums between its actors cost here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._costs import ClusterCosts
from kingpin_ray._session import actor_count, ray_is_running, ray_session
from kingpin_ray._split_driver import assemble_team, dismiss

if TYPE_CHECKING:
    from collections.abc import Callable

_SMALL, _LARGE = 1, 1 << 19
_ROUNDS = 20
_SHIPPED = 32 << 20


def measure_cluster(num_actors: int) -> ClusterCosts:
    """Returns the costs, from actors that are started for it; Ray too, where none runs.

    Args:
        num_actors: how many.

    Raises:
        ResourceError: the cluster lacks the CPUs.
        MissingDependencyError: PyTorch is not installed.
    """
    running = ray_is_running()
    began = time.perf_counter()
    with ray_session(num_actors) as ray:
        up = time.perf_counter() - began
        count = actor_count(ray, num_actors, num_actors)
        began = time.perf_counter()
        team = assemble_team(ray, count)
        try:
            teamed = time.perf_counter() - began
            small, large = (
                max(ray.get([actor.time_sums.remote(size, _ROUNDS) for actor in team]))
                for size in (_SMALL, _LARGE)
            )
            ship = _seconds(lambda: _ship(ray, team[0]))
        finally:
            dismiss(ray, team)
    default = ClusterCosts()
    hops = 2.0 * (count - 1) / count
    more = max(large - small, 0.0) / (8 * (_LARGE - _SMALL) * hops) if count > 1 else 0.0
    # Actors without a team start sooner than those that must find each other; its time is halved.
    return ClusterCosts(
        start_s=default.start_s if running else up + teamed / 2,
        running_s=teamed / 2,
        team_s=teamed / 2,
        exchange_s=small,
        byte_s=more,
        ship_s=ship / _SHIPPED,
    )


def _ship(ray: Any, actor: Any) -> None:
    ray.get(actor.take.remote(ray.put(np.zeros(_SHIPPED // 8))))


def _seconds(call: Callable[[], None]) -> float:
    """Returns the seconds of the second call: the first one meets fresh pages."""
    call()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
