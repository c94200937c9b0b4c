"""Real data and the ways in which its clients differ, for the benchmarks."""

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

_FASHION = Path(
    os.environ.get(
        "FEDTUNE_FASHION_MNIST",
        Path(__file__).parents[2] / ".." / "shared" / "data" / "fashion_mnist",
    )
)


@dataclass(frozen=True)
class Source:
    """A data set cut in three: what clients hold, the server's proxy, the test set."""

    name: str
    pool: tuple[torch.Tensor, torch.Tensor]
    proxy: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    clients: int
    mean_size: int
    per_round: int
    rounds: int
    hidden: int

    @property
    def features(self) -> int:
        """Width of an input."""
        return int(self.pool[0].shape[1])

    def new_model(self) -> torch.nn.Module:
        """A perceptron with one hidden layer."""
        return torch.nn.Sequential(
            torch.nn.Linear(self.features, self.hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(self.hidden, 10),
        )


def digits(seed: int) -> Source:
    """scikit-learn's 1,797 digits: 450 test, 250 proxy, 20 clients of about 50."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels / 16, dtype=torch.float32)
    return _cut("digits", x, torch.tensor(labels), seed, 450, 250, 20, 50, 10, 20, 32)


def fashion(seed: int) -> Source:
    """Fashion-MNIST on its first 40 principal components: 10,000 test, 3,000 proxy, 50 clients.

    The components are those of the proxy, which the server has.
    """
    if not _FASHION.is_dir():
        raise SystemExit(f"{_FASHION} is missing; set FEDTUNE_FASHION_MNIST to its folder")
    x = np.concatenate([_idx(f"{part}-images-idx3-ubyte") for part in ("train", "t10k")])
    y = np.concatenate([_idx(f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")])
    flat = torch.tensor(x.reshape(len(x), -1) / 255.0, dtype=torch.float32)
    source = _cut(
        "fashion", flat, torch.tensor(y.astype(np.int64)), seed, 10000, 3000, 50, 200, 10, 25, 32
    )
    mean = source.proxy[0].mean(dim=0)
    _, _, v = torch.linalg.svd(source.proxy[0] - mean, full_matrices=False)
    project = v[:40].T
    scale = ((source.proxy[0] - mean) @ project).std()

    def reduced(part: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return ((part[0] - mean) @ project) / scale, part[1]

    return Source(
        "fashion", *(reduced(p) for p in (source.pool, source.proxy, source.test)),
        source.clients, source.mean_size, source.per_round, source.rounds, source.hidden,
    )  # fmt: skip


def _idx(name: str) -> np.ndarray:
    (path,) = _FASHION.glob(f"{name}*")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    dimensions = data[3]
    shape = np.frombuffer(data, ">i4", dimensions, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _cut(
    name: str, x: torch.Tensor, y: torch.Tensor, seed: int, test: int, proxy: int, *rest: int
) -> Source:
    order = torch.from_numpy(np.random.default_rng((seed, 0)).permutation(len(y)))
    parts = order[:test], order[test : test + proxy], order[test + proxy :]
    held, own, pool = ((x[i], y[i].to(torch.int64)) for i in parts)
    return Source(name, pool, own, held, *rest)


Clients = list[tuple[torch.Tensor, torch.Tensor]]


def federation(source: Source, regime: str, seed: int) -> Clients:
    """The clients of a regime.

    Raises:
        SystemExit: the regime is unknown.
    """
    if regime not in REGIMES:
        raise SystemExit(f"regime {regime!r} is unknown; known: {', '.join(REGIMES)}")
    rng = np.random.default_rng((seed, 1))
    skew, quality = REGIMES[regime]
    k = source.clients
    spread = 1.5 if regime == "size" else 0.3
    sizes = np.exp(rng.normal(0, spread, k))
    sizes = np.maximum(8, np.rint(sizes / sizes.mean() * source.mean_size)).astype(int)
    labels = source.pool[1].numpy()
    by_class = [rng.permutation(np.flatnonzero(labels == c)) for c in range(10)]
    used = np.zeros(10, dtype=int)
    clients: Clients = []
    for i in range(k):
        counts = rng.multinomial(sizes[i], _mix(skew, i, k, rng))
        rows = []
        for c, count in enumerate(counts):
            # Round and round: no example is used twice before all of its class are used once.
            rows.append(np.take(by_class[c], range(used[c], used[c] + count), mode="wrap"))
            used[c] += count
        index = torch.from_numpy(rng.permutation(np.concatenate(rows)))
        x, y = source.pool[0][index], source.pool[1][index]
        clients.append(_degrade(quality, x, y, i, rng))
    return clients


# regime: (label mix, quality)
REGIMES: dict[str, tuple[str, str]] = {
    "clean": ("iid", ""),
    "dirichlet-0.1": ("0.1", ""),
    "dirichlet-0.05": ("0.05", ""),
    "two-class": ("two", ""),
    "size": ("iid", ""),
    "mixture-20-single": ("20-single", ""),
    "mixture-10-single": ("10-single", ""),
    "mixture-20-two": ("20-two", ""),
    "noise": ("iid", "noise"),
    "gain": ("0.3", "gain"),
    "flip": ("iid", "flip"),
    "mixed": ("0.3", "noise gain"),
}


def _mix(skew: str, i: int, k: int, rng: np.random.Generator) -> np.ndarray:
    if skew == "iid":
        return np.full(10, 0.1)
    if skew == "two":
        return _classes(2, rng)
    if "-" in skew:
        share, kind = skew.split("-")
        if i < round(k * int(share) / 100):
            return np.full(10, 0.1)
        return _classes(1 if kind == "single" else 2, rng)
    weights = rng.gamma(float(skew), size=10) + 1e-12
    return weights / weights.sum()


def _classes(count: int, rng: np.random.Generator) -> np.ndarray:
    mix = np.zeros(10)
    mix[rng.permutation(10)[:count]] = 1 / count
    return mix


def _degrade(
    quality: str, x: torch.Tensor, y: torch.Tensor, i: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    for kind in quality.split():
        if kind == "gain":
            x = x * float(np.exp(rng.uniform(-1.3, 1.3)))
        elif i % 2:
            wrong = torch.from_numpy(rng.random(len(y)) < rng.uniform(0.3, 0.9))
            other = torch.from_numpy(rng.integers(0, 10, len(y)))
            # A flip sends every class to the next: a noise the emulator does not know.
            y = torch.where(wrong, (y + 1) % 10 if kind == "flip" else other, y)
    return x, y
