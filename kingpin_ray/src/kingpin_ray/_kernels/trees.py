"""The compiled tree trainer behind Python's hands: training, prediction, export.

A model is bytes, as `serialize` in gbdt.cpp writes them.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kingpin_ray._kernels import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class TreeConfig(ctypes.Structure):
    """A setting, in LightGBM's words; the layout is that of `Config` in gbdt.cpp."""

    _fields_ = [
        ("n_estimators", ctypes.c_int32),
        ("num_leaves", ctypes.c_int32),
        ("min_child_samples", ctypes.c_int32),
        ("early_stopping_rounds", ctypes.c_int32),
        ("learning_rate", ctypes.c_double),
        ("reg_lambda", ctypes.c_double),
        ("min_child_weight", ctypes.c_double),
    ]


@functools.cache
def library() -> Any:
    """Returns the loaded kernel, or None where it was not built."""
    loaded = compiled.load("gbdt")
    if loaded is None:
        return None
    pointer = ctypes.c_void_p
    loaded.kp_gbdt_train.restype = ctypes.c_int
    loaded.kp_gbdt_train.argtypes = [
        pointer, pointer, pointer, pointer, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32,
        ctypes.c_int32, pointer, ctypes.c_int64, pointer, pointer, pointer,
    ]  # fmt: skip
    loaded.kp_free.restype = None
    loaded.kp_free.argtypes = [pointer]
    loaded.kp_gbdt_predict.restype = None
    loaded.kp_gbdt_predict.argtypes = [
        ctypes.c_char_p, pointer, ctypes.c_int32, pointer, ctypes.c_int64, pointer,
    ]  # fmt: skip
    return loaded


def train(
    X: NDArray[np.float64],
    y: NDArray[np.float64],
    offsets: NDArray[np.int64],
    middle: NDArray[np.int64],
    max_bin: int,
    binary: bool,
    configs: Sequence[TreeConfig],
) -> tuple[list[list[bytes]], NDArray[np.float64]]:
    """Returns the model of each group (outer) under each configuration (inner), and raw scores.

    The scores (configurations, N) are those of the rows; NaN where early stopping dropped trees.

    Args:
        X: (N, D) float64, C-contiguous, NaN where missing.
        y: (N,) 0 and 1, or values.
        offsets: (G + 1,) rows of group g are offsets[g]:offsets[g + 1].
        middle: (G,) from this row on, a group's rows are held out for early stopping.
        max_bin: bins of a feature, at most 255.
        binary: log-loss, else squared error.
        configs: settings; they share the bins.

    Raises:
        MemoryError: the kernel could not get the memory it needs.
    """
    kernel = library()
    assert X.flags.c_contiguous
    assert X.dtype == y.dtype == np.float64
    offsets, middle = np.ascontiguousarray(offsets), np.ascontiguousarray(middle)
    groups = len(middle)
    settings = (TreeConfig * len(configs))(*configs)
    ends = np.zeros(groups * len(configs), np.int64)
    fitted = np.empty((len(configs), len(y)))
    found = ctypes.c_void_p()
    status = kernel.kp_gbdt_train(
        X.ctypes.data, np.ascontiguousarray(y).ctypes.data, offsets.ctypes.data,
        middle.ctypes.data, groups, X.shape[1], max_bin, int(binary), settings, len(configs),
        ctypes.byref(found), ends.ctypes.data, fitted.ctypes.data,
    )  # fmt: skip
    if status != 0:
        raise MemoryError("the tree kernel ran out of memory; use fewer or smaller groups at once")
    try:
        whole = ctypes.string_at(found, int(ends[-1])) if len(ends) else b""
    finally:
        kernel.kp_free(found)
    starts = np.append(0, ends[:-1])
    flat = [whole[begin:end] for begin, end in zip(starts, ends, strict=True)]
    models = [flat[g * len(configs) : (g + 1) * len(configs)] for g in range(groups)]
    return models, fitted


