"""Dequantize: a module that turns packed rows into floats inside a model."""

import torch
from torch import Tensor, nn

from bifeat_pyg._errors import FeatureError
from bifeat_pyg.quantizers._base import Codec, check_dtype


class Dequantize(nn.Module):
    """Turns packed rows into floats, as the first layer of a model.

    For loops that move batches themselves (Lightning, DDP wrappers): the batch stays packed until
    the model reads it. The module has no weights, and follows its input to any device.

    Args:
        codec: of the packed attribute, e.g. `data.x_codec` or `store.codec(None, "x")`.
        dtype: of the result.

    Raises:
        FeatureError: `codec` is not a codec.
        SpecError: `dtype` is not a float dtype.

    Example:
        >>> model = nn.Sequential(Dequantize(packed.x_codec), nn.Linear(64, 10))
        >>> model(batch.x)
    """

    def __init__(self, codec: Codec, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if not isinstance(codec, Codec):
            raise FeatureError(
                f"codec is a {type(codec).__name__}; pass data.x_codec or store.codec(...)"
            )
        check_dtype(dtype)
        self.codec = codec
        self.dtype = dtype

    def forward(self, packed: Tensor) -> Tensor:
        """Returns uint8 [M, row_bytes] as `dtype` [M, *row shape], on the device of `packed`."""
        return self.codec.decode(packed, self.dtype)

    def extra_repr(self) -> str:
        """Returns what `repr` shows in brackets."""
        return f"{self.codec.spec}, columns={self.codec.columns}, dtype={self.dtype}"
