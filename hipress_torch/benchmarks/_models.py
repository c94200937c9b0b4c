"""The models and the data that the benchmarks train with."""

import functools
import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 64
Batches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def data_folder() -> Path | None:
    """Returns the optional data folder: ``HIPRESS_TORCH_DATA``, else the one beside the clone."""
    chosen = os.environ.get("HIPRESS_TORCH_DATA")
    folder = Path(chosen) if chosen else ROOT / ".." / "shared" / "data"
    return folder if folder.is_dir() else None


def perceptron() -> nn.Module:
    """Returns a multilayer perceptron of 16.5M parameters: 1,024 inputs, 1,000 classes."""
    middle = [layer for _ in range(3) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), *middle, nn.Linear(2048, 1000))


def small_perceptron() -> nn.Module:
    """Returns a multilayer perceptron of 4.2M parameters: three buckets of about 5 MB."""
    middle = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), *middle, nn.Linear(1024, 500))


def small_cnn() -> nn.Module:
    """Returns a network of 97,000 parameters that computes much and sends little: 3x32x32 in."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 64, 10),
    )


def timed(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Returns a model, a batch of noise and labels: what a step takes does not depend on them."""
    torch.manual_seed(0)
    if kind == "mlp":
        return perceptron(), torch.randn(8, 1024), torch.randint(0, 1000, (8,))
    if kind == "cnn":
        return small_cnn(), torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    if kind == "fashion":
        return fashion_cnn(), torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))
    letters = 65
    text = torch.randint(0, letters, (2, 16, CONTEXT))
    return Transformer(letters), text[0], text[1]


def fashion_cnn() -> nn.Module:
    """Returns a network of 207,000 parameters for images of 28 by 28, 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Transformer(nn.Module):
    """Predicts the next character from up to 64 before it: three layers, 616,000 parameters."""

    def __init__(self, letters: int, width: int = 128, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.body = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, letters)
        # All layers are copies of one: each gets values of its own.
        for p in self.body.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, text_BT: torch.Tensor) -> torch.Tensor:
        """Returns logits (B, letters, T) for letters (B, T)."""
        size = text_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size)
        x_BTD = self.letter(text_BT) + self.place[:size]
        logits: torch.Tensor = self.head(self.body(x_BTD, mask=mask, is_causal=True))
        return logits.transpose(1, 2)


@dataclass(frozen=True)
class Task:
    """One rank's share of a task.

    Attributes:
        net: the model, the same on all ranks.
        batch: gives the batch of a step.
        held_out: batches that are the same on all ranks, to evaluate with.
    """

    net: nn.Module
    batch: Batches
    held_out: list[tuple[torch.Tensor, torch.Tensor]]


def fashion(folder: Path, rank: int, ranks: int, seed: int, size: int = 32) -> Task:
    """Returns Fashion-MNIST's 60,000 images dealt out to the ranks; held out are its 10,000."""
    found = {}
    for part in ("train", "t10k"):
        raw = gzip.decompress((folder / f"fashion_mnist/{part}-images-idx3-ubyte.gz").read_bytes())
        pixels = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 1, 28, 28)
        raw = gzip.decompress((folder / f"fashion_mnist/{part}-labels-idx1-ubyte.gz").read_bytes())
        labels = np.frombuffer(raw, np.uint8, offset=8).astype(np.int64)
        found[part] = (torch.tensor(pixels), torch.tensor(labels))
    x, y = (v[rank::ranks] for v in found["train"])
    held_x, held_y = found["t10k"]
    held = [(a / 255.0, b) for a, b in zip(held_x.split(1000), held_y.split(1000), strict=True)]

    @functools.lru_cache(maxsize=1)
    def order(epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        return torch.randperm(len(y), generator=generator)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, place = divmod(step * size, len(y) // size * size)
        at = order(epoch)[place : place + size]
        return x[at] / 255.0, y[at]

    torch.manual_seed(seed)
    return Task(fashion_cnn(), batch, held)


def roles(text: str) -> dict[str, str]:
    """Returns what each speaker says, by speaker, in order of appearance."""
    spoken: dict[str, list[str]] = {}
    for scene in text.split("\n\n"):
        head, _, speech = scene.partition("\n")
        if head.endswith(":"):
            spoken.setdefault(head[:-1], []).append(speech)
    return {name: "\n\n".join(parts) for name, parts in spoken.items()}


def characters(folder: Path, rank: int, ranks: int, seed: int, size: int = 16) -> Task:
    """Returns Shakespeare's plays with the speakers dealt out: ranks see different speakers.

    Held out is the last tenth of what each speaker says.
    """
    spoken = roles((folder / "shakespeare/input.txt").read_text(encoding="utf-8"))
    letters = sorted(set("".join(spoken.values())))
    number = {letter: i for i, letter in enumerate(letters)}

    def coded(parts: list[str]) -> torch.Tensor:
        return torch.tensor([number[c] for c in "\n\n".join(parts)])

    by_length = sorted(spoken.values(), key=len, reverse=True)
    mine = coded([s[: len(s) * 9 // 10] for s in by_length[rank::ranks]])
    rest = coded([s[len(s) * 9 // 10 :] for s in by_length])
    windows = rest[: len(rest) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    held = [(w[:, :-1], w[:, 1:]) for w in windows.split(128)]

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed((1_000_003 * seed + step) * ranks + rank)
        start = torch.randint(len(mine) - CONTEXT - 1, (size,), generator=generator)
        window = torch.stack([mine[s : s + CONTEXT + 1] for s in start.tolist()])
        return window[:, :-1], window[:, 1:]

    torch.manual_seed(seed)
    return Task(Transformer(len(letters)), batch, held)


TASKS = {"fashion": fashion, "characters": characters}
