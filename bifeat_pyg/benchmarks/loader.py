"""One epoch of NodeLoader end to end: bytes per batch, seconds, memory of a worker.

The same sampler throughout; features as fp32 Data, as an fp16 memory map (PyG reads NumPy memory
maps, the batch is cast to float32), as a uniform quantizer of one range for the whole matrix in
plain torch (8-bit codes, scaled in the consumer), and packed on disk by us. Each epoch ends with
float32 features in the training process. A worker's memory is what it holds alone (unique set size)
at the end of its epoch.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measure import arguments, ratio, show
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from bifeat_pyg import (
    SQ,
    VQ,
    CSCNeighborSampler,
    QuantizedFeatureStore,
    QuantizedLoader,
    quantize_file,
)


def unique_mib(path: str = "/proc/self/smaps_rollup") -> float:
    """Returns the memory that this process alone holds, MiB."""
    with open(path, encoding="utf-8") as file:
        kib = sum(int(line.split()[1]) for line in file if line.startswith("Private_"))
    return kib / 1024


class Noted:
    """A transform that writes down a worker's memory at each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, batch: Data) -> Data:
        """Returns the batch as it is."""
        if torch.utils.data.get_worker_info() is not None and os.path.exists(
            "/proc/self/smaps_rollup"
        ):
            (self.folder / str(os.getpid())).write_text(str(unique_mib()))
        return batch


def epoch(loader: Iterable[Any], finish: Callable[[Any], torch.Tensor]) -> tuple[float, int]:
    """Returns seconds and the bytes of features of a batch, as they came from the loader."""
    began = time.perf_counter()
    moved = count = 0
    for batch in loader:
        moved += batch.x.numel() * batch.x.element_size()
        count += 1
        finish(batch)
    return time.perf_counter() - began, moved // count


def main() -> None:
    """Prints a table for each number of workers."""
    options = arguments(__doc__, nodes=200_000, edges=2_000_000, columns=128, batches=60, rounds=3)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(options.nodes, options.columns)
    edge_index = torch.randint(0, options.nodes, (2, options.edges))
    seeds = torch.randperm(options.nodes)[: options.batches * 512]
    low, step = float(x.min()), float(x.max() - x.min()) / 255
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        half = np.lib.format.open_memmap(folder / "half.npy", "w+", np.float16, tuple(x.shape))
        half[:] = x.numpy()
        half.flush()
        stores = {
            label: quantize_file(x, folder / label, spec)
            for label, spec in {
                "8 bit": SQ(8), "4 bit": SQ(4), "VQ 8x256": VQ(8, 256, sample_rows=16384)
            }.items()
        }  # fmt: skip
        codes = ((x - low) / step).round().to(torch.uint8)
        graph = Data(edge_index=edge_index, num_nodes=options.nodes)
        arms: dict[str, tuple[Any, Callable[[Any], torch.Tensor]]] = {
            "fp32 Data": (Data(x=x, edge_index=edge_index), lambda b: b.x),
            "fp16 memory map": (
                Data(x=np.load(folder / "half.npy", mmap_mode="r"), edge_index=edge_index,
                     num_nodes=options.nodes),
                lambda b: torch.as_tensor(b.x).float(),
            ),
            "one range, 8 bit, torch": (
                Data(x=codes, edge_index=edge_index), lambda b: b.x.float() * step + low
            ),
        }  # fmt: skip
        for label, store in stores.items():
            codec = store.codec(None, "x")
            arms[f"ours, {label}"] = ((store, graph), lambda b, c=codec: c.decode(b.x))
        sampler = CSCNeighborSampler(graph, [10, 5], seed=0)
        for workers in (0, 2):
            seconds: dict[str, list[float]] = {arm: [] for arm in arms}
            moved: dict[str, int] = {}
            held: dict[str, float] = {}
            for _ in range(options.rounds):
                for arm, (source, finish) in arms.items():
                    notes = Path(tempfile.mkdtemp(dir=folder))
                    loader = NodeLoader(
                        source, sampler, input_nodes=seeds, batch_size=512, num_workers=workers,
                        transform=Noted(notes),
                    )  # fmt: skip
                    spent, moved[arm] = epoch(loader, finish)
                    seconds[arm].append(spent)
                    figures = [float(path.read_text()) for path in notes.iterdir()]
                    held[arm] = max(figures, default=0.0)
            rows = []
            for arm in arms:
                speed, spread = ratio(seconds, "fp32 Data", arm)
                middle = sorted(seconds[arm])[len(seconds[arm]) // 2]
                memory = f"{held[arm]:.0f}" if workers else "-"
                rows.append((arm, moved[arm], f"{middle:.2f}", f"{speed:.2f} ({spread})", memory))
            show(
                f"{options.batches} batches of 512 seeds x [10, 5], {options.nodes} x "
                f"{options.columns}, {workers} workers",
                ("features", "feature bytes a batch", "seconds an epoch", "speed (quartiles)",
                 "MiB of a worker"),
                rows,
                options.json if workers else None,
            )  # fmt: skip
            print()
        # The wrapper adds no more than the decode measured above.
        store = QuantizedFeatureStore.open(folder / "4 bit")
        for batch in QuantizedLoader(NodeLoader((store, graph), sampler, input_nodes=seeds[:64])):
            assert torch.equal(batch.x, store.fetch(None, "x", batch.n_id))


if __name__ == "__main__":
    main()
