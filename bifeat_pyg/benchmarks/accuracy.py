"""Test accuracy on packed features minus that on fp32, with its standard error, on real graphs.

Two layers, 32 hidden, full batch, Adam, random 50/25/25 splits, test score at best validation
(looked at after every second epoch). One
seed is one split and one initialization, the same for every quantizer, so differences are paired;
models are averaged within a seed before the standard error is taken over seeds. "+svd" are 128
dense floats by TruncatedSVD of the bag of words.

    python accuracy.py --rows runs.jsonl            # goes on where it was stopped
    python accuracy.py --rows runs.jsonl --only-table --plot accuracy.png

Each run appends one line to the file of rows at once. Reads the graphs of an optional data folder:
BIFEAT_GRAPHS, or ../shared/data/graphs from the repository's root.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measure import show
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.utils import add_remaining_self_loops, degree

from bifeat_pyg import SQ, VQ, paper, quantize

# Seeds and epochs: large graphs have more test nodes, so fewer runs tell as much.
SETS = {
    "cora": (10, 60),
    "citeseer": (10, 60),
    "amazon_photo": (5, 60),
    "amazon_cs": (5, 50),
    "coauthor_cs": (5, 30),
}
MODELS = ("SAGE", "GCN", "GAT")
# In the order of their worth: a run that is cut short has the first ones for every graph.
SPECS = {
    "4 bit": SQ(4),
    "VQ 8x256": VQ(8, 256),
    "VQ 32x256x4": VQ(32, 256, stages=4),
    "VQ 64x256x8": VQ(64, 256, stages=8),
    "paper 4 bit": paper.sq(4),
    "paper 1 bit": paper.sq(1),
    "paper VQ 16x2048": paper.MAG240M,
    "1 bit": SQ(1),
    "2 bit": SQ(2),
}


def folder() -> Path:
    """Returns where the graphs are."""
    default = Path(__file__).parents[3] / "shared" / "data" / "graphs"
    return Path(os.environ.get("BIFEAT_GRAPHS", default))


def load(name: str) -> Data:
    """Returns a graph; "+svd" in the name makes its features 128 dense floats."""
    stem, _, svd = name.partition("+")
    with np.load(folder() / f"{stem}.npz", allow_pickle=False) as file:
        if "x" in file:
            x = file["x"].astype(np.float32)
        else:
            from scipy.sparse import csr_matrix

            parts = (file["x_data"], file["x_indices"], file["x_indptr"])
            x = csr_matrix(parts, shape=tuple(file["x_shape"])).astype(np.float32)
        edges, labels = file["edge_index"], file["y"]
    if svd:
        from sklearn.decomposition import TruncatedSVD

        x = TruncatedSVD(128, random_state=0).fit_transform(x)
    elif not isinstance(x, np.ndarray):
        x = x.toarray()
    edge_index = torch.from_numpy(edges.astype(np.int64))
    both = torch.cat((edge_index, edge_index.flip(0)), dim=1).unique(dim=1)
    return Data(
        x=torch.from_numpy(np.ascontiguousarray(x, np.float32)),
        edge_index=both,
        y=torch.from_numpy(labels.astype(np.int64)).flatten(),
    )


def averaging(data: Data) -> dict[str, Tensor]:
    """Returns the matrices that SAGE and GCN average over neighbours with, sparse [N, N]."""
    nodes = int(data.num_nodes)
    source, target = data.edge_index
    mean = 1 / degree(target, nodes).clamp(min=1)
    looped, _ = add_remaining_self_loops(data.edge_index, num_nodes=nodes)
    root = degree(looped[1], nodes).rsqrt()

    def matrix(edges: Tensor, weight: Tensor) -> Tensor:
        shape = (nodes, nodes)
        made = torch.sparse_coo_tensor(edges.flip(0), weight, shape, check_invariants=False)
        return made.to_sparse_csr()

    return {
        "SAGE": matrix(torch.stack((source, target)), mean[target]),
        "GCN": matrix(looped, root[looped[0]] * root[looped[1]]),
    }


class Net(torch.nn.Module):
    """Two of PyG's layers with ReLU and dropout between; for SAGE takes the mean of x ready-made.

    The first average over neighbours does not depend on weights: made once, not every epoch.
    """

    def __init__(self, model: str, columns: int, classes: int, hidden: int = 32) -> None:
        super().__init__()
        layer = {"SAGE": SAGEConv, "GCN": GCNConv, "GAT": GATConv}[model]
        more = {"normalize": False} if model == "GCN" else {}
        self.model = model
        self.first = layer(columns, hidden, **more)
        self.second = layer(hidden, classes, **more)

    def forward(self, x: Tensor, mean: Tensor | None, edges: Tensor) -> Tensor:
        """Returns the scores of every node, [N, classes]."""
        if mean is not None:
            x = self.first.lin_l(mean) + self.first.lin_r(x)
        else:
            x = self.first(x, edges)
        x = torch.nn.functional.dropout(x.relu(), 0.5, self.training)
        return self.second(x, edges)


def score(
    data: Data, x: Tensor, mean: Tensor | None, edges: Tensor, model: str, seed: int, epochs: int
) -> float:
    """Returns the test accuracy, in percent, of one seed."""
    generator = torch.Generator().manual_seed(seed)
    split = torch.rand(data.num_nodes, generator=generator)
    train, valid, test = split < 0.5, (split >= 0.5) & (split < 0.75), split >= 0.75
    torch.manual_seed(seed)
    net = Net(model, x.shape[1], int(data.y.max()) + 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    best, kept = -1.0, 0.0
    for epoch in range(epochs):
        net.train()
        optimizer.zero_grad()
        out = net(x, mean, edges)
        torch.nn.functional.cross_entropy(out[train], data.y[train]).backward()
        optimizer.step()
        if epoch % 2 == 0:
            continue
        net.eval()
        with torch.no_grad():
            right = net(x, mean, edges).argmax(1) == data.y
        if (now := float(right[valid].float().mean())) > best:
            best, kept = now, float(right[test].float().mean())
    return 100 * kept


def runs(name: str, arm: str, wanted: list[tuple[str, int]], epochs: int) -> Iterator[dict]:
    """Yields the rows of one graph with one kind of features; `wanted` are models and seeds."""
    data = load(name)
    x, smaller, lost = data.x, 1.0, 0.0
    if arm != "fp32":
        packed = quantize(data, spec=SPECS[arm])
        x = packed.x_codec.decode(packed.x)
        smaller = data.x.shape[1] * 4 / packed.x_codec.row_bytes
        lost = float((x - data.x).norm() / data.x.norm())
    matrices = averaging(data)
    mean = None
    for model, seed in wanted:
        if model == "SAGE" and mean is None:
            mean = matrices["SAGE"] @ x
        began = time.process_time()
        got = score(
            data,
            x,
            mean if model == "SAGE" else None,
            matrices.get(model, data.edge_index),
            model,
            seed,
            epochs,
        )
        yield {
            "graph": name, "features": arm, "model": model, "seed": seed, "epochs": epochs,
            "accuracy": round(got, 4), "smaller": round(smaller, 1), "error": round(lost, 4),
            "cpu_s": round(time.process_time() - began, 1),
        }  # fmt: skip


def changes(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (graph, features, figures), of the seeds that all models have with and without."""
    score_of = {(r["graph"], r["features"], r["model"], r["seed"]): r["accuracy"] for r in rows}
    about = {(r["graph"], r["features"]): (r["smaller"], r["error"]) for r in rows}
    for graph, arm in sorted(
        about, key=lambda key: (list(_graphs()).index(key[0]), _place(key[1]))
    ):
        paired: dict[int, dict[str, float]] = {}
        for (g, a, model, seed), value in score_of.items():
            base = score_of.get((graph, "fp32", model, seed))
            if (g, a) == (graph, arm) and base is not None:
                paired.setdefault(seed, {})[model] = value - base
        whole = [seed for seed, by in paired.items() if len(by) == len(MODELS)]
        if not whole:
            continue
        by_seed = [statistics.mean(paired[seed].values()) for seed in whole]
        yield graph, arm, {
            "smaller": about[graph, arm][0],
            "error": about[graph, arm][1],
            "seeds": len(whole),
            "accuracy": {
                m: statistics.mean(score_of[graph, arm, m, s] for s in whole) for m in MODELS
            },
            "by_model": {
                m: statistics.mean(paired[s][m] for s in whole) for m in MODELS
            },
            "change": statistics.mean(by_seed),
            "stderr": statistics.stdev(by_seed) / len(by_seed) ** 0.5 if len(by_seed) > 1 else 0.0,
        }  # fmt: skip


