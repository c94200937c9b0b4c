"""SQ: one code for each value, on a uniform grid fitted to each column (or to the whole matrix)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bifeat_pyg import _dispatch
from bifeat_pyg._errors import FeatureError, SpecError
from bifeat_pyg.kernels import reference
from bifeat_pyg.quantizers._base import Codec, Spec, Summary, require

BITS = (1, 2, 4, 8, 16)
# float32 holds every integer up to here.
_EXACT = 1 << 24
_LARGEST = torch.finfo(torch.float32).max
# Half-width, in standard deviations, of the uniform grid that suits a normal distribution best.
_NORMAL_HALF_WIDTH = {1: 0.80, 2: 1.49, 4: 2.51, 8: 3.93, 16: 6.0}


@dataclass(frozen=True)
class SQ(Spec):
    """Scalar quantization: each value becomes a code of `bits` bits.

    Args:
        bits: 1, 2, 4, 8 or 16.
        scale: "column" fits an offset and a step to each column; "tensor" one pair for all; "log"
            is the logarithmic scale of BiFeat, one range for all (for 1 bit its sign rule).
        fit_range: "mse" fits offset and step by least squares to a sample, so that a few outliers
            do not spend the codes; "minmax" spans all values. "log" ignores it.
        sample_rows: how many rows the fit sees at most.
        seed: seed of that sample.

    Integer and bool features are always stored exactly, or refused; a constant column is exact.

    Raises:
        SpecError: an argument is not allowed.

    Example:
        >>> SQ(4)
        SQ(bits=4, scale='column', fit_range='mse', sample_rows=32768, seed=0)
    """

    bits: int = 4
    scale: Literal["column", "tensor", "log"] = "column"
    fit_range: Literal["mse", "minmax"] = "mse"
    sample_rows: int = 32768
    seed: int = 0

    name: ClassVar[str] = "sq"

    def __post_init__(self) -> None:
        _allowed("bits", self.bits, BITS)
        _allowed("scale", self.scale, ("column", "tensor", "log"))
        _allowed("fit_range", self.fit_range, ("mse", "minmax"))
        positive("sample_rows", self.sample_rows)
        check_seed(self.seed)

    def fit(self, sample: Tensor, summary: Summary) -> Codec:
        """See `Spec.fit`."""
        if summary.boolean:
            return _exact(replace(self, bits=1, scale="column"), summary)
        if summary.integral:
            return _exact(replace(self, scale="column"), summary)
        if self.scale == "log":
            from bifeat_pyg.quantizers.log import fit_log

            return fit_log(self, sample, summary)
        low, high = summary.minimum, summary.maximum
        widest = high - low
        if self.scale == "tensor" and summary.columns:
            widest = torch.maximum(high - low.min(), high.max() - low)
        if summary.columns and float(widest.max()) > _LARGEST:
            raise _too_wide(int(widest.argmax()), summary)
        if self.scale == "tensor" and summary.columns:
            low, high = low.min().expand(summary.columns), high.max().expand(summary.columns)
            sample = sample.reshape(-1, 1)
        step = (high - low) / ((1 << self.bits) - 1)
        if self.fit_range == "mse" and sample.shape[0] > 1 and summary.columns:
            fitted = [
                _least_squares(block, low[at], high[at], self.bits)
                for block, at in _blocks(sample, summary.columns, shared=self.scale == "tensor")
            ]
            low = torch.cat([f[0] for f in fitted]).expand(summary.columns)
            step = torch.cat([f[1] for f in fitted]).expand(summary.columns)
        low, step = low.float(), step.float()
        # Rounded up, the last code of a range as wide as float32 itself may lie beyond it.
        last = low + step * ((1 << self.bits) - 1)
        if not bool(torch.isfinite(last).all()):
            raise _too_wide(int((~torch.isfinite(last)).nonzero()[0]), summary)
        return AffineCodec(self, summary.columns, {"low": low, "step": step})

    def restore(self, columns: int, params: Mapping[str, Tensor]) -> Codec:
        """See `Spec.restore`."""
        if "values" in params:
            from bifeat_pyg.quantizers.log import LutCodec

            values = require(params, "values", (1 << self.bits,))
            span = require(params, "range", (2,), torch.float64)
            return LutCodec(self, columns, {"values": values, "range": span})
        low, step = (require(params, name, (columns,)) for name in ("low", "step"))
        return AffineCodec(self, columns, {"low": low, "step": step})


class AffineCodec(Codec):
    """Codes on a uniform grid: `code * step + low`, with one step and offset for each column."""

    spec: SQ

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        return reference.row_bytes(self.columns, self.spec.bits)

    def encode(self, x: Tensor) -> Tensor:
        """See `Codec.encode`; values beyond the grid get its end."""
        return _dispatch.affine_encode(x, self.params["low"], self.params["step"], self.spec.bits)

    def _decode(
        self,
        packed: Tensor,
        index: Tensor | None,
        params: Mapping[str, Tensor],
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        return _dispatch.affine(packed, index, params["low"], params["step"], self.spec.bits, dtype)


def _too_wide(column: int, summary: Summary) -> FeatureError:
    low, high = float(summary.minimum[column]), float(summary.maximum[column])
    return FeatureError(
        f"column {column} holds values from {low:.3g} to {high:.3g}: the grid over them has steps "
        "or ends that float32 cannot hold, and would give back infinity. Scale or clip the features"
    )


def _exact(spec: SQ, summary: Summary) -> Codec:
    """Returns a codec that gives integers back exactly."""
    low, high = summary.minimum, summary.maximum
    span = high - low
    codes = 1 << spec.bits
    if summary.columns and float(span.max()) >= codes:
        worst = int(span.argmax())
        raise FeatureError(
            f"column {worst} holds integers from {low[worst]:.0f} to {high[worst]:.0f}, more than "
            f"the {codes} values of {spec.bits} bits, and integers are stored exactly or not at "
            "all. Use more bits, or convert the features to float to accept rounding."
        )
    if summary.columns and max(float(low.abs().max()), float(high.abs().max())) > _EXACT:
        raise FeatureError(
            f"integers beyond +-{_EXACT} are not exact in float32; subtract an offset, or convert "
            "the features to float to accept rounding"
        )
    step = (span > 0).float()
    return AffineCodec(spec, summary.columns, {"low": low.float(), "step": step})


def _blocks(sample: Tensor, columns: int, *, shared: bool) -> list[tuple[Tensor, slice]]:
    """Returns the sample in blocks of columns of some 4 million values, with their positions."""
    if shared:
        return [(sample, slice(0, 1))]
    width = max(1, (1 << 22) // max(sample.shape[0], 1))
    return [(sample[:, at : at + width], slice(at, at + width)) for at in range(0, columns, width)]


def _least_squares(x_SD: Tensor, low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns offset and step of each column, float64 [D], of least squared error on the sample.

    Alternates between rounding to the grid and regressing the values on their codes (which for one
    bit is 2-means), from two starts: the whole range, and the best grid of a normal distribution.
    The whole range itself stays a candidate, so values that lie on a grid are kept exactly.
    """
    top = (1 << bits) - 1
    x_SD = x_SD.double()
    mean = x_SD.mean(0)
    half = _NORMAL_HALF_WIDTH[bits] * x_SD.std(0, correction=0)
    best_low, best_step = low.clone(), (high - low) / top
    codes = _codes(x_SD, best_low, best_step, top)
    best_error = (codes * best_step + best_low - x_SD).square().sum(0)
    if bits == 16:
        return best_low, best_step
    starts = [(low, high), (torch.maximum(mean - half, low), torch.minimum(mean + half, high))]
    for start_low, start_high in starts:
        at_low, step = start_low, (start_high - start_low) / top
        for _ in range(6):
            codes = _codes(x_SD, at_low, step, top)
            mean_code = codes.mean(0)
            spread = (codes - mean_code).square().sum(0)
            slope = ((codes - mean_code) * x_SD).sum(0)
            # A column with one code in use has no slope: its step stays as it was.
            step = torch.where((spread > 0) & (slope > 0), slope / spread.clamp_min(1e-300), step)
            at_low = mean - step * mean_code
        error = (_codes(x_SD, at_low, step, top) * step + at_low - x_SD).square().sum(0)
        # Clearly better only: rounding in the regression must not displace an exact grid.
        better = error < best_error * (1 - 1e-6)
        best_low = torch.where(better, at_low, best_low)
        best_step = torch.where(better, step, best_step)
        best_error = torch.where(better, error, best_error)
    return best_low, best_step


def _codes(x: Tensor, low: Tensor, step: Tensor, top: int) -> Tensor:
    return ((x - low) * torch.where(step > 0, 1 / step, 0)).round().clamp(0, top)


def _allowed(name: str, got: object, allowed: tuple[object, ...]) -> None:
    # Of the same kind too: 4.0 and True equal whole numbers, and serve as none.
    if not any(type(got) is type(one) and got == one for one in allowed):
        raise SpecError(f"{name} is {got!r}; allowed are {', '.join(map(repr, allowed))}")


def check_seed(seed: object) -> None:
    """Raises SpecError unless `seed` is one that torch and random take alike."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 62:
        raise SpecError(f"seed is {seed!r}; it must be a whole number from 0 to 2**62")


def positive(name: str, got: object) -> None:
    """Raises SpecError unless `got` is a whole number above 0."""
    if not isinstance(got, int) or isinstance(got, bool) or got < 1:
        raise SpecError(f"{name} is {got!r}; it must be a whole number above 0")
