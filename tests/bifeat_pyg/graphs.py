"""Small graphs and features that several tests use."""

import torch
from torch_geometric.data import Data, HeteroData

from bifeat_pyg import SQ, VQ, paper

# One list for every suite that takes any quantizer.
SPECS = [
    SQ(1),
    SQ(2),
    SQ(4),
    SQ(8),
    SQ(16),
    SQ(4, scale="tensor"),
    SQ(2, fit_range="minmax"),
    paper.sq(1),
    paper.sq(2),
    paper.sq(4),
    paper.sq(8),
    paper.sq(16),
    VQ(8, 32),
    VQ(5, 300),
    VQ(4, 16, metric="cosine"),
    VQ(5, 64, stages=3),
]


def name(spec):
    fields = spec.to_dict()
    return "-".join(
        str(fields[k])
        for k in ("quantizer", "bits", "scale", "width", "metric", "stages")
        if k in fields
    )


def features(rows=400, columns=13, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-1, 1, columns) if columns else torch.ones(0)
    return torch.randn(rows, columns, generator=generator) * spread + spread.flip(0)


def graph(nodes=400, edges=3000, columns=13, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Data(
        x=features(nodes, columns, seed),
        edge_index=torch.randint(0, nodes, (2, edges), generator=generator),
        edge_attr=torch.randn(edges, 6, generator=generator),
        y=torch.randint(0, 4, (nodes,), generator=generator),
        train_mask=torch.rand(nodes, generator=generator) < 0.5,
    )


def hetero(papers=120, authors=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = HeteroData()
    data["paper"].x = features(papers, 16, seed)
    data["paper"].y = torch.randint(0, 3, (papers,), generator=generator)
    data["author"].x = features(authors, 7, seed + 1)

    def ends(sources, targets, count):
        return torch.stack(
            (
                torch.randint(0, sources, (count,), generator=generator),
                torch.randint(0, targets, (count,), generator=generator),
            )
        )

    data["paper", "cites", "paper"].edge_index = ends(papers, papers, 700)
    data["author", "writes", "paper"].edge_index = ends(authors, papers, 400)
    data["author", "writes", "paper"].edge_attr = torch.randn(400, 5, generator=generator)
    data["paper", "by", "author"].edge_index = ends(papers, authors, 300)
    return data
