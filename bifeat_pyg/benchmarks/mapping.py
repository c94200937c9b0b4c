"""Memory of a store's mapping in the processes of a NodeLoader: one copy, however many workers.

Each worker reads all rows of the store. Of its mapping, the system tells what is in memory (Rss),
the process's share of it (Pss: a page that n processes map counts 1/n in each) and what is a copy
of its own (Private_Dirty). The shares of all processes add up to no more than the file, once.
"""

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from _measure import arguments, show
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from bifeat_pyg import SQ, CSCNeighborSampler, QuantizedFeatureStore, quantize_file

SMAPS = Path("/proc/self/smaps")


def mapped(suffix: str) -> Data:
    """Returns KiB of this process's mappings of files with this suffix."""
    found = dict.fromkeys(("Rss", "Pss", "Private_Dirty"), 0)
    counts = False
    for line in SMAPS.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if line[:1] in "0123456789abcdef":
            counts = line.endswith(suffix)
        elif counts and key in found:
            found[key] += int(value.split()[0])
    return Data(**{name: torch.tensor([kib]) for name, kib in found.items()})


class Look:
    """A transform that reads the whole store and gives what the worker has mapped of it."""

    def __init__(self, store: QuantizedFeatureStore) -> None:
        self.store = store

    def __call__(self, batch: Any) -> Any:
        """Returns figures in place of the batch."""
        self.store.get_tensor(None, "x", torch.arange(self.store.table(None, "x").rows)).sum()
        figures = mapped(".codes")
        figures.worker = torch.utils.data.get_worker_info().id
        return figures


def main() -> int:
    """Prints the table."""
    options = arguments(__doc__, rows=1_000_000, columns=128, workers=4)
    if not SMAPS.exists():
        print("reads /proc; not on this system")
        return 0
    warnings.filterwarnings("ignore", message="This DataLoader will create .* worker")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "store"
        quantize_file(torch.randn(options.rows, options.columns), path, SQ(8))
        file_kib = (path / "0_x.codes").stat().st_size / 1024
        rows = []
        for workers in (1, 2, options.workers):
            store = QuantizedFeatureStore.open(path)
            edges = torch.randint(0, options.rows, (2, 1000))
            graph = Data(edge_index=edges, num_nodes=options.rows)
            loader = NodeLoader(
                (store, graph), CSCNeighborSampler(graph, [1]), batch_size=1,
                input_nodes=torch.arange(8 * workers), num_workers=workers, transform=Look(store),
            )  # fmt: skip
            # The last word of each worker: by then all have read everything.
            last = {int(figures.worker): figures for figures in loader}
            total = {key: sum(int(f[key]) for f in last.values()) / 1024 for key in ("Rss", "Pss")}
            copied = sum(int(f.Private_Dirty) for f in last.values())
            rows.append(
                (workers, f"{file_kib / 1024:.0f}", f"{total['Rss']:.0f}", f"{total['Pss']:.0f}",
                 copied)
            )  # fmt: skip
    head = ("workers", "MiB of codes", "MiB mapped, summed", "MiB held, summed shares",
            "KiB copied")  # fmt: skip
    show("one mapping for all workers", head, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
