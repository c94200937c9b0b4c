"""Trains GraphSAGE on the digits as a graph of nearest neighbours, with packed features.

    python train_digits.py --bits 2
    python train_digits.py --vq 8x256 --epochs 30 --device cuda

Needs scikit-learn beside bifeat-pyg.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GraphSAGE

from bifeat_pyg import SQ, VQ, CSCNeighborSampler, QuantizedFeatureStore, QuantizedLoader


def main() -> None:
    """Trains and prints the test accuracy of each epoch."""
    parser = argparse.ArgumentParser(description="GraphSAGE on packed features")
    parser.add_argument("--bits", type=int, default=4, choices=(1, 2, 4, 8, 16))
    parser.add_argument("--vq", help="WIDTHxLENGTH instead of bits, e.g. 8x256")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)

    pixels, labels = load_digits(return_X_y=True)
    near = kneighbors_graph(pixels, 8).tocoo()
    edges = torch.stack([torch.from_numpy(end).long() for end in (near.row, near.col)])
    data = Data(
        x=torch.tensor(pixels / 16, dtype=torch.float32),
        y=torch.tensor(labels),
        edge_index=torch.cat((edges, edges.flip(0)), dim=1),
        train_mask=torch.rand(len(labels)) < 0.5,
    )
    spec = VQ(*map(int, options.vq.split("x"))) if options.vq else SQ(options.bits)
    store = QuantizedFeatureStore.from_data(data, spec=spec)
    print(store.report())

    sampler = CSCNeighborSampler((store, data), num_neighbors=[8, 4])
    train, test = (
        QuantizedLoader(
            NodeLoader((store, data), sampler, input_nodes=nodes, batch_size=128, shuffle=True),
            device=options.device,
        )
        for nodes in (data.train_mask, ~data.train_mask)
    )
    model = GraphSAGE(data.num_features, 64, num_layers=2, out_channels=10).to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, options.epochs + 1):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
        model.eval()
        right = total = 0
        with torch.no_grad():
            for batch in test:
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                right += int((out.argmax(1) == batch.y[: batch.batch_size]).sum())
                total += batch.batch_size
        print(f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {right / total:.1%}")


if __name__ == "__main__":
    main()
