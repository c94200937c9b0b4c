"""What a quantizer is: a `Spec` that is fitted to features, and the `Codec` that comes of it.

A third party adds one by an entry point in the group ``bifeat_pyg.quantizers`` that names a Spec
class.
"""

import dataclasses
import hashlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bifeat_pyg._errors import FormatError, SpecError


@dataclass(frozen=True)
class Summary:
    """What one pass over all rows learned, exactly; given to `Spec.fit` beside the sample.

    Attributes:
        rows: number of rows.
        columns: number of columns, D.
        minimum: smallest value of each column, float64 [D] (0 where there are no rows).
        maximum: largest value of each column, float64 [D].
        integral: whether the source held integers or bools: such features must come back exactly.
        boolean: whether the source held bools.
    """

    rows: int
    columns: int
    minimum: Tensor
    maximum: Tensor
    integral: bool = False
    boolean: bool = False


class Spec(ABC):
    """How features are to be quantized; concrete specs are frozen dataclasses of plain values.

    Attributes:
        name: what the spec is called in `bifeat_pyg.quantizers.get` and in files.
        sample_rows: how many rows `fit` wants to see.
        seed: seed of the sample and of anything random in `fit`.
    """

    name: ClassVar[str]
    sample_rows: int
    seed: int

    @abstractmethod
    def fit(self, sample: Tensor, summary: Summary) -> "Codec":
        """Returns a codec for features like these.

        Args:
            sample: float32 [S, D], rows drawn without replacement, all finite; S may be 0.
            summary: minima and maxima of all rows.

        Raises:
            FeatureError: this spec cannot represent the features as it must.
        """

    @abstractmethod
    def restore(self, columns: int, params: Mapping[str, Tensor]) -> "Codec":
        """Returns the codec whose `Codec.params` these are (the inverse of fitting and storing).

        Raises:
            FormatError: a parameter is missing or has another shape or dtype.
        """

    def to_dict(self) -> dict[str, Any]:
        """Returns the spec as JSON-ready values, with its name under "quantizer"."""
        assert dataclasses.is_dataclass(self)
        return {"quantizer": self.name} | dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the spec that `to_dict` described.

        Raises:
            SpecError: a field is unknown or its value is not allowed.
        """
        values = {k: v for k, v in fields.items() if k != "quantizer"}
        try:
            return cls(**values)
        except TypeError as error:
            raise SpecError(f"fields of {cls.__name__} are not understood: {error}") from None


def check_dtype(dtype: object) -> None:
    """Raises SpecError unless `dtype` can hold what is dequantized: others would cut it off."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise SpecError(
            f"dtype is {dtype!r}; features are dequantized to a float dtype, e.g. torch.float32 "
            "(integers were kept exactly: convert the result)"
        )


# Codecs by fingerprint, for batches that come back from a worker process.
_KNOWN: "weakref.WeakValueDictionary[str, Codec]" = weakref.WeakValueDictionary()


