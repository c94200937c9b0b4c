"""Test accuracy on packed features minus that on fp32, with its standard error, on real graphs.

Two layers, 32 hidden, full batch, random 50/25/25 splits, test score at best validation; one seed
is one split and one initialization, the same for every quantizer, so differences are paired. "+svd"
are 128 dense floats by TruncatedSVD of the bag of words. Reads the graphs of an optional data
folder: BIFEAT_GRAPHS, or ../shared/data/graphs from the repository's root.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from _measure import show
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

from bifeat_pyg import SQ, VQ, paper, quantize

SETS = ("cora", "citeseer", "amazon_photo", "amazon_cs", "coauthor_cs")
MODELS = {"SAGE": GraphSAGE, "GCN": GCN, "GAT": GAT}
SPECS = {
    "8 bit": SQ(8),
    "4 bit": SQ(4),
    "2 bit": SQ(2),
    "1 bit": SQ(1),
    "VQ 8x256": VQ(8, 256),
    "paper 4 bit": paper.sq(4),
    "paper 1 bit": paper.sq(1),
    "paper VQ 16x2048": paper.MAG240M,
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


def score(data: Data, x: torch.Tensor, model: str, seed: int, epochs: int) -> float:
    """Returns the test accuracy, in percent, of one seed."""
    generator = torch.Generator().manual_seed(seed)
    split = torch.rand(data.num_nodes, generator=generator)
    train, valid, test = split < 0.5, (split >= 0.5) & (split < 0.75), split >= 0.75
    torch.manual_seed(seed)
    net = MODELS[model](
        x.shape[1], 32, num_layers=2, out_channels=int(data.y.max()) + 1, dropout=0.5
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    best, kept = -1.0, 0.0
    for _ in range(epochs):
        net.train()
        optimizer.zero_grad()
        out = net(x, data.edge_index)
        torch.nn.functional.cross_entropy(out[train], data.y[train]).backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            right = net(x, data.edge_index).argmax(1) == data.y
        if (now := float(right[valid].float().mean())) > best:
            best, kept = now, float(right[test].float().mean())
    return 100 * kept


def main() -> int:
    """Prints a table for each set; says so where the data is absent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [name + kind for name in SETS for kind in ("", "+svd")]
    parser.add_argument("--sets", nargs="+", default=every)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--specs", nargs="+", default=list(SPECS), choices=SPECS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not folder().is_dir():
        print(f"no graphs at {folder()}; set BIFEAT_GRAPHS")
        return 0
    torch.set_num_threads(1)
    rows = []
    for name in options.sets:
        data = load(name)
        arms = {"fp32": (data.x, 1.0, 0.0)}
        for spec in options.specs:
            packed = quantize(data, spec=SPECS[spec])
            x = packed.x_codec.decode(packed.x)
            lost = float((x - data.x).norm() / data.x.norm())
            arms[spec] = (x, data.x.shape[1] * 4 / packed.x_codec.row_bytes, lost)
        for model in options.models:
            scores = {
                arm: [score(data, x, model, s, options.epochs) for s in range(options.seeds)]
                for arm, (x, _, _) in arms.items()
            }
            for arm, (_, smaller, lost) in arms.items():
                pairs = zip(scores[arm], scores["fp32"], strict=True)
                change = [a - b for a, b in pairs]
                error = statistics.stdev(change) / len(change) ** 0.5 if len(change) > 1 else 0
                middle = statistics.mean(scores[arm])
                delta = "" if arm == "fp32" else f"{statistics.mean(change):+.2f} +- {error:.2f}"
                rows.append(
                    (name, model, arm, f"{smaller:.0f}x", f"{lost:.3f}", f"{middle:.2f}", delta)
                )
            # A long run: what is known is shown as it comes.
            for row in rows[-len(arms) :]:
                print("  ".join(row), file=sys.stderr, flush=True)
    head = ("graph", "model", "features", "smaller", "error", "accuracy %", "change, points")
    show(f"test accuracy, {options.seeds} seeds", head, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
