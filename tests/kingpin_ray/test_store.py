"""Stores on disk, and the command line on top of them."""

import json
import os
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.tree import DecisionTreeRegressor

import kingpin_ray as kp
from kingpin_ray import (
    GroupedEstimator,
    Linear,
    Logistic,
    Ridge,
    _driver,
    _estimator,
    _folders,
    _store,
)
from kingpin_ray._cli import main
from tests.kingpin_ray.data import FEATURES, grouped_frame


def fitted(frame: Any, model: Any = None, **options: Any) -> GroupedEstimator:
    options = {"by": "key", "target": "label", "features": FEATURES, "plan": "local", **options}
    return GroupedEstimator(model or Logistic(), **options).fit(frame)


@pytest.mark.parametrize("target", ["label", "colour"])
@pytest.mark.parametrize("by", ["key", ["half", "key"]])
def test_a_loaded_store_predicts_the_same(tmp_path: Any, target: str, by: Any) -> None:
    frame = grouped_frame(n_groups=10)
    frame["half"] = np.where(frame.key < "g005", 1, None)
    frame.loc[frame.key == "g003", ["label", "colour"]] = [True, "red"]
    options = {"fallback": "parent"} if isinstance(by, list) else {}
    model = fitted(
        frame, by=by, target=target, param_grid={"C": [0.1, 10.0]}, cv=2, random_state=1, **options
    )
    model.save(tmp_path / "store")
    again = GroupedEstimator.load(tmp_path / "store")
    unseen = pd.concat([frame, frame.head(3).assign(key="new")])
    np.testing.assert_array_equal(again.predict_proba(unseen), model.predict_proba(unseen))
    assert again.results_.equals(model.results_)
    assert again.best_params_ == model.best_params_
    assert again.classes_.tolist() == model.classes_.tolist()
    assert again.by == by
    key = next(iter(model.estimators_))
    np.testing.assert_array_equal(again.estimators_[key].coef_, model.estimators_[key].coef_)
    again.save(tmp_path / "copy")
    third = GroupedEstimator.load(tmp_path / "copy")
    np.testing.assert_array_equal(third.predict_proba(unseen), model.predict_proba(unseen))


def test_pickled_models_need_trust(tmp_path: Any) -> None:
    frame = grouped_frame(n_groups=3)
    model = fitted(frame, DecisionTreeRegressor(max_depth=3), target="value", random_state=0)
    model.save(tmp_path / "store")
    with pytest.raises(kp.StoreError, match="trust=True"):
        GroupedEstimator.load(tmp_path / "store")
    again = GroupedEstimator.load(tmp_path / "store", trust=True)
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))


def test_one_of_many_groups_comes_from_a_few_files(tmp_path: Any) -> None:
    n = 20_000
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"key": np.repeat(np.arange(n), 4), "x": rng.normal(size=4 * n)})
    frame["y"] = frame.x * 2 + frame.key
    model = GroupedEstimator(Linear(), "key", "y", plan="local", random_state=0).fit(frame)
    model.save(tmp_path / "store")
    assert len(list((tmp_path / "store").iterdir())) < 10
    one = GroupedEstimator.load(tmp_path / "store").estimators_[17_345]
    assert one.coef_[0] == pytest.approx(2.0)


def test_damaged_and_foreign_stores_are_refused_in_words(tmp_path: Any) -> None:
    frame = grouped_frame(n_groups=3)
    model = fitted(frame)
    with pytest.raises(kp.StoreError, match=r"there is no manifest\.json"):
        GroupedEstimator.load(tmp_path / "nothing")
    store = tmp_path / "store"
    model.save(store)
    with pytest.raises(kp.StoreError, match="already holds a complete run"):
        model.save(store)
    with pytest.raises(kp.StoreError, match="already holds a complete run"):
        fitted(frame, store=store)
    (store / "models.arrow").write_bytes(b"short")
    with pytest.raises(kp.StoreError, match="missing or damaged"):
        GroupedEstimator.load(store)
    manifest = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(kp.StoreError, match="format 99"):
        GroupedEstimator.load(store)
    (store / "manifest.json").write_text("{")
    with pytest.raises(kp.StoreError, match="damaged"):
        GroupedEstimator.load(store)
    (tmp_path / "file").write_text("")
    with pytest.raises(kp.StoreError, match="cannot be made"):
        model.save(tmp_path / "file" / "store")


