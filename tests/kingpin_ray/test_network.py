"""Batched networks against plain PyTorch training loops, step by step."""

import copy
from contextlib import ExitStack
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kingpin_ray as kp
from kingpin_ray import MLP, GroupedEstimator, Torch
from kingpin_ray._folds import hold_out
from kingpin_ray._kernels import adam
from kingpin_ray._kernels.networks import Perceptron, UserModule
from kingpin_ray._prepare import prepare
from tests.kingpin_ray.data import FEATURES, grouped_frame


def make_module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def make_regression() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))


def make_batchnorm() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def plain_loop(
    module: torch.nn.Module, rows: pd.DataFrame, target: str, spec: Any, seed: int
) -> torch.nn.Module:
    """What an ordinary user writes for one group."""
    X = rows[FEATURES].to_numpy()
    x = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
    y: Any = rows[target].to_numpy()
    if spec.loss == "cross_entropy":
        y = torch.tensor(np.unique(["blue", "green", "red"], return_inverse=True)[1])[
            [["blue", "green", "red"].index(label) for label in y]
        ]
    else:
        y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]
    loss_of = getattr(torch.nn.functional, spec.loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=spec.lr, weight_decay=spec.weight_decay)
    for epoch in range(spec.epochs):
        for batch in adam.shuffled(seed, epoch, len(rows)).split(spec.batch_size):
            optimizer.zero_grad()
            loss_of(module(x[batch]), y[batch]).backward()
            optimizer.step()
    return module


SPECS = [
    (MLP((8, 5), lr=0.01, batch_size=16, epochs=3), "colour"),
    (MLP((6,), lr=0.02, batch_size=7, epochs=2, weight_decay=0.1, loss="mse_loss"), "value"),
    (MLP((), lr=0.02, batch_size=50, epochs=4), "colour"),
    (Torch(make_module, lr=0.01, batch_size=16, epochs=3), "colour"),
    (Torch(make_regression, "huber_loss", lr=0.01, batch_size=20, epochs=2), "value"),
]


@pytest.mark.parametrize(("spec", "target"), SPECS, ids=lambda v: str(v)[:20])
def test_every_group_equals_a_plain_training_loop(spec: Any, target: str) -> None:
    frame = grouped_frame(n_groups=7, rows=(15, 70))
    model = GroupedEstimator(
        spec, "key", target, FEATURES, plan="local", random_state=3, fallback=None
    ).fit(frame)
    seeds = model._served.keys.seeds(3)
    for g, (key, rows) in enumerate(frame.groupby("key")):
        seed = int(seeds[g] >> np.uint64(2))
        outputs = 3 if target == "colour" else 1
        if isinstance(spec, MLP):
            net = Perceptron((4, *spec.hidden, outputs), spec.loss)
            module: torch.nn.Module = net.module(net.initial(seed))
        else:
            user = UserModule(spec.module_fn, spec.loss)
            module = user.module(user.initial(seed)).train()
        theirs = plain_loop(module, rows, target, spec, seed)
        mine = model.estimators_[key]
        for ours, other in zip(mine[1].parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours, other, atol=2e-4, rtol=2e-3)
        x = torch.tensor(rows[FEATURES].to_numpy(), dtype=torch.float32)
        with torch.no_grad():
            raw = mine(x)
        if target == "colour":
            np.testing.assert_allclose(
                model.predict_proba(rows), torch.softmax(raw, 1).numpy(), atol=1e-4
            )
        else:
            np.testing.assert_allclose(model.predict(rows), raw[:, 0].numpy(), rtol=1e-3, atol=1e-2)


def stopped_loop(
    module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, held: np.ndarray, spec: Any,
    seed: int,
) -> tuple[torch.nn.Module, int]:  # fmt: skip
    """Early stopping as an ordinary user writes it; also returns the epochs that were run."""
    rest = np.flatnonzero(~held)
    optimizer = torch.optim.Adam(module.parameters(), lr=spec.lr)
    lowest, stale, best = np.inf, 0, None
    epoch = 0
    for epoch in range(spec.epochs):
        for batch in adam.shuffled(seed, epoch, len(rest)).split(spec.batch_size):
            rows = rest[batch.numpy()]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(torch.nn.functional.cross_entropy(module(x[held]), y[held]))
        if not held.any() or loss < lowest:
            lowest, stale, best = loss, 0, copy.deepcopy(module)
        else:
            stale += 1
            if stale >= spec.n_iter_no_change:
                break
    return best or module, epoch + 1


