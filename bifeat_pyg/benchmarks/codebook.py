"""Seconds to fit a k-means codebook, and its error: faiss (where installed), our C, our torch.

65,536 sub-vectors of 16 columns, as `VQ` fits them, one thread.
"""

import time

import torch
from _measure import arguments, show

from bifeat_pyg.kernels import cpu
from bifeat_pyg.quantizers._kmeans import assign, has_faiss, kmeans


def main() -> None:
    """Prints the table."""
    options = arguments(__doc__, rows=65_536, width=16, length=256, rounds=3)
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
    for name, (native, faiss_too) in cases.items():
        seconds, errors = [], []
        for seed in range(options.rounds):
            cpu.available = lambda native=native: native
            began = time.process_time()
            book = kmeans(x, options.length, "l2", seed, faiss=faiss_too)
            seconds.append(time.process_time() - began)
            cost = assign(x, book, "l2")[1].mean() / x.square().sum(1).mean()
            cost = assign(x, book, "l2")[1].mean() / x.square().sum(1).mean()
            errors.append(float(cost) ** 0.5)
        cpu.available = with_c
        middle, spread = (
            sorted(seconds)[len(seconds) // 2],
            f"{min(seconds):.2f}-{max(seconds):.2f}",
        )
        rows.append((name, f"{middle:.2f}", spread, f"{sum(errors) / len(errors):.4f}"))
    show(
        f"k-means of {options.rows} x {options.width}, {options.length} entries",
        ("by", "CPU seconds", "spread", "error"),
        rows,
        options.json,
    )


if __name__ == "__main__":
    main()
