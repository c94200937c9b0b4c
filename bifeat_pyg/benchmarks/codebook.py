"""Seconds to fit a k-means codebook, and its error: faiss (where installed), our C, our torch.

65,536 sub-vectors of 16 columns, as `VQ` fits them, one thread, for codebooks of 256 and 2,048
entries. Where faiss is not installed `VQ` takes the C, and without a C compiler the torch.
"""

import statistics
import time

import torch
from _measure import arguments, show

from bifeat_pyg.kernels import cpu
from bifeat_pyg.quantizers._kmeans import assign, has_faiss, kmeans


def main() -> None:
    """Prints the table."""
    options = arguments(__doc__, rows=65_536, width=16, rounds=3)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(512, options.width, generator=generator)
    chosen = torch.randint(0, 512, (options.rows,), generator=generator)
    noise = torch.randn(options.rows, options.width, generator=generator)
    x = centers[chosen] + 0.7 * noise
    with_c = cpu.available
    cases = {"torch": (False, False)}
    if with_c():
        cases["C"] = (True, False)
    if has_faiss():
        import faiss

        faiss.omp_set_num_threads(1)
        cases["faiss"] = (with_c(), True)
    rows = []
    for length in (256, 2048):
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        errors: dict[str, list[float]] = {name: [] for name in cases}
        for seed in range(options.rounds):
            for name, (native, faiss_too) in cases.items():
                cpu.available = lambda native=native: native
                began = time.process_time()
                book = kmeans(x, length, "l2", seed, faiss=faiss_too)
                seconds[name].append(time.process_time() - began)
                cpu.available = with_c
                cost = assign(x, book, "l2")[1].mean() / x.square().sum(1).mean()
                errors[name].append(float(cost) ** 0.5)
        for name in cases:
            spread = f"{min(seconds[name]):.2f}-{max(seconds[name]):.2f}"
            rows.append(
                (length, name, f"{statistics.median(seconds[name]):.2f}", spread,
                 f"{statistics.mean(errors[name]):.4f}")
            )  # fmt: skip
    show(
        f"k-means of {options.rows} x {options.width}",
        ("entries", "by", "CPU seconds", "spread", "error"),
        rows,
        options.json,
    )


if __name__ == "__main__":
    main()
