"""Stores on disk: whole or absent, equal to what was in memory, and checked."""

import errno
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch_geometric.loader import NodeLoader

from bifeat_pyg import (
    SQ,
    VQ,
    ChecksumError,
    CSCNeighborSampler,
    FeatureError,
    FormatError,
    NonFiniteError,
    QuantizedFeatureStore,
    QuantizedLoader,
    RowIndexError,
    StorageError,
    UnknownAttrError,
    VersionError,
    quantize,
    quantize_file,
)
from bifeat_pyg._cli import main

from .graphs import SPECS, features, graph, hetero, name

# On a machine, or with a share of one, of fewer processors than workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker:UserWarning")


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.filterwarnings("ignore:only .* rows to fit")
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_a_saved_store_opens_as_it_was(spec, tmp_path):
    store = QuantizedFeatureStore.from_data(graph(), spec=spec)
    store.save(tmp_path / "s")
    opened = QuantizedFeatureStore.open(tmp_path / "s", verify=True)
    index = torch.tensor([7, 0, 399, 7])
    assert torch.equal(opened.fetch(None, "x", index), store.fetch(None, "x", index))
    assert torch.equal(opened.fetch(None, "x"), store.fetch(None, "x"))
    assert torch.equal(opened.get_tensor(None, "y", index), store.get_tensor(None, "y", index))
    assert opened.get_tensor(None, "train_mask", None).dtype == torch.bool
    assert str(opened.report()) == str(store.report())
    assert opened.codec(None, "x") is store.codec(None, "x")


def test_types_and_odd_shapes_on_disk(tmp_path):
    data = hetero()
    data["paper"].x = torch.randn(120, 2, 3)
    data["author"].x = torch.randn(50)
    store = QuantizedFeatureStore.from_data(data, spec=SQ(8))
    store.save(tmp_path / "s")
    opened = QuantizedFeatureStore.open(tmp_path / "s")
    assert opened.fetch("paper", "x", [1, 2]).shape == (2, 2, 3)
    assert opened.fetch("author", "x", slice(3, 9)).shape == (6,)
    assert torch.equal(opened.fetch("paper", "x"), store.fetch("paper", "x"))


@pytest.mark.parametrize("workers", [0, 2])
def test_training_reads_a_store_on_disk(tmp_path, workers):
    data = graph()
    QuantizedFeatureStore.from_data(data).save(tmp_path / "s")
    store = QuantizedFeatureStore.open(tmp_path / "s")
    loader = NodeLoader(
        (store, data),
        CSCNeighborSampler(data, [4, 2]),
        input_nodes=data.train_mask,
        batch_size=64,
        num_workers=workers,
    )
    for batch in QuantizedLoader(loader):
        assert torch.equal(batch.x, store.fetch(None, "x", batch.n_id))


def test_other_processes_map_the_same_file(tmp_path):
    QuantizedFeatureStore.from_data(graph()).save(tmp_path / "s")
    store = QuantizedFeatureStore.open(tmp_path / "s")
    sent = pickle.dumps(store)
    assert len(sent) < 1000  # a path, not the rows
    assert torch.equal(pickle.loads(sent).fetch(None, "x"), store.fetch(None, "x"))


def _mapped_kib(path, queue):
    """Puts how much of a store's mapping is this process's own, and how much is there at all."""
    # As in a DataLoader's worker: a pool of threads that the parent has begun is not here.
    torch.set_num_threads(1)
    store = QuantizedFeatureStore.open(path)
    store.get_tensor(None, "x", torch.arange(store.get_tensor_size(None, "x")[0]))
    figures = {}
    current = ""
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            if "-" in line.split(" ", 1)[0] and line.split(" ", 1)[0][0] in "0123456789abcdef":
                current = line
            elif ".codes" in current:
                key, _, value = line.partition(":")
                if key in ("Rss", "Private_Dirty"):
                    figures[key] = figures.get(key, 0) + int(value.split()[0])
    queue.put(figures)