@pytest.mark.parametrize(
    "name",
    [
        "models",
        "keys",
        "keys-0",
        "keys-1",
        "groups",
        "classes",
        "parents",
        "parent_slot",
        "results",
    ],
)
def test_a_flipped_bit_or_a_lost_file_is_found(tmp_path: Any, name: str) -> None:
    frame = grouped_frame(n_groups=4)
    frame["half"] = np.where(frame.key < "g002", 1, 2)
    fitted(frame, by=["half", "key"], fallback="parent", store=tmp_path / "s")
    file = tmp_path / "s" / f"{name}.arrow"
    data = bytearray(file.read_bytes())
    for at in (len(data) // 2, 3 * len(data) // 4, len(data) - 20):
        data[at] ^= 1
        file.write_bytes(data)
        with pytest.raises(kp.StoreError, match=rf"{name}\.arrow' is missing or damaged"):
            GroupedEstimator.load(tmp_path / "s")
        data[at] ^= 1
    file.unlink()
    with pytest.raises(kp.StoreError, match=rf"{name}\.arrow' is missing or damaged"):
        GroupedEstimator.load(tmp_path / "s")
    file.write_bytes(data)
    GroupedEstimator.load(tmp_path / "s")


def test_an_edited_manifest_is_refused(tmp_path: Any) -> None:
    model = fitted(grouped_frame(n_groups=3))
    model.save(tmp_path / "s")
    path = tmp_path / "s" / "manifest.json"
    whole = json.loads(path.read_text())

    def refused(manifest: Any, match: str) -> None:
        path.write_text(json.dumps(manifest))
        with pytest.raises(kp.StoreError, match=match):
            GroupedEstimator.load(tmp_path / "s")

    refused({**whole, "features": whole["features"][::-1]}, "changed after it was written")
    refused({k: v for k, v in whole.items() if k != "checksum"}, "changed after")
    refused([whole], "not a JSON object")
    # Whoever writes manifests by another program gets words too.
    plain = {k: v for k, v in whole.items() if k != "checksum"}
    for change, match in (
        ({"model": {"name": "logistic"}}, "manifest's model does not hold"),
        ({"model": {"name": "logistic", "needs_pickle": False, "params": {"z": 1}}}, "does not"),
        ({"model": {"name": "x", "needs_pickle": True, "pickle": "zz"}}, "trust=True"),
        ({"features": 5}, "does not hold"),
        ({"configs": None}, "does not hold"),
        ({"files": {}}, "does not list 'classes.arrow'"),
        ({"estimator": {"zz": 1}}, "does not hold"),
    ):
        forged = {**plain, **change}
        refused({**forged, "checksum": _store._checksum(forged)}, match)
    del plain["seed"]
    refused({**plain, "checksum": _store._checksum(plain)}, "lacks 'seed'")
    path.write_text(json.dumps(whole))
    assert GroupedEstimator.load(tmp_path / "s").by == "key"


def _many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver, "_CHUNK_ROWS", (200, 500))
    monkeypatch.setattr(_estimator, "SEGMENT_EVERY_S", 0.0)


class _Interrupted(Exception):
    pass


