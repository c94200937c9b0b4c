"""k-means codebooks: faiss where it is installed, else C or chunked torch."""

import importlib.util

import torch
from torch import Tensor

from bifeat_pyg.kernels import cpu

_ITERATIONS = 20
_ENOUGH = 1e-3  # relative gain of an iteration below which it stops
_CHUNK = 1 << 23  # scores held at a time by the torch path


def has_faiss() -> bool:
    """Returns whether faiss can be imported (without importing it)."""
    return importlib.util.find_spec("faiss") is not None


def kmeans(x_NW: Tensor, length: int, metric: str, seed: int, *, faiss: bool = True) -> Tensor:
    """Returns a codebook of `length` centroids, float32 [L, W].

    Args:
        x_NW: float32, at least `length` rows.
        length: number of centroids.
        metric: "l2", or "cosine": rows choose by direction, centroids are means of the raw rows.
        seed: of the start.
        faiss: use it if it is installed; only for "l2".
    """
    if faiss and metric == "l2" and has_faiss():
        return _faiss(x_NW, length, seed)
    generator = torch.Generator().manual_seed(seed)
    book_LW = x_NW[_start(x_NW, length, generator)].clone()
    before = float("inf")
    for _ in range(_ITERATIONS):
        code_N, cost_N = assign(x_NW, book_LW, metric)
        counts_L = torch.bincount(code_N, minlength=length)
        sums_LW = torch.zeros_like(book_LW).index_add_(0, code_N, x_NW)
        used_L = counts_L > 0
        book_LW[used_L] = sums_LW[used_L] / counts_L[used_L].unsqueeze(1)
        empty = (~used_L).nonzero().flatten()
        if empty.numel():
            # An unused centroid goes to one of the rows that are served worst.
            worst = cost_N.topk(min(empty.numel(), cost_N.numel())).indices
            book_LW[empty[: worst.numel()]] = x_NW[worst]
        cost = float(cost_N.double().mean())
        if before - cost <= _ENOUGH * cost and not empty.numel():
            break
        before = cost
    return book_LW


def assign(x_NW: Tensor, book_LW: Tensor, metric: str) -> tuple[Tensor, Tensor]:
    """Returns each row's centroid, int64 [N], and its cost, float32 [N].

    The cost is the squared distance, or 1 - cosine (1 for a row of zeros).
    """
    if metric == "cosine":
        book_LW = torch.nn.functional.normalize(book_LW, dim=1)
        norm_N = x_NW.norm(dim=1)
        code_N, score_N = _nearest(x_NW, book_LW, book_LW.new_zeros(book_LW.shape[0]))
        return code_N, 1 + score_N / norm_N.clamp_min(1e-30)
    code_N, score_N = _nearest(x_NW, book_LW, book_LW.square().sum(1) / 2)
    return code_N, (2 * score_N + x_NW.square().sum(1)).clamp_min(0)


def _nearest(x_NW: Tensor, book_LW: Tensor, offset_L: Tensor) -> tuple[Tensor, Tensor]:
    if cpu.available() and x_NW.device.type == "cpu" and x_NW.stride(1) == 1:
        return cpu.assign(x_NW, book_LW, offset_L)
    rows = max(1, _CHUNK // book_LW.shape[0])
    found = [(offset_L - part @ book_LW.t()).min(dim=1) for part in torch.split(x_NW, rows)]
    if not found:
        return x_NW.new_zeros(0, dtype=torch.long), x_NW.new_zeros(0)
    return torch.cat([f.indices for f in found]), torch.cat([f.values for f in found])


def _start(x_NW: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Returns `length` row numbers to start from, rows that are not all zero first."""
    order = torch.randperm(x_NW.shape[0], generator=generator)
    nonzero = (x_NW[order] != 0).any(dim=1)
    return torch.cat((order[nonzero], order[~nonzero]))[:length]


def _faiss(x_NW: Tensor, length: int, seed: int) -> Tensor:
    import faiss

    rows = x_NW.contiguous().numpy()
    trainer = faiss.Kmeans(
        x_NW.shape[1], length, niter=_ITERATIONS, seed=seed, verbose=False,
        min_points_per_centroid=1, max_points_per_centroid=max(256, -(-len(rows) // length)),
    )  # fmt: skip
    trainer.train(rows)
    return torch.from_numpy(trainer.centroids.copy())