@pytest.mark.cluster
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="reads Linux's /proc")
def test_four_processes_cost_one_mapping(tmp_path):
    x = torch.randn(40_000, 128)
    np.save(tmp_path / "x.npy", x.numpy())
    quantize_file(tmp_path / "x.npy", tmp_path / "s", SQ(8))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=_mapped_kib, args=(tmp_path / "s", queue)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    figures = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    for figure in figures:
        # The pages are there (the system may have taken some back), none as a copy of its own.
        assert figure["Rss"] >= 40_000 * 128 // 1024 // 2
        assert figure["Private_Dirty"] == 0


def sources(folder):
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet
    from safetensors.torch import save_file

    x = features(3000, 6)
    np.save(folder / "x.npy", x.numpy())
    np.save(folder / "half.npy", x.half().numpy())
    save_file({"x": x, "y": x[:, :1].clone()}, folder / "x.safetensors")
    torch.save(x, folder / "x.pt")
    table = pa.table({f"c{i}": x[:, i].numpy() for i in range(6)})
    pyarrow.parquet.write_table(table, folder / "x.parquet", row_group_size=700)
    pyarrow.feather.write_feather(table, folder / "x.arrow")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.numpy().ravel()), 6)
    pyarrow.parquet.write_table(pa.table({"x": lists}), folder / "lists.parquet")
    mapped = np.memmap(folder / "x.bin", np.float32, "w+", offset=64, shape=(3000, 6))
    mapped[:] = x.numpy()
    return x, {
        "npy": folder / "x.npy",
        "half": folder / "half.npy",
        "safetensors": folder / "x.safetensors",
        "pt": folder / "x.pt",
        "parquet": folder / "x.parquet",
        "arrow": folder / "x.arrow",
        "lists": folder / "lists.parquet",
        "table": table,
        "memmap": mapped,
        "part of a memmap": mapped[1000:],
        "columns of a memmap": mapped[:, ::2],
        "tensor": x,
        "array": x.numpy(),
    }


def test_all_kinds_of_source(tmp_path):
    x, kinds = sources(tmp_path)
    for kind, source in kinds.items():
        out = tmp_path / f"out {kind}"
        store = quantize_file(source, out, SQ(8), 500, key="x" if kind == "safetensors" else None)
        expected = {
            "half": x.half(),
            "part of a memmap": x[1000:],
            "columns of a memmap": x[:, ::2],
        }
        memory = quantize(_data(expected.get(kind, x)), spec=SQ(8))
        assert torch.equal(store.get_tensor(None, "x", None), memory.x), kind
        assert store.codec(None, "x") is memory.x_codec, kind
        QuantizedFeatureStore.open(out, verify=True)


def _data(x):
    from torch_geometric.data import Data

    return Data(x=x)


