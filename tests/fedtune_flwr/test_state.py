import json
import random

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    QFedAvg,
)

from fedtune_flwr import ConfigError, FedTune, Int, Log, SearchSpace, StateError
from fedtune_flwr._state import FILE
from fedtune_flwr.testing import FakeGrid
from tests.fedtune_flwr import apps

SPACE = SearchSpace(lr=Log(0.05, 1.0), **{"local-epochs": Int(1, 3)})
EVERY = {"min_train_nodes": 4, "min_available_nodes": 4}
STRATEGIES = {
    "FedAvg, half": lambda: FedAvg(fraction_train=0.5),
    "FedAdam": lambda: FedAdam(eta=0.01, **EVERY),
    "FedYogi": lambda: FedYogi(eta=0.01, **EVERY),
    "FedAvgM": lambda: FedAvgM(server_momentum=0.9, **EVERY),
}


class Killed(BaseException):
    pass


def wrapped(name, folder, **fields):
    strategy = STRATEGIES[name]()
    return FedTune(
        strategy, SPACE, apps.proxy(rounds=2), tuner="random", budget=12, state_dir=folder, **fields
    )


def run(strategy, rounds, kill_at=None):
    asked = []

    def watch(message, reply):
        if message.metadata.message_type.startswith("query"):
            asked.append(message.metadata.dst_node_id)
        elif kill_at is not None and message.content["config"]["server-round"] == kill_at:
            raise Killed

    grid = FakeGrid(apps.app(), 4, watch=watch)
    result = strategy.start(
        grid,
        apps.initial_arrays(),
        rounds,
        train_config=ConfigRecord({"lr": 0.2}),
        evaluate_fn=apps.accuracy,
    )
    return result, asked


@pytest.mark.parametrize("name", STRATEGIES)
def test_killed_and_resumed_gives_what_an_uninterrupted_run_gives(name, tmp_path):
    with apps.seeded_sampling():
        whole, _ = run(wrapped(name, None), 4)
    folder = tmp_path / "state"
    with apps.seeded_sampling():
        with pytest.raises(Killed):
            run(wrapped(name, folder), 4, kill_at=3)
        random.seed(99)  # another process would not know where the generator was
        again = wrapped(name, folder)
        resumed, asked = run(again, 4)
    assert asked == []
    assert list(resumed.train_metrics_clientapp) == [3, 4]
    assert resumed.evaluate_metrics_serverapp[4] == whole.evaluate_metrics_serverapp[4]
    assert resumed.evaluate_metrics_serverapp[2] == whole.evaluate_metrics_serverapp[2]
    for key in whole.arrays:
        np.testing.assert_array_equal(resumed.arrays[key].numpy(), whole.arrays[key].numpy())
    files = sorted(p.name for p in folder.iterdir())
    assert files == [FILE, "round-000004.npz"]


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    with apps.seeded_sampling():
        first, _ = run(wrapped("FedAvgM", tmp_path), 2)
        again = wrapped("FedAvgM", tmp_path)
        assert again.report is not None
        second, asked = run(again, 2)
    assert asked == []
    assert second.train_metrics_clientapp == {}
    for key in first.arrays:
        np.testing.assert_array_equal(second.arrays[key].numpy(), first.arrays[key].numpy())


def test_adapted_numbers_and_lists_of_arrays_come_back(tmp_path):
    def make():
        inner = DifferentialPrivacyServerSideAdaptiveClipping(
            FedAvg(**EVERY), noise_multiplier=0.3, num_sampled_clients=4
        )
        return FedTune(inner, SPACE, apps.proxy(rounds=2), tuner="random", budget=12,
                       state_dir=tmp_path)  # fmt: skip

    with apps.seeded_sampling():
        first = make()
        before = first.strategy.clipping_norm
        run(first, 2)
        assert first.strategy.clipping_norm != before
        assert make().strategy.clipping_norm == first.strategy.clipping_norm


def test_new_nodes_are_asked_after_a_resume(tmp_path):
    with apps.seeded_sampling():
        run(wrapped("FedAdam", tmp_path), 1)
        strategy = wrapped("FedAdam", tmp_path)
        grid = FakeGrid(apps.app(), 4, first_id=102)
        strategy.start(grid, apps.initial_arrays(), 2)
    assert set(strategy.clients) == {100, 101, 102, 103, 104, 105}
    assert all(row.usable for row in strategy.clients.values())


