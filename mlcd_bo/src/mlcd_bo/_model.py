"""A Gaussian process over deployments, averaged over a grid of hyperparameters.

Ten to twenty noisy observations do not identify hyperparameters, so they are integrated out over
a fixed grid: no optimiser, no failed fits, a few milliseconds. `reference_posterior` is the plain
form that the fast one is tested against.

Legend: N deployments, n observations, G hyperparameter settings, P kernel parts.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ._prior import (
    Array,
    Features,
    hyperparameter_grid,
    kernel_parts,
    plain_grid,
    plain_parts,
)
from ._space import SearchSpace


@dataclass(frozen=True)
class Posterior:
    """Beliefs about ``log(seconds per unit of work)`` of every deployment.

    Attributes:
        mean: shape N.
        sd: standard deviation of the noise-free value, shape N.
    """

    mean: Array
    sd: Array


class ScalingModel:
    """The scaling-aware Gaussian process on one search space.

    Args:
        space: the deployments.
        prior_mean: prior mean up to a constant, shape N, in place of the built-in one.

    Attributes:
        features: of the deployments.
        prior_mean: shape N.
        grid: hyperparameter settings.
    """

    def __init__(self, space: SearchSpace, prior_mean: Array | None = None) -> None:
        self.features = Features.of(space)
        self.prior_mean = self.features.mean() if prior_mean is None else prior_mean
        self.grid = hyperparameter_grid()

    def parts(self, a: Features, b: Features) -> Array:
        """Returns the parts of the covariance between two sets, shape P x N_a x N_b."""
        return kernel_parts(a, b)

    @cached_property
    def _prior_parts(self) -> Array:
        return self._variances()

    def posterior(self, rows: NDArray[np.int64], values: Array, noise: Array) -> Posterior:
        """Returns the beliefs after observing `values` at `rows`.

        Args:
            rows: observed deployments, length n; one may appear more than once.
            values: observed ``log(seconds per unit)``, length n.
            noise: variance of each observation, length n, above zero.
        """
        weights, means, variances = self._mixture(rows, values, noise)
        # One Gaussian with the mixture's first two moments.
        mean = weights @ means
        second = weights @ (variances + (means - mean) ** 2)
        return Posterior(mean, np.sqrt(np.maximum(second, 1e-12)))

    def _variances(self) -> Array:
        """Returns the diagonal of `parts` of all deployments, shape P x N."""
        n = len(self.features.count)
        # Square blocks along the diagonal: the whole square of a large space would not fit.
        blocks = [
            self.features.take(np.arange(start, min(start + 128, n))) for start in range(0, n, 128)
        ]
        diagonals = [np.diagonal(self.parts(b, b), axis1=1, axis2=2) for b in blocks]
        return np.concatenate(diagonals, axis=1)

    def _mixture(
        self, rows: NDArray[np.int64], values: Array, noise: Array
    ) -> tuple[Array, Array, Array]:
        """Returns weights (G), means (G x N) and variances (G x N)."""
        seen = self.features.take(rows)
        to_seen = self.parts(self.features, seen)
        scales = self.grid.scales
        prior_variance = scales @ self._prior_parts
        residual = values - self.prior_mean[rows]
        # The level of a job can be anything: centre it, the wide constant does the rest.
        centre = float(residual.mean()) if len(rows) else 0.0
        if not len(rows):
            shape = prior_variance.shape
            weights = _normalised(self.grid.log_prior)
            return weights, np.broadcast_to(self.prior_mean, shape).copy(), prior_variance
        cross = np.tensordot(scales, to_seen, axes=1)  # G N n
        gram = cross[:, rows, :] + np.diag(noise)  # G n n
        factor = np.linalg.cholesky(gram)
        # One solve for the residual and all cross covariances: G n (1 + N)
        right = np.concatenate(
            [
                np.broadcast_to((residual - centre)[None, :, None], (len(scales), len(rows), 1)),
                cross.transpose(0, 2, 1),
            ],
            axis=2,
        )
        solved = np.linalg.solve(factor, right)
        alpha, half = solved[:, :, 0], solved[:, :, 1:]
        means = self.prior_mean + centre + np.einsum("gi,gin->gn", alpha, half)
        variances = np.maximum(prior_variance - (half**2).sum(axis=1), 1e-12)
        log_determinant = np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
        evidence = -0.5 * (alpha**2).sum(axis=1) - log_determinant
        return _normalised(self.grid.log_prior + evidence), means, variances


class PlainModel(ScalingModel):
    """A Gaussian process that knows nothing of scaling: a constant mean and a Matern kernel.

    Lengthscales and amplitude are averaged over a grid, too.
    """

    def __init__(self, space: SearchSpace) -> None:
        super().__init__(space, np.zeros(len(space)))
        self.grid = plain_grid()

    def parts(self, a: Features, b: Features) -> Array:
        """Returns a constant, then one Matern-5/2 part for each pair of lengthscales."""
        return plain_parts(a, b)


def _normalised(log_weights: Array) -> Array:
    weights = np.exp(log_weights - log_weights.max())
    return np.asarray(weights / weights.sum())


def reference_posterior(
    model: ScalingModel, rows: NDArray[np.int64], values: Array, noise: Array
) -> Posterior:
    """Returns what `ScalingModel.posterior` returns, setting by setting with plain inverses."""
    parts = model.parts(model.features, model.features)
    centre = (values - model.prior_mean[rows]).mean()
    log_weights, means, variances = [], [], []
    for scale, log_prior in zip(model.grid.scales, model.grid.log_prior, strict=True):
        covariance = sum(s * part for s, part in zip(scale, parts, strict=True))
        gram = covariance[np.ix_(rows, rows)] + np.diag(noise)
        inverse = np.linalg.inv(gram)
        residual = values - model.prior_mean[rows] - centre
        cross = covariance[:, rows]
        means.append(model.prior_mean + centre + cross @ inverse @ residual)
        variances.append(np.diag(covariance - cross @ inverse @ cross.T))
        quadratic = residual @ inverse @ residual
        log_weights.append(log_prior - 0.5 * (quadratic + np.linalg.slogdet(gram)[1]))
    weights = np.exp(np.array(log_weights) - max(log_weights))
    weights = weights / weights.sum()
    mean = sum(w * m for w, m in zip(weights, means, strict=True))
    second = sum(
        w * (v + (m - mean) ** 2) for w, v, m in zip(weights, variances, means, strict=True)
    )
    return Posterior(np.asarray(mean), np.sqrt(np.maximum(np.asarray(second), 1e-12)))
