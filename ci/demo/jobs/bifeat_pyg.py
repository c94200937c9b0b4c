"""bifeat_pyg: GraphSAGE on a nearest-neighbour graph of the digits, features fp32 and packed."""

import time
from collections.abc import Iterable
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv

import bifeat_pyg
from ci.demo.job import Measure, Progress, Result, main

EPOCHS = 15
ARMS = {"fp32": None, "4 bit": bifeat_pyg.SQ(4), "VQ 8x256": bifeat_pyg.VQ(8, 256)}


class Sage(torch.nn.Module):
    """Two layers of GraphSAGE."""

    def __init__(self, columns: int, classes: int) -> None:
        super().__init__()
        self.first = SAGEConv(columns, 64)
        self.second = SAGEConv(64, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Returns a score for each node and class."""
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


def digits() -> Data:
    """Returns the digits as a graph: each joined with its 8 nearest; half of them for training."""
    pixels, labels = load_digits(return_X_y=True)
    near = kneighbors_graph(pixels, 8).tocoo()
    both = torch.stack([torch.from_numpy(end).long() for end in (near.row, near.col)])
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.tensor(pixels / 16, dtype=torch.float32),
        y=torch.tensor(labels),
        edge_index=torch.cat((both, both.flip(0)), dim=1),
        train_mask=torch.rand(len(labels), generator=generator) < 0.5,
    )


def train(graph: Data, packed: Data, progress: Progress, name: str) -> dict[str, Any]:
    """Trains on `packed` (which may be plain) and returns accuracy by epoch, bytes and seconds."""
    torch.manual_seed(0)
    model = Sage(graph.num_features, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = bifeat_pyg.CSCNeighborSampler(packed, num_neighbors=[8, 4])
    settings: dict[str, Any] = {"node_sampler": sampler, "batch_size": 128}
    raw = NodeLoader(packed, input_nodes=graph.train_mask, shuffle=True, **settings)
    moved: list[int] = []
    loader = bifeat_pyg.QuantizedLoader(Counted(raw, moved))
    test = bifeat_pyg.QuantizedLoader(NodeLoader(packed, input_nodes=~graph.train_mask, **settings))
    accuracy, spent = [], 0.0
    for _ in range(EPOCHS):
        began = time.perf_counter()
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
        spent += time.perf_counter() - began
        accuracy.append(score(model, test))
    progress(f"{name}: test accuracy {accuracy[-1]:.1%} after {EPOCHS} epochs, {spent:.1f} s")
    return {"accuracy": accuracy, "moved": sum(moved) / len(moved), "seconds": spent}


@torch.no_grad()
def score(model: Sage, loader: Iterable[Data]) -> float:
    """Returns the share of seed nodes classified right."""
    model.eval()
    right = total = 0
    for batch in loader:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        right += int((out.argmax(1) == batch.y[: batch.batch_size]).sum())
        total += batch.batch_size
    return right / total


class Counted:
    """Iterates a loader and notes the bytes of features of each batch, as they travel."""

    def __init__(self, loader: NodeLoader, moved: list[int]) -> None:
        self.loader, self.moved = loader, moved

    def __iter__(self) -> Any:
        for batch in self.loader:
            self.moved.append(batch.x.numel() * batch.x.element_size())
            yield batch


def run(progress: Progress) -> Result:
    """Trains the same model on fp32 features and on packed ones."""
    import matplotlib.pyplot as plt

    torch.set_num_threads(1)  # batches are small: a second thread only waits
    graph = digits()
    stored = {"fp32": graph.x.numel() * 4}
    arms = {}
    for name, spec in ARMS.items():
        packed = graph
        if spec is not None:
            packed = bifeat_pyg.quantize(graph, spec=spec)
            stored[name] = packed.x.numel() + packed.x_codec.param_bytes
        arms[name] = train(graph, packed, progress, name)

    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3), width_ratios=(3, 2))
    epochs = range(1, EPOCHS + 1)
    for name, style in zip(ARMS, ("-", "--", ":"), strict=True):
        left.plot(epochs, [100 * a for a in arms[name]["accuracy"]], style, label=name)
        right.bar(name, arms[name]["moved"] / 1024)
        right.annotate(
            f"{arms[name]['moved'] / 1024:.1f}",
            (name, arms[name]["moved"] / 1024),
            ha="center",
            va="bottom",
        )
    left.set(xlabel="epoch", ylabel="test accuracy, %")
    left.legend()
    right.set(ylabel="feature KiB moved per batch")
    right.margins(y=0.15)
    figure.tight_layout()

    plain, four, vector = (arms[name] for name in ARMS)
    seconds = [
        Measure(f"training seconds, {name}", plain["seconds"], arms[name]["seconds"], "s")
        for name in ("4 bit", "VQ 8x256")
    ]
    return Result(
        data=f"scikit-learn digits as a graph: {graph.num_nodes} nodes, {graph.num_edges} edges",
        without=f"{plain['moved'] / 1024:.0f} KiB a batch, {plain['accuracy'][-1]:.1%}",
        with_plugin=(
            f"{four['moved'] / 1024:.0f} KiB, {four['accuracy'][-1]:.1%} (4 bit); "
            f"{vector['moved'] / 1024:.0f} KiB, {vector['accuracy'][-1]:.1%} (VQ)"
        ),
        measures=[
            Measure("feature bytes moved per batch, 4 bit", plain["moved"], four["moved"], "B"),
            Measure("feature bytes moved per batch, VQ", plain["moved"], vector["moved"], "B"),
            Measure("feature bytes stored, 4 bit", stored["fp32"], stored["4 bit"], "B"),
            Measure("feature bytes stored, VQ", stored["fp32"], stored["VQ 8x256"], "B"),
            Measure("test accuracy, 4 bit", plain["accuracy"][-1], four["accuracy"][-1]),
            Measure("test accuracy, VQ", plain["accuracy"][-1], vector["accuracy"][-1]),
            *seconds,
        ],
        caption=(
            "GraphSAGE on the digits as a graph of nearest neighbours. Left: test accuracy by "
            "epoch, features as fp32, 4 bit and vector-quantized. Right: bytes of features that "
            "each batch moves. The codebooks of so small a graph weigh more than its codes."
        ),
        figure=figure,
    )


if __name__ == "__main__":
    main(run)
