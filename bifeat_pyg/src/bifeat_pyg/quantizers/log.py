"""The logarithmic scale of BiFeat's published code: one range of exponents for the whole matrix.

Source: github.com/BiFeat/BiFeat, compresser.py, from which only the formulas are taken. With b
bits, r = 2^(b-1), and [emin, emax] the base-2 exponents of the 0.5 and 99.5 percent quantiles of
|x| (at least 1e-5 and 2e-5):

    q = floor((log2 clip(|x|) - emin) / (emax - emin) * r);  code = r + q if x > 0 else r - 1 - q
    x' = sign(k) * 2^(|k| (emax - emin) / r + emin)          with k = code - r + 0.5

One bit: x' = +m or -m by the sign, m the mean of |x| over the first rows, plus 0.1 where it is
below 0.1 (as in that code).

Decoding is a table of 2^b values here, which gives the same numbers and suits every device.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bifeat_pyg import _dispatch
from bifeat_pyg.kernels import reference
from bifeat_pyg.quantizers._base import Codec, Summary

if TYPE_CHECKING:
    from bifeat_pyg.quantizers.scalar import SQ

_SMALLEST, _SECOND = 1e-5, 2e-5
_MEAN_ROWS = 10_000


class LutCodec(Codec):
    """Codes into one ascending table of 2**bits values for the whole matrix."""

    spec: "SQ"

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        return reference.row_bytes(self.columns, self.spec.bits)

    def encode(self, x: Tensor) -> Tensor:
        """See `Codec.encode`."""
        values = self.params["values"]
        half = values.numel() // 2
        positive = x > 0
        if half == 1:
            return reference.pack(positive.to(torch.int32), 1)
        first, last = self.params["range"].tolist()
        exponent = x.abs().double().clamp_min(1e-45).log2().clamp(first, last)
        width = last - first
        level = ((exponent - first) / (width if width > 0 else 1.0) * half).floor()
        level = level.clamp(0, half - 1).to(torch.int32)
        return reference.pack(torch.where(positive, half + level, half - 1 - level), self.spec.bits)

    def _decode(
        self,
        packed: Tensor,
        index: Tensor | None,
        params: Mapping[str, Tensor],
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        return _dispatch.lut(packed, index, params["values"], self.spec.bits, self.columns, dtype)


def fit_log(spec: "SQ", sample: Tensor, summary: Summary) -> Codec:
    """Returns the codec of the published formulas, fitted to a sample."""
    magnitude = sample.abs().double().reshape(-1)
    if spec.bits == 1:
        mean = float(sample[:_MEAN_ROWS].abs().double().mean()) if magnitude.numel() else 0.0
        mean += 0.1 if mean < 0.1 else 0.0
        values, span = torch.tensor([-mean, mean]), torch.zeros(2)
    else:
        low, high = quantiles(magnitude, (0.005, 0.995)) if magnitude.numel() else (0.0, 0.0)
        low, high = max(low, _SMALLEST), max(high, _SECOND)
        span = torch.tensor([low, high], dtype=torch.float64).log2()
        values = log_values(float(span[0]), float(span[1]), spec.bits)
    params = {"values": values.float(), "range": span.double()}
    return LutCodec(spec, summary.columns, params)


def log_values(first: float, last: float, bits: int) -> Tensor:
    """Returns the value of every code, float64 [2**bits], for exponents `first` to `last`."""
    half = 1 << (bits - 1)
    k = torch.arange(2 * half, dtype=torch.float64) - half + 0.5
    return k.sign() * torch.exp2(k.abs() * (last - first) / half + first)


def quantiles(flat: Tensor, at: tuple[float, float]) -> tuple[float, float]:
    """Returns two quantiles with linear interpolation; torch.quantile refuses 16M values and up."""
    ordered = flat.sort().values
    result = []
    for fraction in at:
        place = fraction * (ordered.numel() - 1)
        low = int(place)
        high = min(low + 1, ordered.numel() - 1)
        result.append(float(ordered[low] + (ordered[high] - ordered[low]) * (place - low)))
    return result[0], result[1]
