"""Edges sampled per second on one thread: CSCNeighborSampler against plain torch and torch-sparse.

200,000 nodes, 4M edges, 1,024 seeds, [15, 10] neighbours. "plain torch" draws with replacement and
numbers nodes by torch.unique; torch-sparse is measured where it is installed.
"""

import importlib.util
import statistics
import time

import torch
from _measure import arguments, interleaved, ratio, show
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

from bifeat_pyg import CSCNeighborSampler
from bifeat_pyg.kernels import cpu


def plain(sampler: CSCNeighborSampler, seeds: torch.Tensor, hops: list[int]) -> int:
    """Returns the number of edges that a short torch program samples (with replacement)."""
    (columns,) = sampler._graph.columns.values()
    nodes, frontier, edges = seeds, seeds, 0
    for k in hops:
        begin, degree = columns.colptr[frontier], columns.colptr.diff()[frontier]
        has = degree > 0
        pick = (torch.rand(int(has.sum()), k) * degree[has, None]).long()
        sources = columns.row[begin[has, None] + pick].flatten()
        edges += sources.numel()
        before = nodes.numel()
        nodes, _ = torch.unique(torch.cat((nodes, sources)), return_inverse=True)
        frontier = nodes[before:] if nodes.numel() > before else nodes[:0]
    return edges


def main() -> None:
    """Prints the table."""
    options = arguments(__doc__, nodes=200_000, edges=4_000_000, seeds=1024, rounds=15)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hops = [15, 10]
    data = Data(
        edge_index=torch.randint(0, options.nodes, (2, options.edges)), num_nodes=options.nodes
    )
    sampler = CSCNeighborSampler(data, hops)
    counted: dict[str, int] = {}

    def draw(name: str) -> None:
        seeds = torch.randint(0, options.nodes, (options.seeds,)).unique()
        counted[name] = sampler.sample_from_nodes(NodeSamplerInput(None, seeds)).row.numel()

    def draw_plain() -> None:
        seeds = torch.randint(0, options.nodes, (options.seeds,)).unique()
        counted["plain torch"] = plain(sampler, seeds, hops)

    def without_c() -> None:
        available = cpu.available
        cpu.available = lambda: False
        try:
            draw("ours, numpy")
        finally:
            cpu.available = available

    cases = {"ours, numpy": without_c, "plain torch": draw_plain}
    if cpu.available():
        cases["ours, C"] = lambda: draw("ours, C")
    if importlib.util.find_spec("torch_sparse") is not None:
        import torch_sparse  # noqa: F401

        (columns,) = sampler._graph.columns.values()

        def sparse() -> None:
            seeds = torch.randint(0, options.nodes, (options.seeds,)).unique()
            out = torch.ops.torch_sparse.neighbor_sample(
                columns.colptr, columns.row, seeds, hops, False, True
            )
            counted["torch-sparse"] = out[1].numel()

        cases["torch-sparse"] = sparse
    seconds = interleaved(cases, options.rounds, clock=time.process_time)
    rows = []
    sparse_speed = None
    if "torch-sparse" in cases:
        sparse_speed = counted["torch-sparse"] / statistics.median(seconds["torch-sparse"])
    for name in cases:
        speed, spread = ratio(seconds, "plain torch", name)
        middle = sorted(seconds[name])[len(seconds[name]) // 2]
        rows.append(
            (
                name,
                counted[name],
                f"{counted[name] / middle / 1e6:.1f} M",
                f"{speed:.2f} ({spread})",
                f"{counted[name] / middle / sparse_speed:.1f}" if sparse_speed else "-",
            )
        )
    show(
        f"{options.seeds} seeds x {hops} of {options.nodes} nodes and {options.edges} edges, one "
        "thread",
        (
            "sampler",
            "edges",
            "edges a CPU second",
            "speed against plain torch (quartiles)",
            "edges a second, against torch-sparse",
        ),
        rows,
        options.json,
    )


if __name__ == "__main__":
    main()