def add_scores(
    model: bytes, X: NDArray[np.float64], rows: NDArray[np.int64], out: NDArray[np.float64]
) -> None:
    """Adds a model's raw scores of some rows of X (N, D) to `out` (N,) in place."""
    rows = np.ascontiguousarray(rows)
    library().kp_gbdt_predict(
        model, X.ctypes.data, X.shape[1], rows.ctypes.data, len(rows), out.ctypes.data
    )


@dataclass(frozen=True)
class Tree:
    """One tree; a negative child c is leaf ~c."""

    feature: NDArray[np.int32]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    missing_left: NDArray[np.int32]
    threshold: NDArray[np.float64]
    value: NDArray[np.float64]


def parse(model: bytes) -> list[Tree]:
    """Returns the trees of a model."""
    (count,) = struct.unpack_from("<i", model)
    at = 4
    trees = []
    for _ in range(count):
        (leaves,) = struct.unpack_from("<i", model, at)
        at += 4
        parts: list[Any] = []
        for kind, length in [("<i4", leaves - 1)] * 4 + [("<f8", leaves - 1), ("<f8", leaves)]:
            parts.append(np.frombuffer(model, kind, length, at))
            at += parts[-1].nbytes
        trees.append(Tree(*parts))
    return trees


def raw_scores(model: bytes, X: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns (N,) raw scores by plain Python: the reference, and the way without the kernel."""
    out = np.zeros(len(X))
    for tree in parse(model):
        for i, row in enumerate(X):
            node = 0 if len(tree.feature) else -1
            while node >= 0:
                v = row[tree.feature[node]]
                left = tree.missing_left[node] if np.isnan(v) else v <= tree.threshold[node]
                node = int(tree.left[node] if left else tree.right[node])
            out[i] += tree.value[~node]
    return out


def to_lightgbm(model: bytes, names: Sequence[str], binary: bool) -> str:
    """Returns a model in LightGBM's text format, version 4.

    LightGBM, treelite and onnxmltools read it. Missing values follow each split's own direction.
    """
    blocks = []
    for number, tree in enumerate(parse(model)):
        lines = [f"Tree={number}", f"num_leaves={len(tree.value)}", "num_cat=0"]
        inner = len(tree.feature)
        if inner:
            # 8 says that NaN is the missing value, 2 that it goes left.
            decision = 8 + 2 * tree.missing_left
            finite = np.minimum(tree.threshold, np.finfo(np.float64).max)
            zeros = " ".join(["0"] * inner)
            lines += [
                f"split_feature={_join(tree.feature)}",
                f"split_gain={zeros}",
                f"threshold={_join(finite)}",
                f"decision_type={_join(decision)}",
                f"left_child={_join(tree.left)}",
                f"right_child={_join(tree.right)}",
            ]
        lines.append(f"leaf_value={_join(tree.value)}")
        if inner:
            none = " ".join(["0"] * (inner + 1))
            lines += [f"leaf_weight={none}", f"leaf_count={none}"]
            lines += [f"internal_{part}={zeros}" for part in ("value", "weight", "count")]
        lines += ["is_linear=0", "shrinkage=1", "", ""]
        blocks.append("\n".join(lines) + "\n")
    head = [
        "tree",
        "version=v4",
        "num_class=1",
        "num_tree_per_iteration=1",
        "label_index=0",
        f"max_feature_idx={len(names) - 1}",
        "objective=binary sigmoid:1" if binary else "objective=regression",
        f"feature_names={' '.join(_word(name) for name in names)}",
        f"feature_infos={' '.join(['[-1e308:1e308]'] * len(names))}",
        f"tree_sizes={' '.join(str(len(block)) for block in blocks)}",
        "",
        "",
    ]
    tail = "end of trees\n\nfeature_importances:\n\nparameters:\nend of parameters\n"
    return "\n".join(head) + "".join(blocks) + tail + "\npandas_categorical:null\n"


def _join(values: NDArray[Any]) -> str:
    return " ".join(repr(value) for value in values.tolist())


def _word(name: str) -> str:
    return "_".join(str(name).split()) or "_"
