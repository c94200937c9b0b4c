"""Tuners that do not learn: uniform random points, and a scrambled Sobol sequence."""

from collections.abc import Mapping

import numpy as np


class RandomTuner:
    """Independent uniform points.

    Args:
        dimensions: columns of a point.
        seed: fixes the points.
    """

    def __init__(self, dimensions: int, seed: int) -> None:
        self.dimensions = dimensions
        self._rng = np.random.default_rng((seed, 21))

    def ask(self, count: int, fixed: Mapping[int, float] | None = None) -> np.ndarray:
        """Uniform points of shape (count, dimensions)."""
        return _fix(self._rng.random((count, self.dimensions)), fixed)

    def tell(self, points: np.ndarray, scores: np.ndarray, fidelity: np.ndarray) -> None:
        """Ignores the scores."""


class SobolTuner:
    """A scrambled Sobol sequence: spreads points more evenly than chance does.

    Args:
        dimensions: columns of a point.
        seed: fixes the scrambling.
    """

    def __init__(self, dimensions: int, seed: int) -> None:
        from torch.quasirandom import SobolEngine

        self.dimensions = dimensions
        self._engine = SobolEngine(dimensions, scramble=True, seed=seed)  # type: ignore[no-untyped-call]

    def ask(self, count: int, fixed: Mapping[int, float] | None = None) -> np.ndarray:
        """The next points of the sequence, shape (count, dimensions)."""
        import torch

        return _fix(self._engine.draw(count, dtype=torch.float64).numpy(), fixed)

    def tell(self, points: np.ndarray, scores: np.ndarray, fidelity: np.ndarray) -> None:
        """Ignores the scores."""


def _fix(points: np.ndarray, fixed: Mapping[int, float] | None) -> np.ndarray:
    for column, value in (fixed or {}).items():
        points[:, column] = value
    return points