class Codec(ABC):
    """A fitted quantizer: turns float rows into packed bytes and back.

    Immutable. Parameters live on the CPU; copies for other devices are made on first use and kept.

    Args:
        spec: the spec it was fitted from (with what fitting narrowed, e.g. 1 bit for bools).
        columns: number of columns, D.
        params: all that decoding needs, by name, CPU tensors.

    Attributes:
        tail: shape of one row as the user had it, [D] unless `shaped` said otherwise.
        fingerprint: 32 hex digits, equal for codecs that decode alike.
    """

    tail: tuple[int, ...]

    def __init__(self, spec: Spec, columns: int, params: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.columns = columns
        self.tail = (columns,)
        # A copy, in plain strides: nobody else's writes reach it.
        self.params = {
            k: v.detach().clone(memory_format=torch.contiguous_format) for k, v in params.items()
        }
        self._on: dict[torch.device, dict[str, Tensor]] = {}
        digest = hashlib.sha256(repr((sorted(spec.to_dict().items()), columns)).encode())
        for name in sorted(self.params):
            digest.update(name.encode())
            digest.update(self.params[name].reshape(-1).view(torch.uint8).numpy().tobytes())
        self.fingerprint = digest.hexdigest()[:32]

    def shaped(self, tail: tuple[int, ...]) -> Self:
        """Returns this codec for rows of another shape with as many values; () for scalars."""
        tail = tuple(tail)
        if tail == self.tail:
            return self
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.tail = tail
        other.fingerprint = hashlib.sha256(f"{self.fingerprint} {tail}".encode()).hexdigest()[:32]
        return other

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of one packed row."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Returns rows packed, uint8 [N, row_bytes], from float32 [N, D] of finite values."""

    @abstractmethod
    def _decode(
        self,
        packed: Tensor,
        index: Tensor | None,
        params: Mapping[str, Tensor],
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns the chosen rows (all without an index), [M, D], as `dtype` or as float32.

        `params` are this codec's, on the device to compute on; `index` is not yet checked; `out`
        may be written into and returned, or not.
        """

    def decode(
        self,
        packed: Tensor,
        dtype: torch.dtype = torch.float32,
        index: Tensor | None = None,
        device: torch.device | str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns packed rows as floats; with `index`, gathered and dequantized in one kernel.

        Args:
            packed: uint8 [N, row_bytes or wider], on any device.
            dtype: of the result.
            index: int64 [M], rows to take; all when None.
            device: where to compute, if not where `packed` is. Pinned host memory may be decoded
                on a CUDA device without copying the table.
            out: float32 [M, *tail] on the CPU that may be written into and returned, which saves
                the allocation: fresh memory costs as much as the decoding.

        Returns:
            [M, *tail] of `dtype`.

        Raises:
            SpecError: `dtype` is not a float dtype.
            FormatError: `packed` is not uint8 rows of this codec.
            RowIndexError: an index is outside the table.
        """
        check_dtype(dtype)
        if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] < self.row_bytes:
            raise FormatError(
                f"packed rows must be uint8 of shape [N, {self.row_bytes}] for {self.spec}; got "
                f"{packed.dtype} {list(packed.shape)}. Were they already dequantized?"
            )
        where = packed.device if device is None else torch.device(device)
        if out is not None and out.is_contiguous():
            out = out.view(out.shape[0], self.columns)
        rows = self._decode(packed, index, self.params_on(where), dtype, out)
        if self.tail != (self.columns,):
            rows = rows.reshape(rows.shape[0], *self.tail)
        return rows.to(dtype)

    def params_on(self, device: torch.device) -> Mapping[str, Tensor]:
        """Returns the parameters on a device; the copy is kept for the next call."""
        if device.type == "cpu":
            return self.params
        if device not in self._on:
            self._on[device] = {k: v.to(device) for k, v in self.params.items()}
        return self._on[device]

    @property
    def param_bytes(self) -> int:
        """Bytes of scales or codebooks."""
        return sum(p.numel() * p.element_size() for p in self.params.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec}, columns={self.columns})"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # A batch that a DataLoader's worker sends back carries its codec. The process that receives
        # it gave the worker that very codec, so a name is enough: a codebook need not travel with
        # every batch.
        if torch.utils.data.get_worker_info() is not None:
            return _known, (self.fingerprint,)
        return _rebuild, (self.spec, self.columns, self.params, self.tail)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def known(codec: Codec) -> Codec:
    """Returns the one object that stands for all codecs equal to this one.

    So device copies are shared, and the name that a worker sends finds a codec as long as anybody
    holds an equal one.
    """
    return _KNOWN.setdefault(codec.fingerprint, codec)


def _known(fingerprint: str) -> Codec:
    try:
        return _KNOWN[fingerprint]
    except KeyError:
        raise FormatError(
            "a batch came from a worker whose quantized data this process no longer holds; keep "
            "the quantized Data or store alive while its loader runs"
        ) from None


def _rebuild(
    spec: Spec, columns: int, params: Mapping[str, Tensor], tail: tuple[int, ...]
) -> Codec:
    return known(spec.restore(columns, params).shaped(tail))


def require(
    params: Mapping[str, Tensor],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns a parameter of this dtype and shape.

    Raises:
        FormatError: it is missing or different.
    """
    tensor = params.get(name)
    if tensor is not None and tensor.dtype == dtype and tuple(tensor.shape) == shape:
        return tensor
    got = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
    raise FormatError(f"parameter {name!r} must be {dtype} {list(shape)}; got {got}")
