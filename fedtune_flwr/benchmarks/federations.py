"""Real data and the ways in which its clients differ, for the benchmarks."""

import functools
import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

Pair = tuple[torch.Tensor, torch.Tensor]
Predict = Callable[[torch.Tensor], torch.Tensor]

_DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
_FASHION = Path(os.environ.get("FEDTUNE_FASHION_MNIST", _DATA / "fashion_mnist"))
_SHAKESPEARE = Path(os.environ.get("FEDTUNE_SHAKESPEARE", _DATA / "shakespeare" / "input.txt"))


@dataclass(frozen=True)
class Source:
    """A data set cut in three, and how large a federation of it is.

    Attributes:
        pool: what clients hold.
        proxy: what the server holds.
        test: what the global model is scored on.
        model: returns a fresh model.
        clients: how many.
        mean_size: examples of a client, on average.
        per_round: clients in a round.
        rounds: how many.
        roles: for natural clients, what each holds and what it is tested on.
    """

    pool: Pair
    proxy: Pair
    test: Pair
    model: Callable[[], torch.nn.Module]
    clients: int = 40
    mean_size: int = 100
    per_round: int = 8
    rounds: int = 20
    roles: tuple[tuple[Pair, Pair], ...] = ()

    @property
    def classes(self) -> int:
        """Number of labels."""
        return int(self.proxy[1].max()) + 1


@dataclass(frozen=True)
class Federation:
    """The clients of one regime and seed.

    Attributes:
        clients: inputs and labels of each, as it trains on them.
        mix_KC: the clean label mix of each.
        gain_K: what the inputs of each are multiplied by.
        held_out: what each is tested on, for natural clients.
    """

    clients: list[Pair]
    mix_KC: np.ndarray
    gain_K: np.ndarray
    held_out: tuple[Pair, ...] = ()

    def accuracy_by_client(self, predict: Predict, test: Pair) -> np.ndarray:
        """Accuracy on what each client would meet: its own label mix and gain, clean labels."""
        if self.held_out:
            right = [(predict(x) == y).double().mean() for x, y in self.held_out]
            return np.asarray([float(r) for r in right])
        x, y = test
        classes = self.mix_KC.shape[1]
        count = torch.bincount(y, minlength=classes).double()
        by_gain: dict[float, np.ndarray] = {}
        for gain in set(self.gain_K.tolist()):
            hit = (predict(x * gain if gain != 1.0 else x) == y).double()
            by_gain[gain] = (torch.bincount(y, hit, classes) / count).numpy()
        each = [mix @ by_gain[g] for mix, g in zip(self.mix_KC, self.gain_K, strict=True)]
        return np.asarray(each)


def digits(seed: int) -> Source:
    """scikit-learn's 1,797 digits: 450 test, 250 proxy, 20 clients of about 50."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels / 16, dtype=torch.float32)
    parts = _cut(x, torch.tensor(labels), seed, 450, 250)
    return Source(*parts, functools.partial(perceptron, 64), 20, 50, 10)


def fashion(seed: int) -> Source:
    """Fashion-MNIST on the first 40 principal components of the proxy: 4,000 test, 3,000 proxy."""
    flat, labels = _fashion()
    pool, proxy, test = _cut(flat, labels, seed, 4000, 3000)
    mean = proxy[0].mean(dim=0)
    _, vectors = torch.linalg.eigh((proxy[0] - mean).T @ (proxy[0] - mean))
    project = vectors[:, -40:]
    scale = ((proxy[0] - mean) @ project).std()

    def reduced(part: Pair) -> Pair:
        return ((part[0] - mean) @ project) / scale, part[1]

    return Source(
        reduced(pool), reduced(proxy), reduced(test), functools.partial(perceptron, 40)
    )  # fmt: skip


def fashion_cnn(seed: int) -> Source:
    """Fashion-MNIST at 14 x 14 pixels for a network of two convolutions; 20 clients, 10 rounds."""
    flat, labels = _fashion()
    small = torch.nn.functional.avg_pool2d(flat.reshape(-1, 1, 28, 28), 2)
    parts = _cut((small - 0.2860) / 0.3, labels, seed, 2000, 1500)
    return Source(*parts, convolutions, 20, 100, 5, 12)


def shakespeare(seed: int) -> Source:
    """The next character after eight, 40 speaking roles of Shakespeare as natural clients.

    Clients are roles of at least 1,000 characters, each with a twentieth of its examples (at most
    600) and another part of its text as a test; the proxy is what all smaller roles say.
    """
    if not _SHAKESPEARE.is_file():
        raise SystemExit(f"{_SHAKESPEARE} is missing; set FEDTUNE_SHAKESPEARE to the file")
    rng = np.random.default_rng((seed, 0))
    said: dict[str, str] = {}
    for speech in _SHAKESPEARE.read_text(encoding="utf-8").split("\n\n"):
        role, _, text = speech.partition(":\n")
        said[role] = said.get(role, "") + text.lower() + "\n"
    everything = "".join(said.values())
    common = sorted(set(everything), key=lambda c: (-everything.count(c), c))[:28]
    code = {character: i for i, character in enumerate(common)}
    rest = len(common)

    def examples(text: str, most: int) -> Pair:
        tokens = torch.tensor([code.get(c, rest) for c in text])
        windows = tokens.unfold(0, 9, 1)
        rows = torch.from_numpy(rng.permutation(len(windows))[:most])
        return windows[rows, :8], windows[rows, 8]

    large = [role for role, text in said.items() if len(text) >= 1000]
    small = "".join(text for role, text in said.items() if role not in set(large))
    roles = []
    for i in rng.permutation(len(large))[:40].tolist():
        text = said[large[i]]
        cut = len(text) * 4 // 5
        own = examples(text[:cut], min(600, cut // 20))
        roles.append((own, examples(text[cut:], 100)))
    proxy = examples(small, 3000)
    test = tuple(torch.cat([held[i] for _, held in roles]) for i in range(2))
    pool = tuple(torch.cat([own[i] for own, _ in roles]) for i in range(2))
    model = functools.partial(characters, rest + 1)
    return Source(pool, proxy, test, model, 40, 0, 8, 20, tuple(roles))  # type: ignore[arg-type]


def perceptron(features: int) -> torch.nn.Module:
    """One hidden layer of 32."""
    return torch.nn.Sequential(
        torch.nn.Linear(features, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )


def convolutions() -> torch.nn.Module:
    """Two convolutions with pooling, and a linear layer."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(16 * 9, 10),
    )  # fmt: skip


