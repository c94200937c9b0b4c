"""choose_spec: tries quantizers on a sample and says what each would save and lose."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bifeat_pyg._errors import FeatureError, SpecError
from bifeat_pyg._fit import check_nan, encode, learn
from bifeat_pyg._rows import RowSource, TensorSource, columns_of
from bifeat_pyg._sources import open_source
from bifeat_pyg.quantizers._base import Spec
from bifeat_pyg.quantizers.scalar import SQ
from bifeat_pyg.quantizers.vector import VQ

CANDIDATES: tuple[Spec, ...] = (
    SQ(16), SQ(8), SQ(4), SQ(2), SQ(1), VQ(4, 256), VQ(8, 256), VQ(16, 256),
    VQ(32, 256, stages=4), VQ(16, 2048),
)  # fmt: skip
_RUNS = 20


@dataclass(frozen=True)
class Trial:
    """One quantizer tried.

    Attributes:
        spec: the quantizer.
        packed_bytes: what all rows would take, with parameters; by proportion from the sample.
        ratio: bytes of the source over these.
        error: root of summed squared error over summed squares, on the sample.
        fits: whether it meets what was asked.
    """

    spec: Spec
    packed_bytes: int
    ratio: float
    error: float
    fits: bool


@dataclass(frozen=True)
class Choice:
    """The spec chosen, and all that were tried, smallest first.

    Attributes:
        spec: the one that meets what was asked best.
        trials: all.
    """

    spec: Spec
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        lines = ["  ratio   error  spec"]
        for trial in self.trials:
            mark = "*" if trial.spec == self.spec else " "
            lines.append(f"{mark}{trial.ratio:5.1f}x  {trial.error:.4f}  {trial.spec}")
        return "\n".join(lines)


def choose_spec(
    x: Any,
    budget: int | None = None,
    max_error: float | None = None,
    *,
    specs: Sequence[Spec] = CANDIDATES,
    sample_rows: int = 20_000,
    nan: str = "error",
) -> Choice:
    """Returns the quantizer to take: least error within a budget, or least bytes within an error.

    Each spec is fitted to and measured on runs of rows spread over the features. Error predicts
    accuracy only roughly (features at 0.1 often train as well as at 0), so try the next
    smaller one too.

    Args:
        x: features, anything that `quantize_file` takes.
        budget: bytes for codes and parameters of all rows.
        max_error: largest root of summed squared error over summed squares, e.g. 0.1.
        specs: what to try.
        sample_rows: rows to try on.
        nan: "error", or "zero".

    Raises:
        SpecError: neither or both of `budget` and `max_error` are given, or no spec meets them; the
            message has the nearest.
        FeatureError: see `quantize`.
    """
    check_nan(nan)
    if (budget is None) == (max_error is None):
        raise SpecError("give budget (bytes) or max_error (e.g. 0.1), one of them")
    source = open_source(x)
    sample = _sample(source, sample_rows)
    size = source.rows * columns_of(source.tail) * sample.read(0, 0).element_size()
    trials = []
    for spec in specs:
        try:
            with warnings.catch_warnings():
                # A codebook that shrinks to a small sample is part of the trial.
                warnings.filterwarnings("ignore", message="only .* rows to fit")
                codec = learn(sample, spec, nan)
        except FeatureError:
            if not specs[1:]:
                raise
            continue
        _, errors = encode(sample, codec, nan)
        packed = source.rows * codec.row_bytes + codec.param_bytes
        lost = errors.relative
        fits = packed <= budget if budget is not None else lost <= (max_error or 0.0)
        trials.append(Trial(spec, packed, size / packed if packed else 1.0, lost, fits))
    trials.sort(key=lambda trial: (trial.packed_bytes, trial.error))
    fitting = [trial for trial in trials if trial.fits]
    if not trials:
        raise FeatureError(f"none of the {len(specs)} specs can represent {sample.dtype} exactly")
    if not fitting:
        if budget is not None:
            near = trials[0]
            raise SpecError(
                f"no spec fits {budget} bytes; the smallest, {near.spec}, takes {near.packed_bytes}"
            )
        near = min(trials, key=lambda trial: trial.error)
        raise SpecError(
            f"no spec reaches an error of {max_error}; the best, {near.spec}, has {near.error:.4f}"
        )
    if budget is not None:
        return Choice(min(fitting, key=lambda trial: trial.error).spec, tuple(trials))
    return Choice(fitting[0].spec, tuple(trials))


def _sample(source: RowSource, rows: int) -> TensorSource:
    """Returns up to `rows` rows of a source, in 20 runs spread over it, read once and in order."""
    if source.rows <= rows:
        return TensorSource(source.read(0, source.rows), source.name)
    length = max(1, rows // _RUNS)
    starts = [run * (source.rows - length) // (_RUNS - 1) for run in range(_RUNS)]
    runs = [source.read(start, start + length) for start in starts]
    return TensorSource(torch.cat(runs), source.name)
