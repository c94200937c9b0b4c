"""1-bit SGD: a sign an element, and the mean of each side.

Source: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed
Training of Speech DNNs", Interspeech 2014. There a column of a weight matrix shares its two means;
here a block of 4096 elements of a parameter does.
"""

from hipress_torch import ops
from hipress_torch._compll._algorithm import codec
from hipress_torch._compll._graph import Value
from hipress_torch.ops import Packed


@codec(feedback=True, block=4096)
def onebit(x: Value) -> tuple[Packed, Value, Value]:
    """The sign of each element, and the means of the two sides of each block."""
    positive = x >= 0
    return ops.pack(positive, bits=1), ops.mean(x, where=positive), ops.mean(x, where=~positive)


@onebit.decoder
def _decode(code: Value, high: Value, low: Value) -> Value:
    return ops.where(code == 1, high, low)