def test_an_interrupted_run_resumes_without_redoing_groups(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _many_chunks(monkeypatch)
    frame = grouped_frame(n_groups=40)
    options: dict[str, Any] = {"param_grid": {"C": [0.1, 1.0]}, "cv": 2, "random_state": 5}
    whole = fitted(frame, store=tmp_path / "whole", **options)

    done: list[int] = []
    real = _driver.fit_block

    def dies_later(block: Any, task: Any) -> Any:
        if len(done) == 3:
            raise _Interrupted
        done.append(block.n_groups)
        return real(block, task)

    monkeypatch.setattr(_driver, "fit_block", dies_later)
    with pytest.raises(_Interrupted):
        fitted(frame, store=tmp_path / "cut", **options)
    with pytest.raises(kp.StoreError, match="did not finish"):
        GroupedEstimator.load(tmp_path / "cut")
    (tmp_path / "cut" / "segment-999999-0000.models.arrow").write_bytes(b"half written")

    again: list[int] = []

    def counted(block: Any, task: Any) -> Any:
        again.append(block.n_groups)
        return real(block, task)

    monkeypatch.setattr(_driver, "fit_block", counted)
    estimator = GroupedEstimator(Logistic(), "key", "label", FEATURES, plan="local", **options)
    segment = tmp_path / "cut" / "segment-000000-0000.models.arrow"
    kept = segment.read_bytes()
    segment.write_bytes(kept[:-20] + bytes([kept[-20] ^ 1]) + kept[-19:])
    with pytest.raises(kp.StoreError, match=r"models\.arrow' is missing or damaged"):
        estimator.resume(tmp_path / "cut", frame)
    segment.write_bytes(kept)
    with pytest.raises(kp.StoreError, match="trained on data in memory"):
        estimator.resume(tmp_path / "cut")
    with pytest.raises(kp.StoreError, match="other data, model, grid"):
        estimator.resume(tmp_path / "cut", frame.head(500))
    clone = GroupedEstimator(Logistic(tol=1e-3), "key", "label", FEATURES, **options)
    with pytest.raises(kp.StoreError, match="other data, model, grid"):
        clone.resume(tmp_path / "cut", frame)
    estimator.resume(tmp_path / "cut", frame)
    assert sum(done) + sum(again) == 40
    for name in ("models.arrow", "groups.arrow", "keys.arrow", "keys-0.arrow"):
        first, second = (tmp_path / run / name for run in ("whole", "cut"))
        assert first.read_bytes() == second.read_bytes(), name
    drop = ["seconds"]
    assert estimator.results_.drop(drop).equals(whole.results_.drop(drop))
    assert not list((tmp_path / "cut").glob("segment-*"))
    # A finished store resumes to itself, doing nothing.
    again.clear()
    GroupedEstimator(Logistic(), "key", "label", FEATURES, **options).resume(
        tmp_path / "cut", frame
    )
    assert not again


def test_leftovers_of_killed_writers_are_removed(tmp_path: Any) -> None:
    store = tmp_path / "s"
    store.mkdir()
    ours = [".manifest.json.fc09a01e.part", ".segment-000003-0000.models.arrow.0a1b2c3d.part"]
    others = [".manifest.json.bak", ".keys.arrow.swp", "notes.part", ".x.csv.abcdef01.part"]
    for name in [*ours, *others]:
        (store / name).touch()
    frame = grouped_frame(n_groups=3)
    fitted(frame, store=store, random_state=0)  # there was no manifest yet: an empty store
    there = {path.name for path in store.iterdir()}
    assert there >= set(others)
    assert not there & set(ours)
    # A finished store is cleared by resume, of segments too; loading it changes nothing.
    for name in [*ours, "segment-000000-0000.models.arrow"]:
        (store / name).touch()
    GroupedEstimator.load(store)
    assert {path.name for path in store.iterdir()} > there
    GroupedEstimator(Logistic(), "key", "label", FEATURES, plan="local", random_state=0).resume(
        store, frame
    )
    assert {path.name for path in store.iterdir()} == there


@pytest.mark.skipif(not _folders.LOCKS, reason="this system has no locks on folders")
def test_one_writer_at_a_time(tmp_path: Any) -> None:
    frame = grouped_frame(n_groups=3)
    model = fitted(frame)
    with _store.Store(tmp_path / "s").writing():
        (tmp_path / "s" / ".manifest.json.fc09a01e.part").touch()
        with pytest.raises(kp.StoreError, match="being written by another process"):
            model.save(tmp_path / "s")
        assert list((tmp_path / "s").iterdir())  # what the other one writes is left alone
    model.save(tmp_path / "s")
    assert not list((tmp_path / "s").glob(".*"))


@pytest.mark.skipif(not _folders.LOCKS, reason="this system has no locks on folders")
def test_temporary_folders_of_killed_processes_are_removed(tmp_path: Any) -> None:
    (tmp_path / "kp-dead").mkdir()
    (tmp_path / "kp-dead" / "0-X.npy").touch()
    (tmp_path / "other").mkdir()
    with _folders.temporary_folder("kp-", str(tmp_path)) as first:
        assert not (tmp_path / "kp-dead").exists()
        with _folders.temporary_folder("kp-", str(tmp_path)) as second:
            assert os.path.isdir(first)
            assert os.path.isdir(second)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_full_disk_is_a_typed_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    model = fitted(grouped_frame(n_groups=3))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(kp.StoreError, match=r"No space left on device.*resume"):
        model.save(tmp_path / "store")
    assert not list((tmp_path / "store").iterdir())


def test_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    frame = grouped_frame(n_groups=7)
    frame.loc[frame.key == "g002", "label"] = False
    data, out = str(tmp_path / "data.parquet"), str(tmp_path / "models")
    pq.write_table(pa.Table.from_pandas(frame), data)
    grid = tmp_path / "grid.json"
    grid.write_text('{"C": [0.1, 1.0]}')
    fit = ["fit", data, "--by", "key", "--target", "label", "--features", ",".join(FEATURES),
           "--model", "logistic", "--grid", str(grid), "--cv", "2", "--out", out]  # fmt: skip
    assert main(fit) == 0
    text = capsys.readouterr().out
    assert "7 groups (6 ok, 1 single_class), plan local" in text
    assert "g002: every row has the same class" in text
    assert main(fit) == 1
    assert "already holds a complete run" in capsys.readouterr().err
    assert main([*fit, "--resume"]) == 0
    capsys.readouterr()

    assert main(["results", out, "--worst", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "key | params | status | n_rows | score"
    assert len(lines) == 3
    for name in ("r.parquet", "r.csv"):
        assert main(["results", out, "--out", str(tmp_path / name)]) == 0
    assert pq.read_table(tmp_path / "r.parquet").num_rows == 6 * 5 + 1
    assert len(pd.read_csv(tmp_path / "r.csv")) == 6 * 5 + 1

    for flags, column in ([], "prediction"), (["--proba"], "proba_True"):
        predictions = str(tmp_path / "p.parquet")
        assert main(["predict", out, data, "--out", predictions, *flags]) == 0
        table = pq.read_table(predictions)
        assert table.num_rows == len(frame)
        assert column in table.column_names
    assert main(["models"]) == 0
    assert "logistic" in capsys.readouterr().out
    assert main([*fit[:-1], str(tmp_path / "o"), "--params", "{"]) == 1
    assert "--params: this is not JSON" in capsys.readouterr().err
    assert main([*fit[:-1], str(tmp_path / "o"), "--model", "nope"]) == 1
    assert "available are" in capsys.readouterr().err


def test_command_line_answers_in_words(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    frame = grouped_frame(n_groups=3)
    data, out, nowhere = (
        str(tmp_path / "d.parquet"),
        str(tmp_path / "m"),
        str(tmp_path / "no" / "x"),
    )
    pq.write_table(pa.Table.from_pandas(frame), data)
    fit = ["fit", data, "--by", "key", "--target", "value", "--features", "x0,x1", "--out", out]
    (tmp_path / "g.json").write_bytes(b"\xff\xfe")

    def says(argv: list[str], words: str) -> None:
        assert main(argv) == 1
        error = capsys.readouterr().err
        assert error.startswith("kingpin: ")
        assert words in error

    says([*fit, "--params", "[1]"], "give a JSON object of parameters")
    says([*fit, "--params", '{"zz": 1}'], "unexpected keyword argument 'zz'")
    says([*fit, "--grid", str(tmp_path / "g.json")], "not UTF-8")
    says([*fit, "--grid", nowhere], "No such file")
    says([*fit, "--cv", "inf"], "cv=inf")
    assert main(fit) == 0
    capsys.readouterr()
    for suffix in (".csv", ".parquet"):
        says(["results", out, "--out", nowhere + suffix], "No such file")
    says(["results", out, "--worst", "-1"], "--worst -1")
    says(["predict", out, data, "--out", nowhere], "No such file")
    says(["predict", out, data, "--out", str(tmp_path / "p"), "--proba"], "holds regressors")
    manifest = tmp_path / "m" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"x0"', '"x9"'))
    says(["predict", out, data, "--out", str(tmp_path / "p")], "damaged")
    says(["results", out], "damaged")


def test_linear_store_is_one_row_a_model(tmp_path: Any) -> None:
    frame = grouped_frame(n_groups=6)
    model = fitted(frame, Ridge(), target="value")
    model.save(tmp_path / "s")
    with pa.memory_map(str(tmp_path / "s" / "models.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.num_rows == 7  # and the global fallback
    assert table.schema.field("model_coef").type == pa.list_(pa.float64(), 4)
