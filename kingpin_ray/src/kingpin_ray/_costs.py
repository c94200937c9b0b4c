"""What training costs: seconds of a fit, of an exchange between workers, of Ray itself."""

from __future__ import annotations

import numbers
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kingpin_ray._blocks import Block, offsets_of
from kingpin_ray._errors import ParameterError
from kingpin_ray._parameters import seed_of
from kingpin_ray.models._base import GroupModel

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Costs:
    """What one fit costs on one core of this machine.

    Attributes:
        row_s: seconds per row and feature (with four more features for what is not per feature).
        group_s: seconds per group on top of its rows.
    """

    row_s: float
    group_s: float


@dataclass(frozen=True)
class ClusterCosts:
    """What Ray and the exchange between its actors cost, in seconds.

    The defaults were measured on 2 cores: Ray up 2.7 to 3.7 s, its actors 1.3 s, its end 1.1 s;
    a small gloo sum 0.3 ms, a large one 24 ms for 4 MB; blocks into the object store 1 GB/s.

    Attributes:
        start_s: Ray is started, and its actors.
        running_s: actors in a Ray that runs already.
        team_s: workers that split groups find each other.
        exchange_s: one sum over all workers, however small.
        byte_s: one more byte of a sum.
        ship_s: one byte of a block to a worker.
    """

    start_s: float = 6.0
    running_s: float = 0.5
    team_s: float = 1.0
    exchange_s: float = 3e-4
    byte_s: float = 6e-9
    ship_s: float = 1e-9


_measured: dict[str, Costs] = {}
_measured_cluster: list[ClusterCosts] = []


def cluster_costs() -> ClusterCosts:
    """Returns what `calibrate` measured of Ray, or else the defaults."""
    return _measured_cluster[-1] if _measured_cluster else ClusterCosts()


def calibrate(
    model: GroupModel, n_features: int = 20, seed: int = 0, num_actors: int | None = None
) -> Costs:
    """Measures what a fit of `model` costs here; `plan="auto"` and `explain` use it from then on.

    Many small groups of generated rows are fitted, then a few large ones; two measurements give
    the two costs. It takes about a second for the linear models.

    Args:
        model: the model, with the parameters it will be used with.
        n_features: features of the generated rows.
        seed: seed of the rows.
        num_actors: actors to start, in order to measure Ray, the sums between its actors and what
            it takes to send them rows, too; None leaves those as they are.

    Raises:
        ParameterError: an argument is not allowed.
        ResourceError: the Ray cluster lacks the CPUs.
        MissingDependencyError: PyTorch, by which actors exchange sums, is not installed.
    """
    if num_actors is not None and (not isinstance(num_actors, numbers.Integral) or num_actors < 1):
        raise ParameterError(f"num_actors={num_actors!r}: give a whole number of at least 1")
    if not isinstance(model, GroupModel):
        raise ParameterError(
            f"model={model!r}: give a model of kingpin_ray.models, such as Ridge()"
        )
    if not isinstance(n_features, numbers.Integral) or n_features < 1:
        raise ParameterError(f"n_features={n_features!r}: give a whole number of at least 1")
    rng = np.random.default_rng(seed_of(seed))
    shapes = ((400, 25), (10, 4000))
    seconds = []
    for groups, rows in shapes:
        X = rng.normal(size=(groups * rows, n_features))
        signal = X[:, 0] + rng.normal(size=len(X))
        y: NDArray[np.generic] = signal
        if model.classifier:
            y = (signal > 0).astype(np.int64)
        zeros = np.zeros(groups, np.int64)
        block = Block(
            X, y, offsets_of(np.full(groups, rows)), np.arange(groups), zeros.astype(np.uint64),
            2 if model.classifier else 0, zeros, zeros,
        )  # fmt: skip
        model.fit(block.select(np.arange(2)), [{}])  # libraries load outside the clock
        began = time.perf_counter()
        model.fit(block, [{}])
        seconds.append(time.perf_counter() - began)
    system = np.array([[groups * rows, groups] for groups, rows in shapes], float)
    row, group = np.maximum(np.linalg.solve(system, np.array(seconds)), 1e-12)
    costs = Costs(float(row) / (n_features + 4), float(group))
    _measured[_name(model)] = costs
    if num_actors is not None:
        from kingpin_ray._cluster_costs import measure_cluster

        _measured_cluster.append(measure_cluster(int(num_actors)))
    return costs


def _name(model: GroupModel) -> str:
    return repr(model)


def fit_seconds(
    model: GroupModel, counts: NDArray[np.int64], n_features: int, fits: int
) -> NDArray[np.float64]:
    """Returns (G,) the seconds that one core needs for each group, fitted `fits` times."""
    known = _measured.get(_name(model))
    if known is not None:
        row_s, group_s = known.row_s * (n_features + 4), known.group_s
    else:
        row_s, group_s = model.cost(n_features)
    return np.asarray(fits * (counts * row_s + group_s))


def exchange_seconds(
    model: GroupModel,
    counts: NDArray[np.int64],
    n_features: int,
    n_classes: int,
    fits: int,
    workers: int,
    cluster: ClusterCosts,
) -> NDArray[np.float64]:
    """Returns (G, 2) seconds of the exchanges of each group, were it split over the workers.

    The first column is for being asked at all, which groups that are split together share; the
    second for the group's own bytes.
    """
    rounds, floats = model.exchanges(counts, n_features, n_classes)
    hops = 2.0 * (workers - 1) / workers
    sent = 8.0 * np.asarray(floats, float) * rounds * hops
    shared = fits * np.asarray(rounds, float) * cluster.exchange_s
    return np.stack(
        [np.broadcast_to(shared, counts.shape), np.broadcast_to(sent, counts.shape) * fits
         * cluster.byte_s], axis=1
    )  # fmt: skip
