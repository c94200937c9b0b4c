"""Codecs that change the number format and nothing else."""

from hipress_torch import ops
from hipress_torch._compll._algorithm import codec
from hipress_torch._compll._graph import Value
from hipress_torch.ops import Packed


@codec()
def none(x: Value) -> Packed:
    """The elements as they are, float32."""
    return ops.pack(x, "float32")


@codec()
def fp16(x: Value) -> Packed:
    """The elements as float16, limited to its range; summed in float32."""
    return ops.pack(x, "float16")


@codec()
def bf16(x: Value) -> Packed:
    """The elements as bfloat16; summed in float32."""
    return ops.pack(x, "bfloat16")
