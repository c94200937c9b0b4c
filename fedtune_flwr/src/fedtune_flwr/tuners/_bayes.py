"""The Bayesian tuner: a Gaussian process and noisy expected improvement, by BoTorch."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ._plain import SobolTuner

# Below this many scores the process has nothing to say and the Sobol sequence goes on.
_FEWEST = 4


class BayesTuner:
    """Asks where noisy expected improvement over the points tried so far is largest.

    The share of the rounds that were run is one more input of the Gaussian process, so that cheap
    short runs inform, and points are proposed for full runs (fidelity 1).

    Args:
        dimensions: columns of a point.
        seed: fixes the Sobol sequence and the samples of the acquisition function.

    Source: `qLogNoisyExpectedImprovement` and `SingleTaskGP` of BoTorch, with their priors.
    """

    def __init__(self, dimensions: int, seed: int) -> None:
        self.dimensions = dimensions
        self.seed = seed
        self._sobol = SobolTuner(dimensions, seed)
        self._points = np.zeros((0, dimensions))
        self._scores = np.zeros(0)
        self._fidelity = np.zeros(0)
        self._asked = 0

    def tell(self, points: np.ndarray, scores: np.ndarray, fidelity: np.ndarray) -> None:
        """Adds points to what the Gaussian process is fitted to."""
        self._points = np.concatenate([self._points, points])
        self._scores = np.concatenate([self._scores, scores])
        self._fidelity = np.concatenate([self._fidelity, fidelity])

    def ask(self, count: int, fixed: Mapping[int, float] | None = None) -> np.ndarray:
        """Points of largest expected improvement, shape (count, dimensions)."""
        self._asked += 1
        held = dict(fixed or {})
        if len(self._scores) < _FEWEST or len(held) >= self.dimensions:
            return self._sobol.ask(count, held)
        with _quiet(self.seed * 1009 + self._asked):
            return self._improve(count, held)

    def _improve(self, count: int, held: dict[int, float]) -> np.ndarray:
        import torch
        from botorch.acquisition.logei import qLogNoisyExpectedImprovement
        from botorch.optim.optimize import optimize_acqf
        from botorch.sampling.normal import SobolQMCNormalSampler

        full = self._points[self._fidelity >= 1.0]
        baseline = full if len(full) else self._points
        acquisition = qLogNoisyExpectedImprovement(
            self._fit(),
            X_baseline=torch.from_numpy(_with_fidelity(baseline, np.ones(len(baseline)))),
            sampler=SobolQMCNormalSampler(torch.Size([32]), seed=self.seed),
            prune_baseline=True,
        )
        bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        found, _ = optimize_acqf(
            acquisition,
            bounds=bounds.expand(2, self.dimensions + 1).contiguous(),
            q=count,
            num_restarts=2,
            raw_samples=32,
            fixed_features={**held, self.dimensions: 1.0},
            sequential=True,
            options={"maxiter": 25},
        )
        return np.asarray(found.detach().numpy()[:, : self.dimensions].clip(0.0, 1.0))

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and standard deviation of full-length scores, each of shape (n,)."""
        import torch

        with _quiet(self.seed), torch.no_grad():
            at = torch.from_numpy(_with_fidelity(points, np.ones(len(points))))
            with torch.enable_grad():
                model = self._fit()
            posterior = model.posterior(at)
            deviation = posterior.variance.clamp_min(0).sqrt()
        return posterior.mean.squeeze(-1).numpy(), deviation.squeeze(-1).numpy()

    def _fit(self) -> Any:
        import torch
        from botorch import fit_gpytorch_mll
        from botorch.models import SingleTaskGP
        from botorch.models.transforms import Standardize
        from gpytorch.mlls import ExactMarginalLogLikelihood

        x = torch.from_numpy(_with_fidelity(self._points, self._fidelity))
        y = torch.from_numpy(without_depths(self._scores))[:, None]
        model = SingleTaskGP(x, y, outcome_transform=Standardize(m=1))
        fit_gpytorch_mll(
            ExactMarginalLogLikelihood(model.likelihood, model),
            optimizer_kwargs={"options": {"maxiter": 60}},
        )
        return model


def without_depths(scores: np.ndarray) -> np.ndarray:
    """Scores with very low ones raised, so that a few diverged runs do not set the scale.

    The floor lies three times as far below the median as the 90 % quantile lies above it.
    """
    middle, high = np.quantile(scores, [0.5, 0.9])
    return np.asarray(np.maximum(scores, middle - 3 * (high - middle)))


@contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """Seeds torch for a while; drops warnings of the fit and of the import.

    Fitting warns about its own retries, and importing warns of what torch deprecates.
    """
    import torch

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        yield


def _with_fidelity(points: np.ndarray, fidelity: np.ndarray) -> np.ndarray:
    return np.concatenate([points, fidelity[:, None]], axis=1)
