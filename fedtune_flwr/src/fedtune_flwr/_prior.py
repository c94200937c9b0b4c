"""The rules that stand in for a tuned policy where nothing can be tuned."""

from collections.abc import Sequence
from typing import Any

from flwr.app import ConfigRecord

from ._cube import PolicyCube
from ._errors import SpaceError
from ._metrics import Scaler, as_matrix
from ._policy import Policy
from ._space import SearchSpace


def prior_policy(
    space: SearchSpace,
    metrics: Sequence[dict[str, float]],
    config: ConfigRecord | dict[str, Any],
    *,
    weight: bool,
) -> Policy:
    """Rules for when nothing can be tuned: the config's values, moved by the prior slopes.

    Args:
        space: hyperparameters.
        metrics: what clients reported; empty gives every client the same values.
        config: values the median client gets, where they are inside the space; the middle of the
            space elsewhere.
        weight: whether aggregation weights may change.
    """
    base = {}
    for name, dimension in space.items():
        try:
            base[name] = dimension.coordinate(config[name])  # type: ignore[arg-type]
        except (KeyError, SpaceError):
            base[name] = sum(dimension.bounds) / 2
    scaler = Scaler.fit(as_matrix(metrics))
    if not metrics:
        return Policy(space, base, scaler, origin="default")
    cube = PolicyCube(space, scaler, weight=weight)
    slopes = {pair: slope for pair, slope in cube.prior.items() if slope}
    return Policy(space, base, scaler, slopes, 1.0, "prior")