def test_a_folder_of_another_kind_is_refused(tmp_path):
    with apps.seeded_sampling():
        run(wrapped("FedAdam", tmp_path), 1)
    other = SearchSpace(lr=Log(0.05, 2.0))
    with pytest.raises(StateError, match="another search space"):
        FedTune(FedAdam(), other, apps.proxy(), state_dir=tmp_path)
    with pytest.raises(StateError, match="FedAvg"):
        wrapped("FedAvg, half", tmp_path)
    with pytest.raises(StateError, match="seed"):
        wrapped("FedAdam", tmp_path, seed=5)
    with pytest.raises(ConfigError, match="space"):
        FedTune(FedAvg(), state_dir=tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / FILE).write_text("{"),
        lambda f: (f / FILE).write_text("[]"),
        lambda f: (f / FILE).write_text(
            json.dumps({**json.loads((f / FILE).read_text()), "clients": 3})
        ),
        lambda f: (f / FILE).write_text(
            json.dumps({**json.loads((f / FILE).read_text()), "version": 99})
        ),
        lambda f: (f / "round-000001.npz").write_bytes(b"nothing"),
        lambda f: (f / "round-000001.npz").unlink(),
    ],
)
def test_a_damaged_folder_is_named(damage, tmp_path):
    with apps.seeded_sampling():
        run(wrapped("FedAdam", tmp_path), 1)
    damage(tmp_path)
    with pytest.raises(StateError, match=FILE.split(".")[0]):
        wrapped("FedAdam", tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A sound folder, as the name and bytes of its files."""
    from fedtune_flwr.testing import task_identity

    folder = tmp_path_factory.mktemp("state")
    with task_identity(), apps.seeded_sampling():
        run(wrapped("FedAdam", folder), 1)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def reopened(files, folder):
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with apps.seeded_sampling():
        return wrapped("FedAdam", folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("round", -7), ("round", 1.5), ("round", "1"), ("round", True), ("round", 10**400),
        ("arrays", None), ("arrays", 5), ("arrays", ["only"] * 99),
        ("file", "../x/round-000001.npz"), ("file", "round-000002.npz"), ("file", None),
        ("file", 3), ("inner", 5), ("inner", None), ("inner", [5]), ("inner", [{"m_t": 5}]),
        ("inner", [{"m_t": {"kind": "dict", "keys": 5}}]), ("inner", [{5: None}]),
        ("inner", [{"m_t": {}}]), ("sampling", 5), ("sampling", [3, [1, 2], None]),
        ("sampling", [3, "abc", None]), ("sampling", [3, [-1] * 625, None]),
        ("clients", [{"node_id": "a"}]), ("clients", [5]), ("clients", {}),
        ("policy", 5), ("policy", []), ("report", 5), ("report", []), ("settings", None),
        ("space", None),
    ],
)  # fmt: skip
def test_an_edited_manifest_is_a_state_error(field, value, saved, tmp_path):
    edited = json.dumps({**json.loads(saved[FILE]), field: value}).encode()
    with pytest.raises(StateError):
        reopened({**saved, FILE: edited}, tmp_path)


def test_a_truncated_or_flipped_model_is_a_state_error_or_was_not_harmed(saved, tmp_path):
    name = "round-000001.npz"
    sound = saved[name]
    for length in (0, 1, 30, len(sound) // 2, len(sound) - 1):
        with pytest.raises(StateError, match="is damaged"):
            reopened({**saved, name: sound[:length]}, tmp_path)
    expected = reopened(saved, tmp_path)._last_arrays
    rng = np.random.default_rng(0)
    refused = 0
    for place in rng.choice(len(sound), 40, replace=False).tolist():
        flipped = bytearray(sound)
        flipped[place] ^= 0xFF
        try:
            got = reopened({**saved, name: bytes(flipped)}, tmp_path)._last_arrays
        except StateError:
            refused += 1
        else:  # a byte that a zip file does not need
            for key, array in expected.items():
                np.testing.assert_array_equal(got[key].numpy(), array.numpy())
    assert refused > 10


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog, monkeypatch):
    from fedtune_flwr import _state

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_state, "write_bytes_atomic", full)
    with apps.seeded_sampling():
        result, _ = run(wrapped("FedAdam", tmp_path / "s"), 2)
    assert "No space left" in caplog.text
    assert len(result.train_metrics_clientapp) == 2
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(StateError, match="state_dir"):
        wrapped("FedAdam", blocker)


def test_qfedavg_state_is_a_record(tmp_path):
    from fedtune_flwr._inner import capture, numbers, restore

    strategy = QFedAvg(client_learning_rate=0.1)
    before = numbers([strategy])
    strategy.current_arrays = apps.initial_arrays()
    strategy.q = 0.7
    manifest, arrays = capture([strategy], before)
    manifest = json.loads(json.dumps(manifest))
    fresh = QFedAvg(client_learning_rate=0.1)
    restore([fresh], manifest, arrays)
    assert fresh.q == 0.7
    for key, array in strategy.current_arrays.items():
        np.testing.assert_array_equal(fresh.current_arrays[key].numpy(), array.numpy())
