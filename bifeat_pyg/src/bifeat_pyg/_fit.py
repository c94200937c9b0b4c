"""From rows to a packed table: one pass to learn, one to encode."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from bifeat_pyg._errors import FeatureError, NonFiniteError
from bifeat_pyg._rows import RowSource, blocks, columns_of, is_integral
from bifeat_pyg.kernels import cpu
from bifeat_pyg.quantizers._base import Codec, Spec, Summary, known

# Most values of a sample (128 MiB as float32); wide features are fitted to fewer rows, but not
# below _FEWEST.
_SAMPLE_VALUES = 1 << 25
_FEWEST = 4096


@dataclass(frozen=True)
class Errors:
    """What quantization lost, over all rows.

    Attributes:
        rows: number of rows.
        squared: sum of squared errors of each column, float64 [D].
        power: sum of squares of each column, float64 [D].
    """

    rows: int
    squared: Tensor
    power: Tensor

    @property
    def relative(self) -> float:
        """Root of summed squared error over summed squares; 0 where both are 0."""
        squared, power = float(self.squared.sum()), float(self.power.sum())
        return (squared / power) ** 0.5 if power else float(squared > 0)

    @property
    def column_relative(self) -> Tensor:
        """The same for each column, float64 [D]."""
        ratio = (self.squared / self.power.clamp_min(1e-300)).sqrt()
        return torch.where(self.power > 0, ratio, (self.squared > 0).double())

    @property
    def column_rmse(self) -> Tensor:
        """Root mean squared error of each column, float64 [D]."""
        return (self.squared / max(self.rows, 1)).sqrt()


@dataclass
class ErrorSum:
    """Adds up `Errors` block by block."""

    codec: Codec

    def __post_init__(self) -> None:
        self.rows = 0
        self.squared = torch.zeros(self.codec.columns, dtype=torch.float64)
        self.power = torch.zeros(self.codec.columns, dtype=torch.float64)

    def add(self, x: Tensor, packed: Tensor) -> None:
        """Counts float32 rows and what they were packed to."""
        self.rows += x.shape[0]
        back = self.codec.decode(packed).view_as(x)
        if cpu.available() and x.is_contiguous() and back.is_contiguous():
            # One pass instead of five: this is most of the time of quantize_file.
            cpu.add_errors(x, back, self.squared, self.power)
            return
        difference = back - x
        self.squared += _squares(difference)
        self.power += _squares(x)

    def result(self) -> Errors:
        """Returns the sums so far."""
        return Errors(self.rows, self.squared.clone(), self.power.clone())


def _squares(x: Tensor) -> Tensor:
    """Returns the sum of squares of each column, float64 [D]."""
    sums = x.square().sum(0, dtype=torch.float64)
    # Beyond 1.8e19 a square overflows float32; the wider pass costs twice the time.
    return sums if bool(torch.isfinite(sums).all()) else x.double().square().sum(0)


def as_float(rows: Tensor, start: int, nan: str, name: str) -> Tensor:
    """Returns rows as finite float32 [n, D].

    Args:
        rows: of any accepted dtype.
        start: number of the first row, for the message.
        nan: "error", or "zero" to put zeros where values are not finite.
        name: of the features, for the message.

    Raises:
        NonFiniteError: a value is NaN or infinite, also if only as float32.
    """
    x = rows.to(torch.float32)
    if is_integral(rows.dtype):
        return x
    # The sum is finite unless some value is not, or they are huge: one cheap pass in the usual
    # case.
    if not bool(torch.isfinite(x.sum())):
        bad = ~torch.isfinite(x)
        if bool(bad.any()):
            if nan == "zero":
                return torch.where(bad, 0, x)
            row, column = bad.nonzero()[0].tolist()
            raise NonFiniteError(int(bad.sum()), start + row, column, name)
    return x


def check_nan(nan: str) -> None:
    """Raises FeatureError unless `nan` is "error" or "zero"."""
    if nan not in ("error", "zero"):
        raise FeatureError(f"nan is {nan!r}; allowed are 'error' and 'zero'")


def learn(source: RowSource, spec: Spec, nan: str = "error") -> Codec:
    """Returns the codec fitted to a source, which is read once, in bounded memory.

    Raises:
        NonFiniteError: with the count over all rows and the place of the first.
        FeatureError: the spec cannot represent the features.
    """
    columns = columns_of(source.tail)
    minimum = torch.full((columns,), torch.inf, dtype=torch.float64)
    maximum = torch.full((columns,), -torch.inf, dtype=torch.float64)
    chosen = _sample_rows(source.rows, columns, spec)
    sample = torch.empty((len(chosen), columns))
    taken = 0
    first_bad: NonFiniteError | None = None
    bad = 0
    for start, rows in blocks(source):
        try:
            x = as_float(rows, start, nan, source.name)
        except NonFiniteError as error:
            bad += error.count
            first_bad = first_bad or error
            continue
        exact = rows if rows.dtype in (torch.int32, torch.int64) else x
        if columns:
            low, high = exact.aminmax(dim=0)
            minimum = torch.minimum(minimum, low.double())
            maximum = torch.maximum(maximum, high.double())
        stop = start + rows.shape[0]
        here = taken
        while taken < len(chosen) and chosen[taken] < stop:
            taken += 1
        if taken > here:
            sample[here:taken] = x[torch.tensor(chosen[here:taken]) - start]
    if first_bad is not None:
        raise NonFiniteError(bad, first_bad.row, first_bad.column, source.name)
    if source.rows == 0:
        minimum, maximum = minimum.zero_(), maximum.zero_()
    summary = Summary(
        rows=source.rows,
        columns=columns,
        minimum=minimum,
        maximum=maximum,
        integral=is_integral(source.dtype),
        boolean=source.dtype == torch.bool,
    )
    return known(spec.fit(sample, summary).shaped(source.tail))


def encode(source: RowSource, codec: Codec, nan: str = "error") -> tuple[Tensor, Errors]:
    """Returns all rows packed, uint8 [N, row_bytes], and what that lost."""
    packed = torch.empty((source.rows, codec.row_bytes), dtype=torch.uint8)
    errors = ErrorSum(codec)
    for start, rows in blocks(source):
        x = as_float(rows, start, nan, source.name)
        part = codec.encode(x)
        errors.add(x, part)
        packed[start : start + rows.shape[0]] = part
    return packed, errors.result()


def _sample_rows(rows: int, columns: int, spec: Spec) -> list[int]:
    """Returns the seeded sample's row numbers, ascending."""
    most = max(_FEWEST, _SAMPLE_VALUES // max(columns, 1))
    wanted = min(rows, spec.sample_rows, most)
    return sorted(random.Random(spec.seed).sample(range(rows), wanted))