def characters(classes: int) -> torch.nn.Module:
    """Embeddings of eight characters, one hidden layer of 48."""
    return torch.nn.Sequential(
        torch.nn.Embedding(classes, 8), torch.nn.Flatten(),
        torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, classes),
    )  # fmt: skip


@functools.cache
def _fashion() -> Pair:
    if not _FASHION.is_dir():
        raise SystemExit(f"{_FASHION} is missing; set FEDTUNE_FASHION_MNIST to its folder")
    x = np.concatenate([_idx(f"{part}-images-idx3-ubyte") for part in ("train", "t10k")])
    y = np.concatenate([_idx(f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")])
    flat = torch.from_numpy(x.reshape(len(x), -1).astype(np.float32) / 255)
    return flat, torch.from_numpy(y.astype(np.int64))


def _idx(name: str) -> np.ndarray:
    (path,) = _FASHION.glob(f"{name}*")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    dimensions = data[3]
    shape = np.frombuffer(data, ">i4", dimensions, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _cut(
    x: torch.Tensor, y: torch.Tensor, seed: int, test: int, proxy: int
) -> tuple[Pair, Pair, Pair]:
    order = torch.from_numpy(np.random.default_rng((seed, 0)).permutation(len(y)))
    # No federation here needs more than 12,000 examples.
    parts = order[test + proxy :][:12000], order[test : test + proxy], order[:test]
    pool, own, held = ((x[i], y[i].to(torch.int64)) for i in parts)
    return pool, own, held


# regime: (label mix, quality)
REGIMES: dict[str, tuple[str, str]] = {
    "mixture-20-single": ("20-single", ""),
    "flip": ("iid", "flip"),
    "noise": ("iid", "noise"),
    "mixed": ("0.3", "noise gain"),
    "clean": ("iid", ""),
    "dirichlet-0.1": ("0.1", ""),
    "mixture-20-two": ("20-two", ""),
    "gain": ("0.3", "gain"),
    "mixture-10-single": ("10-single", ""),
    "dirichlet-0.05": ("0.05", ""),
    "two-class": ("two", ""),
    "size": ("iid", ""),
}
NATURAL = "natural"


def federation(source: Source, regime: str, seed: int) -> Federation:
    """The clients of a regime.

    Raises:
        SystemExit: the regime is unknown, or not one of this data set.
    """
    if source.roles:
        if regime != NATURAL:
            raise SystemExit(f"natural clients have one regime, {NATURAL!r}, not {regime!r}")
        own = [train for train, _ in source.roles]
        mix = [np.bincount(y.numpy(), minlength=source.classes) / len(y) for _, y in own]
        held = tuple(test for _, test in source.roles)
        return Federation(own, np.stack(mix), np.ones(len(own)), held)
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
    clients, mixes, gains = [], [], []
    for i in range(k):
        counts = rng.multinomial(sizes[i], _mix(skew, i, k, rng))
        rows = []
        for c, count in enumerate(counts):
            # Round and round: no example is used twice before all of its class are used once.
            rows.append(np.take(by_class[c], range(used[c], used[c] + count), mode="wrap"))
            used[c] += count
        index = torch.from_numpy(rng.permutation(np.concatenate(rows)))
        x, y, gain = _degrade(quality, source.pool[0][index], source.pool[1][index], i, rng)
        clients.append((x, y))
        mixes.append(counts / counts.sum())
        gains.append(gain)
    return Federation(clients, np.stack(mixes), np.asarray(gains))


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
) -> tuple[torch.Tensor, torch.Tensor, float]:
    gain = 1.0
    for kind in quality.split():
        if kind == "gain":
            gain = float(np.exp(rng.uniform(-1.3, 1.3)))
            x = x * gain
        elif i % 2:
            wrong = torch.from_numpy(rng.random(len(y)) < rng.uniform(0.3, 0.9))
            other = torch.from_numpy(rng.integers(0, 10, len(y)))
            # A flip sends every class to the next: a noise the emulator does not know.
            y = torch.where(wrong, (y + 1) % 10 if kind == "flip" else other, y)
    return x, y, gain
