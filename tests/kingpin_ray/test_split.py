"""Groups split over workers give the models of whole groups; workers are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kingpin_ray import MLP, GroupedEstimator, Linear, Logistic, Ridge
from kingpin_ray._driver import make_chunks
from kingpin_ray._gap import fit_split
from kingpin_ray._prepare import prepare
from tests.kingpin_ray.data import FEATURES, grouped_frame


class Threads:
    """The exchange of `_gap.Exchange` between threads of one process."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.slots: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=150)

    def of(self, rank: int) -> Any:
        return Rank(self, rank)


class Rank:
    def __init__(self, team: Threads, rank: int) -> None:
        self.team, self.rank, self.world = team, rank, team.world

    def gather(self, values: np.ndarray) -> list[np.ndarray]:
        self.team.slots[self.rank] = np.array(values)
        self.team.barrier.wait()
        found = list(self.team.slots)
        self.team.barrier.wait()
        return found

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return self.add(values)

    def add(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(sum(self.gather(values)))


CASES = [
    (Linear(), "value", None, 1e-7),
    (Linear(fit_intercept=False), "value", None, 1e-6),
    (Ridge(), "value", {"alpha": [0.1, 10.0]}, 1e-7),
    (Logistic(), "label", {"C": [0.1, 10.0]}, 1e-6),
    (Logistic(), "colour", None, 1e-6),
    (MLP((8,), lr=0.01, batch_size=16, epochs=3), "colour", None, 2e-3),
    (
        MLP(
            (8,),
            lr=0.05,
            batch_size=16,
            epochs=9,
            early_stopping=True,
            validation_fraction=0.3,
            n_iter_no_change=2,
        ),
        "colour",
        None,
        5e-3,
    ),
    (MLP((5,), epochs=2, loss="mse_loss"), "value", {"lr": [1e-3, 1e-2]}, 5e-3),
]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("spec", "target", "grid", "tolerance"), CASES, ids=lambda v: str(v)[:25])
def test_split_groups_equal_whole_ones(
    spec: Any, target: str, grid: Any, tolerance: float, world: int
) -> None:
    frame = grouped_frame(n_groups=9, rows=(1, 90))
    frame.loc[frame.key == "g004", "colour"] = "red"
    frame.loc[frame[frame.key == "g005"].index[:2], "x1"] = np.nan
    estimator = GroupedEstimator(
        spec, "key", target, FEATURES, grid, cv=2, plan="local", random_state=4, min_rows=3,
        fallback=None,
    )  # fmt: skip
    whole = estimator.fit(frame)
    with ExitStack() as session:
        run = prepare(estimator, frame, None, None, 4, session)
    (chunk,) = make_chunks(run.frame.counts)
    team = Threads(world)
    with ThreadPoolExecutor(world) as pool:
        outcomes = list(
            pool.map(
                lambda rank: fit_split(
                    run.frame.part(chunk.groups, rank, world), run.task, team.of(rank)
                ),
                range(world),
            )
        )
    for other in outcomes[1:]:
        assert other.results.drop(["seconds"]).equals(outcomes[0].results.drop(["seconds"]))
        for name, values in outcomes[0].stack.items():
            np.testing.assert_array_equal(values, other.stack[name])
    first = outcomes[0].results.sort_by([(n, "ascending") for n in ("group", "config", "fold")])
    drop = ["seconds", "plan", "score", "config", "params", "key"]
    expected = whole.results_
    kept = [name for name in expected.column_names if name not in drop]
    assert first.select(kept).equals(expected.select(kept))
    scores = [t.column("score").to_numpy(zero_copy_only=False) for t in (expected, first)]
    np.testing.assert_allclose(*scores, rtol=50 * tolerance, atol=50 * tolerance)
    block = run.frame.block(outcomes[0].groups)
    owner = block.group_of_row()
    got = spec.predict(outcomes[0].stack, block.X, owner, block.n_classes)
    served = whole._served
    want = spec.predict(served.stack, block.X, served.slot[block.groups][owner], block.n_classes)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=100 * tolerance)