@pytest.mark.parametrize("spec", [SQ(4), VQ(3, 16)], ids=["sq", "vq"])
def test_a_killed_run_resumes_to_the_same_bytes(spec, tmp_path):
    np.save(tmp_path / "x.npy", features(5000, 6).numpy())
    quantize_file(tmp_path / "x.npy", tmp_path / "whole", spec, 700)
    # SIGKILL in the middle of the fourth chunk, after its rows were written and before its entry.
    code = f"""
        import os, signal
        import bifeat_pyg
        from bifeat_pyg import SQ, VQ, paper, _file
        note, calls = _file._Job._note, []
        def noted(self, done, errors):
            calls.append(done)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            note(self, done, errors)
        _file._Job._note = noted
        bifeat_pyg.quantize_file({str(tmp_path / "x.npy")!r}, {str(tmp_path / "out")!r}, {spec!r},
        700)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not (tmp_path / "out").exists()
    assert json.loads((tmp_path / "out.part" / "journal.json").read_text())["done"] == 2100
    with pytest.raises(FormatError, match=r"no manifest\.json; a \.part folder lies beside it"):
        QuantizedFeatureStore.open(tmp_path / "out")
    with pytest.raises(FormatError, match="begun with another spec"):
        quantize_file(tmp_path / "x.npy", tmp_path / "out", SQ(16), 700)
    quantize_file(tmp_path / "x.npy", tmp_path / "out", spec, 700)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not (tmp_path / "out.part").exists()


class Stop(BaseException):
    """What no handler of errors catches, as a kill."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_stopped_at_any_step_it_resumes_to_the_same_bytes(after, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", features(90, 6).numpy())
    quantize_file(tmp_path / "x.npy", tmp_path / "whole", SQ(4), 40)
    whole = content(tmp_path / "whole")
    left = [0]

    def stopping(real):
        def call(*args, **more):
            left[0] -= 1
            if left[0] == 0 and not after:
                raise Stop
            result = real(*args, **more)
            if left[0] == 0:
                raise Stop
            return result

        return call

    for call in ("fsync", "replace", "rename", "unlink"):
        monkeypatch.setattr(os, call, stopping(getattr(os, call)))
    steps = 0
    for step in range(1, 100):
        out = tmp_path / f"out{step}"
        left[0] = step
        try:
            quantize_file(tmp_path / "x.npy", out, SQ(4), 40)
        except Stop:
            steps += 1
        stopped, left[0] = left[0] <= 0, 0
        if not out.exists():
            quantize_file(tmp_path / "x.npy", out, SQ(4), 40)
        assert content(out) == whole, step
        assert not out.with_name(out.name + ".part").exists()
        if not stopped:
            break
    assert steps > 8


def test_starting_anew_discards_what_was_left(tmp_path):
    np.save(tmp_path / "x.npy", features(100, 6).numpy())
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "journal.json").write_text("{}")
    with pytest.raises(FormatError, match="resume=False"):
        quantize_file(tmp_path / "x.npy", tmp_path / "out")
    quantize_file(tmp_path / "x.npy", tmp_path / "out", resume=False)


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = QuantizedFeatureStore.from_data(graph())
    np.save(tmp_path / "x.npy", features(100, 6).numpy())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left on device"):
            store.save(tmp_path / "s")
        with pytest.raises(StorageError, match="No space left on device"):
            quantize_file(tmp_path / "x.npy", tmp_path / "out")
    assert not (tmp_path / "s").exists()
    assert not (tmp_path / "out").exists()
    quantize_file(tmp_path / "x.npy", tmp_path / "out", resume=False)


def damaged(change):
    def apply(folder):
        change(folder)

    return apply


def cut(folder):
    path = folder / "0_x.codes"
    path.write_bytes(path.read_bytes()[:-16])


def edit(ending):
    def change(folder):
        path = folder / f"0_x.{ending}"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)

    return change


def rewrite(**values):
    def change(folder):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        for field, value in values.items():
            if field in manifest:
                manifest[field] = value
            else:
                manifest["tables"][0][field] = value
        path.write_text(json.dumps(manifest))

    return change


