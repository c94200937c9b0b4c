"""What is known about scaling before anything is measured: features, mean and kernel parts.

The quantity is ``log(seconds per unit of work)``. Slopes and scales below were fitted to public
traces of Spark, TensorFlow and PyTorch jobs (scout, gavel, cherrypick): log time falls by about
0.81 for each e-fold of machines and 0.82 for each e-fold of price, both uncertain. No curve is
forced to be concave: only a part of the measured ones are.

Legend: N deployments, P kernel parts, G hyperparameter settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._space import Deployment, SearchSpace

Array = NDArray[np.float64]

COUNT_SLOPE = -0.81
COUNT_BEND = 0.016
PRICE_SLOPE = -0.82
# Log deviations that no smooth model explains (run to run, machine to machine).
MODEL_NOISE = 0.03
_OFFSET_VARIANCE = 9.0


@dataclass(frozen=True)
class Features:
    """Numbers that describe deployments to the model; all arrays have length N.

    Attributes:
        count: log of machines, from the smallest count of the space.
        price: log price of one machine, centred over the catalogue.
        memory: log of the cluster's total memory, or None if a type does not say.
        balance: log memory per vCPU, centred, or None if a type does not say.
        kind: index of the instance type.
        knobs: index of each knob's value, shape N x knobs.
    """

    count: Array
    price: Array
    memory: Array | None
    balance: Array | None
    kind: NDArray[np.int64]
    knobs: NDArray[np.int64]

    @classmethod
    def of(cls, space: SearchSpace) -> "Features":
        """Returns the features of every deployment of `space`."""
        return cls.describe(list(space), space)

    @classmethod
    def describe(cls, deployments: Sequence[Deployment], space: SearchSpace) -> "Features":
        """Returns the features of `deployments` in the units of `space`."""
        types = {d.instance_type.name: d.instance_type for d in space}
        order = {name: i for i, name in enumerate(types)}
        fewest = min(d.count for d in space)
        centre = float(np.mean([np.log(kind.price) for kind in types.values()]))
        memory = balance = None
        if all(kind.memory_gib for kind in types.values()):
            memory = np.log([d.count * (d.instance_type.memory_gib or 1.0) for d in deployments])
            if all(kind.vcpus for kind in types.values()):
                ratio = {
                    name: float(np.log((kind.memory_gib or 1.0) / (kind.vcpus or 1.0)))
                    for name, kind in types.items()
                }
                mean = float(np.mean(list(ratio.values())))
                balance = np.array([ratio[d.instance_type.name] - mean for d in deployments])
        settings: dict[tuple[str, object], int] = {}
        for deployment in space:
            for knob in deployment.knobs:
                settings.setdefault(knob, len(settings))
        return cls(
            count=np.log([d.count / fewest for d in deployments]),
            price=np.log([d.instance_type.price for d in deployments]) - centre,
            memory=memory,
            balance=balance,
            kind=np.array([order[d.instance_type.name] for d in deployments], dtype=np.int64),
            knobs=np.array(
                [[settings[knob] for knob in d.knobs] for d in deployments], dtype=np.int64
            ).reshape(len(deployments), -1),
        )

    def take(self, rows: NDArray[np.int64]) -> "Features":
        """Returns the features of some rows."""
        return Features(
            self.count[rows],
            self.price[rows],
            None if self.memory is None else self.memory[rows],
            None if self.balance is None else self.balance[rows],
            self.kind[rows],
            self.knobs[rows],
        )

    def mean(self) -> Array:
        """Returns the prior mean up to an unknown constant, shape N."""
        return COUNT_SLOPE * self.count + COUNT_BEND * self.count**2 + PRICE_SLOPE * self.price


def matern32(distance: Array) -> Array:
    """Returns the Matern-3/2 correlation at scaled distances."""
    scaled = np.sqrt(3.0) * np.abs(distance)
    return np.asarray((1.0 + scaled) * np.exp(-scaled))


def kernel_parts(a: Features, b: Features) -> Array:
    """Returns the parts of the covariance between two sets, shape P x N_a x N_b.

    In order: the unknown constant; slopes common to all types; what is special to one type
    (offset and slope); its wiggles along the count; memory. Knobs multiply a type's own parts:
    another value of a knob tells less.
    """
    count = np.outer(a.count, b.count)
    price = np.outer(a.price, b.price)
    same = (a.kind[:, None] == b.kind[None, :]).astype(np.float64)
    differing = (a.knobs[:, None, :] != b.knobs[None, :, :]).sum(axis=2)
    same_setting = 0.5**differing
    ones = np.ones_like(count)
    memory = np.zeros_like(count)
    if a.memory is not None and b.memory is not None:
        memory = 0.24**2 * matern32((a.memory[:, None] - b.memory[None, :]) / 0.5)
    if a.balance is not None and b.balance is not None:
        memory = memory + 0.20**2 * np.outer(a.balance, b.balance)
    slopes = 0.24**2 * count + 0.22**2 * price + 0.066**2 * count**2
    special = same * (0.21**2 + 0.09**2 * count)
    wiggle = same * 0.15**2 * matern32((a.count[:, None] - b.count[None, :]) / 0.39)
    setting = 0.30**2 * (same_setting if a.knobs.shape[1] else 0.0 * ones)
    return np.stack(
        [_OFFSET_VARIANCE * ones, slopes, special * same_setting, wiggle * same_setting, memory,
         setting]
    )  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """Hyperparameter settings with their prior weights.

    Attributes:
        scales: variance factors of the kernel parts, shape G x P.
        log_prior: unnormalised log prior weights, shape G.
    """

    scales: Array
    log_prior: Array


def hyperparameter_grid() -> Grid:
    """Returns the 36 settings over which the model is averaged instead of being optimised."""
    scales, weights = [], []
    for a in (0.5, 0.9, 1.4):
        for b in (0.6, 1.2):
            for c in (0.5, 1.2):
                for d in (0.4, 1.0, 2.0):
                    scales.append([1.0, a * a, b * b, c * c, d * d, 1.0])
                    terms = ((a, 0.6), (b, 0.8), (c, 0.8), (d, 0.9))
                    weights.append(-0.5 * sum((np.log(v) / w) ** 2 for v, w in terms))
    return Grid(np.array(scales), np.array(weights))


_PLAIN_COUNT = (0.5, 1.0, 2.5)
_PLAIN_PRICE = (0.7, 2.0)


def plain_parts(a: Features, b: Features) -> Array:
    """Returns the parts of a kernel without scaling knowledge, shape 7 x N_a x N_b.

    The unknown constant, then a Matern-5/2 kernel over log count and log price for each pair of
    lengthscales; types that differ correlate by half.
    """
    count = a.count[:, None] - b.count[None, :]
    price = a.price[:, None] - b.price[None, :]
    same = np.where(a.kind[:, None] == b.kind[None, :], 1.0, 0.5)
    same = same * 0.5 ** (a.knobs[:, None, :] != b.knobs[None, :, :]).sum(axis=2)
    parts = [_OFFSET_VARIANCE * np.ones_like(count)]
    for count_scale in _PLAIN_COUNT:
        for price_scale in _PLAIN_PRICE:
            distance = np.sqrt(5.0 * ((count / count_scale) ** 2 + (price / price_scale) ** 2))
            parts.append(same * (1 + distance + distance**2 / 3) * np.exp(-distance))
    return np.stack(parts)


def plain_grid() -> Grid:
    """Returns the settings of `plain_parts`: each pair of lengthscales with three amplitudes."""
    pairs = len(_PLAIN_COUNT) * len(_PLAIN_PRICE)
    scales = []
    for pair in range(pairs):
        for amplitude in (0.4, 0.8, 1.6):
            setting = np.zeros(1 + pairs)
            setting[0], setting[1 + pair] = 1.0, amplitude**2
            scales.append(setting)
    return Grid(np.array(scales), np.zeros(len(scales)))