def test_early_stopping_equals_that_of_each_group_alone() -> None:
    frame = grouped_frame(n_groups=9, rows=(15, 90))
    frame = frame.drop(frame[frame.key == "g004"].index[2:])  # too few to hold any out
    frame.loc[frame.key == "g004", "colour"] = ["red", "blue"]
    spec = MLP(
        (8,), lr=0.05, batch_size=16, epochs=40, early_stopping=True, validation_fraction=0.25,
        n_iter_no_change=3,
    )  # fmt: skip
    options: dict[str, Any] = {"plan": "local", "random_state": 3, "fallback": None}
    model = GroupedEstimator(spec, "key", "colour", FEATURES, **options).fit(frame)
    with ExitStack() as session:
        run = prepare(model, frame, None, None, 3, session)
    block = run.frame.block(np.arange(9))
    held = hold_out(block, 0.25)
    epochs = []
    for g, key in enumerate(run.frame.keys.keys()):
        rows = slice(int(block.offsets[g]), int(block.offsets[g + 1]))
        watched = np.isin(np.arange(rows.start, rows.stop), held.order[held.middle[g] : rows.stop])
        assert watched.any() == (key != "g004")
        X = block.X[rows]
        x = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
        y = torch.from_numpy(block.y[rows].astype(np.int64))
        seed = int(block.seeds[g] >> np.uint64(2))
        net = Perceptron((4, 8, 3), spec.loss)
        theirs, count = stopped_loop(net.module(net.initial(seed)), x, y, watched, spec, seed)
        epochs.append(count)
        mine = model.estimators_[key]
        for ours, other in zip(mine[1].parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours, other, atol=2e-3, rtol=2e-2)
    assert min(epochs) < 20 < max(epochs)  # some stop early, the one without rows to watch last


def test_a_grid_of_patience_is_trained_setting_by_setting() -> None:
    frame = grouped_frame(n_groups=4, rows=(30, 60))
    grid = {"early_stopping": [True, False], "lr": [0.01, 1e30]}
    model = GroupedEstimator(
        MLP((4,), epochs=4, loss="mse_loss"), "key", "value", FEATURES, grid, cv=2, plan="local",
        random_state=0,
    ).fit(frame)  # fmt: skip
    rows = model.results_.to_pylist()
    diverged = [row for row in rows if row["fold"] is not None and '"lr": 1e+30' in row["params"]]
    assert {row["status"] for row in diverged} == {"error"}
    assert all(params["lr"] == 0.01 for params in model.best_params_.values())


def test_the_grid_trains_each_learning_rate_as_if_alone(tmp_path: Any) -> None:
    frame = grouped_frame(n_groups=5, rows=(20, 60))
    spec = MLP((8,), batch_size=16, epochs=4)
    both = GroupedEstimator(
        spec, "key", "colour", FEATURES, {"lr": [1e-4, 0.05]}, cv=3, scoring="neg_log_loss",
        plan="local", random_state=0,
    ).fit(frame)  # fmt: skip
    alone = GroupedEstimator(
        MLP((8,), lr=0.05, batch_size=16, epochs=4), "key", "colour", FEATURES, plan="local",
        random_state=0,
    ).fit(frame)  # fmt: skip
    faster = [key for key, params in both.best_params_.items() if params["lr"] == 0.05]
    assert len(faster) >= 2
    rows = frame[frame.key.isin(faster)]
    np.testing.assert_allclose(both.predict_proba(rows), alone.predict_proba(rows), atol=1e-5)
    both.save(tmp_path / "s")
    again = GroupedEstimator.load(tmp_path / "s")
    np.testing.assert_array_equal(again.predict_proba(frame), both.predict_proba(frame))


def test_a_users_module_is_stored_by_name(tmp_path: Any) -> None:
    frame = grouped_frame(n_groups=3)
    spec = Torch(make_module, epochs=1)
    model = GroupedEstimator(spec, "key", "colour", FEATURES, plan="local").fit(frame)
    model.save(tmp_path / "s")
    again = GroupedEstimator.load(tmp_path / "s")
    np.testing.assert_array_equal(again.predict_proba(frame), model.predict_proba(frame))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (MLP(epochs=0), "epochs=0"),
        (MLP(validation_fraction=0.9), "validation_fraction=0.9"),
        (MLP(n_iter_no_change=0), "n_iter_no_change=0"),
        (MLP(device="tpu"), "device='tpu'"),
        (MLP(lr=-1), "lr=-1"),
        (MLP((0,)), "hidden"),
        (MLP(loss="nope"), "choose one of cross_entropy, mse_loss"),
        (Torch(make_batchnorm), "buffers"),
        (Torch("no.such:thing"), "cannot be imported"),
        (Torch(lambda: 3), "no torch module"),
    ],
)
def test_bad_parameters_are_refused_in_words(spec: Any, message: str) -> None:
    with pytest.raises(kp.ParameterError, match=message):
        GroupedEstimator(spec, "key", "colour", FEATURES).fit(grouped_frame(n_groups=2))


def test_a_diverging_group_is_recorded() -> None:
    frame = grouped_frame(n_groups=3)
    model = GroupedEstimator(
        MLP((8,), lr=1e30, loss="mse_loss"), "key", "value", FEATURES, plan="local", fallback=None
    ).fit(frame)
    assert set(model.results_.column("status").to_pylist()) == {"error"}
    assert "diverged" in model.results_.column("error")[0].as_py()