DAMAGE = {
    "cut": (cut, FormatError, "cut off or changed"),
    "missing": (lambda f: (f / "0_x.codes").unlink(), FormatError, "missing"),
    "params": (edit("safetensors"), ChecksumError, "not what was written"),
    "codes": (edit("codes"), ChecksumError, "SHA-256 differs"),
    "version": (rewrite(version=2), VersionError, "format version 2, this package reads 1"),
    "format": (rewrite(format="zip"), FormatError, "does not say"),
    "json": (lambda f: (f / "manifest.json").write_text("{"), FormatError, "damaged"),
    "path": (rewrite(codes="../../etc/passwd"), FormatError, "plain file name"),
    "rows": (rewrite(rows="many"), FormatError, "an entry of"),
    "no tables": (rewrite(tables=None), FormatError, "lists no tables"),
    "no table": (rewrite(tables=[3]), FormatError, "an entry of"),
    "group": (rewrite(group=[1]), FormatError, "an entry of"),
    "attr": (rewrite(attr=None), FormatError, "an entry of"),
    "half as many rows": (rewrite(rows=50, stride=32), FormatError, "50 rows of 16 take 800"),
    "quantizer": (rewrite(spec={"quantizer": "gone"}), FormatError, "gone"),
    "empty": (lambda f: shutil.rmtree(f), FormatError, "is no store"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found(case, tmp_path):
    change, error, message = DAMAGE[case]
    quantize_file(features(100, 6), tmp_path / "s")
    change(tmp_path / "s")
    with pytest.raises(error, match=message):
        QuantizedFeatureStore.open(tmp_path / "s", verify=True)


def test_missing_plain_attributes_are_found(tmp_path, capsys):
    QuantizedFeatureStore.from_data(graph()).save(tmp_path / "s")
    (tmp_path / "s" / "plain.safetensors").unlink()
    with pytest.raises(FormatError, match=r"plain.safetensors is missing; copy it again"):
        QuantizedFeatureStore.open(tmp_path / "s")
    assert main(["info", str(tmp_path / "s")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_nothing_is_overwritten(tmp_path):
    x = features(100, 6)
    np.save(tmp_path / "x.npy", x.numpy())
    quantize_file(x, tmp_path / "s")
    before = content(tmp_path / "s")
    with pytest.raises(StorageError, match="exists already"):
        quantize_file(x, tmp_path / "s")
    with pytest.raises(StorageError, match="exists already"):
        QuantizedFeatureStore.from_data(graph()).save(tmp_path / "s")
    with pytest.raises(StorageError, match="is the source itself"):
        quantize_file(tmp_path / "x.npy", tmp_path / "x.npy")
    assert content(tmp_path / "s") == before
    store = QuantizedFeatureStore.open(tmp_path / "s")
    with pytest.raises(FeatureError, match="not written in place"):
        store.put_tensor(x[:2], group_name=None, attr_name="x", index=torch.tensor([0, 1]))


def test_sources_that_cannot_be_read(tmp_path):
    (tmp_path / "x.csv").write_text("1,2")
    (tmp_path / "bad.npy").write_bytes(b"nothing")
    np.save(tmp_path / "f.npy", np.asfortranarray(np.ones((3, 4))))
    np.save(tmp_path / "short.npy", np.ones((30, 4)))
    with open(tmp_path / "short.npy", "r+b") as file:
        file.truncate(200)
    for file, message in {
        "none.npy": "not a file",
        "x.csv": "unknown kind",
        "bad.npy": "no .npy file",
        "f.npy": "Fortran",
        "short.npy": "cut off",
    }.items():
        with pytest.raises(FeatureError, match=message):
            quantize_file(tmp_path / file, tmp_path / "out")
    for ending, message in {
        "pt": "no tensor that torch.save wrote",
        "safetensors": "no safetensors file",
        "parquet": "no parquet file",
        "arrow": "no feather file",
    }.items():
        for damaged in (b"", b"nothing of the kind" * 9):
            (tmp_path / f"bad.{ending}").write_bytes(damaged)
            with pytest.raises(FeatureError, match=message):
                quantize_file(tmp_path / f"bad.{ending}", tmp_path / "out")
    torch.save(torch.ones(300, 40), tmp_path / "cut.pt")
    with open(tmp_path / "cut.pt", "r+b") as file:
        file.truncate(5000)
    assert main(["quantize", str(tmp_path / "cut.pt"), str(tmp_path / "out")]) == 1
    import pyarrow as pa

    with pytest.raises(NonFiniteError, match="row 2, column 1"):
        quantize_file(pa.table({"a": [1, 2, 3], "b": [1, 2, None]}), tmp_path / "out")
    with pytest.raises(FeatureError, match="every column must be a number"):
        quantize_file(pa.table({"a": ["b"]}), tmp_path / "out")
    x = features(5000, 6)
    x[4999, 5] = torch.nan
    with pytest.raises(NonFiniteError, match="row 4999, column 5"):
        quantize_file(x, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.part").exists()
    with pytest.raises(FeatureError, match="chunk_rows"):
        quantize_file(x, tmp_path / "out", chunk_rows=0)


INDICES = {
    "tensor": (torch.tensor([3, 1]), [3, 1]),
    "array": (np.array([3, 1]), [3, 1]),
    "int32": (torch.tensor([3, 1], dtype=torch.int32), [3, 1]),
    "list": ([3, 1], [3, 1]),
    "slice": (slice(2, 8, 3), [2, 5]),
    "int": (4, [4]),
    "mask": (torch.arange(400) == 9, [9]),
    "numpy mask": (np.arange(400) == 9, [9]),
    "all": (None, list(range(400))),
    "none": ([], []),
}


@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("disk", [False, True])
def test_every_kind_of_index(kind, disk, tmp_path):
    data = graph()
    store = QuantizedFeatureStore.from_data(data, spec=SQ(16))
    if disk:
        store.save(tmp_path / "s")
        store = QuantizedFeatureStore.open(tmp_path / "s")
    index, rows = INDICES[kind]
    got = store.get_tensor(group_name=None, attr_name="x", index=index)
    assert got.dtype == torch.uint8
    assert got.shape == (len(rows), 26)
    torch.testing.assert_close(
        store.fetch(None, "x", index), data.x[torch.tensor(rows).long()], atol=1e-2, rtol=0
    )
    got = store.get_tensor(group_name=None, attr_name="y", index=index)
    assert torch.equal(got, data.y[torch.tensor(rows).long()])


BAD_INDICES = {
    "beyond": ([400], r"index\[0\] is 400"),
    "negative": ([0, -1], r"index\[1\] is -1"),
    "int": (400, "is 400"),
    "float": (torch.tensor([1.0]), "float32"),
    "mask": (torch.ones(3).bool(), "mask of 3 values does not fit 400"),
    "matrix": (torch.zeros(2, 2).long(), r"index is \[2, 2\]"),
    "text": ("x", "str"),
    "backwards": (slice(None, None, -1), "step of the slice is -1"),
    "standing": (slice(0, 5, 0), "step of the slice is 0"),
    "slice of floats": (slice(0.5, 3), "start of the slice is 0.5"),
    "ragged": ([[1], [2, 3]], "no row of integers"),
    "masked": (np.ma.masked_array([1, 2], [True, False]), "masked array"),
}


@pytest.mark.parametrize("case", BAD_INDICES)
@pytest.mark.parametrize("attr", ["x", "y"])
def test_a_bad_index_is_refused(case, attr):
    index, message = BAD_INDICES[case]
    store = QuantizedFeatureStore.from_data(graph())
    with pytest.raises(RowIndexError, match=message):
        store.get_tensor(group_name=None, attr_name=attr, index=index)


def test_the_feature_store_interface():
    store = QuantizedFeatureStore.from_data(graph(), keep=["y"])
    assert {attr.attr_name for attr in store.get_all_tensor_attrs()} == {"x", "y"}
    assert store.get_tensor_size(group_name=None, attr_name="x") == (400, 7)
    rows = features(2, 13, 5)
    store.put_tensor(rows, group_name=None, attr_name="x", index=torch.tensor([9, 3]))
    torch.testing.assert_close(store.fetch(None, "x", [9, 3]), rows, atol=2.0, rtol=0)
    z = torch.arange(400)
    assert store.put_tensor(z, group_name=None, attr_name="z", index=None)
    assert store.get_tensor(None, "z", None).data_ptr() == z.data_ptr()  # held, not copied
    assert store.remove_tensor(None, "z", None)
    with pytest.raises(UnknownAttrError, match="holds no z; it holds: x, y"):
        store.get_tensor(None, "z", None)
    with pytest.raises(UnknownAttrError, match="'movie' x"):
        store.fetch("movie", "x")
    with pytest.raises(FeatureError, match="is packed; remove it first"):
        store.put_tensor(z, group_name=None, attr_name="x", index=None)
    assert "400 x 13" in repr(store)