def _graphs() -> Iterator[str]:
    for name in SETS:
        yield from (name, name + "+svd")


def _place(arm: str) -> int:
    return ["fp32", *SPECS].index(arm)


def table(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Prints the change of accuracy of every graph and kind of features."""
    shown = []
    for graph, arm, got in changes(rows):
        figures = [f"{got['accuracy'][m]:.1f}" for m in MODELS] if arm == "fp32" else [
            f"{got['by_model'][m]:+.2f}" for m in MODELS
        ]  # fmt: skip
        total = "" if arm == "fp32" else f"{got['change']:+.2f} +- {got['stderr']:.2f}"
        shown.append(
            (graph, arm, f"{got['smaller']:.0f}x", f"{got['error']:.3f}", got["seeds"],
             *figures, total)
        )  # fmt: skip
    head = ("graph", "features", "smaller", "error", "seeds", *MODELS, "change, points")
    show("test accuracy in percent on fp32, then the change by features", head, shown, path)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the changes with their standard errors."""
    from matplotlib.figure import Figure

    found = [row for row in changes(rows) if row[1] != "fp32"]
    graphs = [g for g in _graphs() if any(row[0] == g for row in found)]
    arms = [a for a in SPECS if any(row[1] == a for row in found)]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for at, arm in enumerate(arms):
        mine = {g: got for g, a, got in found if a == arm}
        x = [
            i + (at - (len(arms) - 1) / 2) * 0.8 / len(arms)
            for i, g in enumerate(graphs)
            if g in mine
        ]
        axes.errorbar(
            x, [mine[g]["change"] for g in graphs if g in mine],
            [mine[g]["stderr"] for g in graphs if g in mine], fmt="o", ms=4, lw=1.2, label=arm,
        )  # fmt: skip
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(graphs)), graphs, rotation=20, ha="right")
    axes.set_ylabel("test accuracy minus fp32, points")
    axes.legend(fontsize=8, ncols=2)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Runs what is not yet among the rows and prints the table; says so where data is absent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", nargs="+", default=list(_graphs()), choices=list(_graphs()))
    parser.add_argument("--specs", nargs="+", default=list(SPECS), choices=SPECS)
    parser.add_argument("--seeds", type=int, help="at most this many")
    parser.add_argument("--epochs", type=int, help="instead of 30 to 60, by graph")
    parser.add_argument("--rows", type=Path, help="one line a run; what it holds is not run again")
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    parser.add_argument("--plot", type=Path, help="also draw the changes, into this PNG or SVG")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not folder().is_dir():
        print(f"no graphs at {folder()}; set BIFEAT_GRAPHS")
        return 0
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    rows: list[dict[str, Any]] = []
    if options.rows is not None and options.rows.exists():
        # The last line may have been cut by a kill.
        lines = options.rows.read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]
    done = {(r["graph"], r["features"], r["model"], r["seed"], r["epochs"]) for r in rows}
    for arm in () if options.only_table else ("fp32", *options.specs):
        for name in options.sets:
            seeds, epochs = SETS[name.partition("+")[0]]
            seeds, epochs = min(options.seeds or seeds, seeds), options.epochs or epochs
            wanted = [
                (model, seed)
                for model in MODELS
                for seed in range(seeds)
                if (name, arm, model, seed, epochs) not in done
            ]
            if not wanted:
                continue
            for row in runs(name, arm, wanted, epochs):
                rows.append(row)
                line = json.dumps(row)
                print(line, file=sys.stderr, flush=True)
                if options.rows is not None:
                    with options.rows.open("a") as file:
                        file.write(f"{line}\n")
    table(rows, options.json)
    if options.plot is not None:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
