"""The bank of ways in which a virtual client can differ: label mix, label noise, inputs.

A generator draws a strength for a virtual client and applies it to a sample of proxy data. Users
add their own kinds of heterogeneity by passing more generators to `Emulator`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


class Generator(Protocol):
    """One kind of heterogeneity."""

    @property
    def name(self) -> str:
        """What it is called in reports."""
        ...

    def draw(self, rng: np.random.Generator) -> float:
        """A strength for one virtual client."""
        ...

    def apply(
        self,
        x: "torch.Tensor",
        y: "torch.Tensor",
        strength: float,
        classes: int,
        rng: np.random.Generator,
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Inputs and labels with this heterogeneity; must not write into its arguments."""
        ...


@dataclass(frozen=True)
class LabelNoise:
    """A share of the labels replaced by uniformly drawn ones; half the clients have none."""

    name: str = "label-noise"
    highest: float = 1.0

    def draw(self, rng: np.random.Generator) -> float:
        """0 for half the clients, else uniform up to `highest`."""
        return float(rng.uniform(0.0, self.highest)) if rng.random() < 0.5 else 0.0

    def apply(
        self,
        x: "torch.Tensor",
        y: "torch.Tensor",
        strength: float,
        classes: int,
        rng: np.random.Generator,
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Labels with a share `strength` drawn anew."""
        import torch

        hit = torch.from_numpy(rng.random(len(y)) < strength)
        drawn = torch.from_numpy(rng.integers(0, classes, len(y)))
        return x, torch.where(hit, drawn, y)


class _InputChange(ABC):
    """A change of the inputs alone; inputs that are not floating point (tokens) stay."""

    def apply(
        self,
        x: "torch.Tensor",
        y: "torch.Tensor",
        strength: float,
        classes: int,
        rng: np.random.Generator,
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Changed inputs, and labels as they are."""
        if not x.is_floating_point() or strength == 0.0:
            return x, y
        return self.changed(x, strength), y

    @abstractmethod
    def changed(self, x: "torch.Tensor", strength: float) -> "torch.Tensor":
        """Inputs changed with a strength other than 0."""


@dataclass(frozen=True)
class FeatureGain(_InputChange):
    """Inputs multiplied by a constant, as another sensor or exposure would; half have 1."""

    name: str = "feature-gain"
    log_range: float = 1.5

    def draw(self, rng: np.random.Generator) -> float:
        """Logarithm of the gain."""
        if rng.random() < 0.5:
            return 0.0
        return float(rng.uniform(-self.log_range, self.log_range))

    def changed(self, x: "torch.Tensor", strength: float) -> "torch.Tensor":
        """Inputs times e^strength."""
        return x * float(np.exp(strength))


@dataclass(frozen=True)
class FeatureShift(_InputChange):
    """A constant added to all inputs of a client; three quarters of the clients have none."""

    name: str = "feature-shift"
    width: float = 0.5

    def draw(self, rng: np.random.Generator) -> float:
        """The shift, in the unit of the inputs."""
        return float(rng.normal(0.0, self.width)) if rng.random() < 0.25 else 0.0

    def changed(self, x: "torch.Tensor", strength: float) -> "torch.Tensor":
        """Inputs plus `strength`."""
        return x + strength


def label_mix(classes: int, rng: np.random.Generator) -> np.ndarray:
    """Class probabilities of a virtual client, from nearly one class to nearly equal.

    A Dirichlet draw with concentration log-uniform in [0.02, 100] per class.
    """
    alpha = float(np.exp(rng.uniform(np.log(0.02), np.log(100.0))))
    weights = rng.gamma(alpha, size=classes) + 1e-12
    return np.asarray(weights / weights.sum())


DEFAULT_GENERATORS: tuple[Generator, ...] = (LabelNoise(), FeatureGain(), FeatureShift())
