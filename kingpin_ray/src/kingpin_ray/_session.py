"""Borrows a running Ray, or starts one and takes all of it away again."""

from __future__ import annotations

import logging
import os
import tempfile
import time
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from kingpin_ray._errors import ResourceError
from kingpin_ray._folders import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

# A socket's path may have 107 characters; Ray adds about 75 to its folder.
_LONGEST_FOLDER = 28
_FOLDER_PREFIX = "kpr-"
# Seconds to wait for more CPUs when none is free, and when some are.
_PATIENCE_S = (5.0, 1.0)


def ray_is_running() -> bool:
    """Returns whether this process is connected to Ray, without importing it."""
    import sys

    ray = sys.modules.get("ray")
    return bool(ray is not None and ray.is_initialized())


@contextmanager
def ray_session(num_cpus: int | None) -> Iterator[Any]:
    """Yields the `ray` module, connected.

    A Ray that runs already is used as it is and left running. Otherwise one is started (or the
    cluster that RAY_ADDRESS names is joined), and shut down at the end with its folder.

    Args:
        num_cpus: CPUs of a Ray that is started here; None for all of the machine.
    """
    import ray

    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {}
    with ExitStack() as session:
        if not os.environ.get("RAY_ADDRESS"):
            base = tempfile.gettempdir()
            if len(base) > _LONGEST_FOLDER and os.name == "posix":
                base = "/tmp"
            folder = session.enter_context(temporary_folder(_FOLDER_PREFIX, base))
            options = {"_temp_dir": folder, "include_dashboard": False}
            if num_cpus is not None:
                options["num_cpus"] = num_cpus
        with warnings.catch_warnings():
            # Ray 2.55 announces a change of its CUDA_VISIBLE_DEVICES rule; no GPU is asked for.
            warnings.filterwarnings("ignore", message="Tip: In future versions of Ray")
            ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
        session.callback(ray.shutdown)
        yield ray


def _free_cpus(ray: Any, wanted: int) -> int:
    """Returns the free CPUs; waits a little, as those of an ended actor come back with a delay."""
    began = time.monotonic()
    while True:
        free = int(ray.available_resources().get("CPU", 0))
        patience = _PATIENCE_S[min(free, 1)]
        if free >= wanted or time.monotonic() - began > patience:
            return free
        time.sleep(0.05)


def actor_count(ray: Any, asked: int | None, useful: int) -> int:
    """Returns how many one-CPU actors to start.

    Ray waits without a word for actors that can never start, so this counts first.

    Args:
        ray: the module, connected.
        asked: the user's `num_actors`, or None.
        useful: more than this many would have nothing to do.

    Raises:
        ResourceError: there are not that many CPUs, or none is free.
    """
    total = int(ray.cluster_resources().get("CPU", 0))
    free = _free_cpus(ray, min(asked or total, total, useful))
    if asked is not None and asked > total:
        raise ResourceError(
            f"num_actors={asked}, but the Ray cluster has {total} CPUs and each actor takes one; "
            f"ask for at most {total}, or leave num_actors out"
        )
    if free < 1:
        raise ResourceError(
            f"all {total} CPUs of the Ray cluster are taken by other tasks or actors; free one, "
            'add a node, or use plan="local"'
        )
    if asked is not None and asked > free:
        raise ResourceError(
            f"num_actors={asked}, but only {free} of the cluster's {total} CPUs are free; "
            "ask for fewer actors, or free the others"
        )
    return max(1, min(asked or free, useful))
