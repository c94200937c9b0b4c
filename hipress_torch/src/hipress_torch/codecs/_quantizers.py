"""Codecs that send a few bits an element: TBQ, TernGrad and blockwise n-bit quantization.

Definitions follow the codecs that HiPress ships, with the differences each one states.
"""

from hipress_torch import ops
from hipress_torch._compll._algorithm import codec
from hipress_torch._compll._graph import Value
from hipress_torch.ops import Packed

Encoded = Packed | tuple[Packed | Value | float, ...]


@codec(feedback=True)
def tbq(x: Value, *, tau: float = 2.0, relative: bool = True) -> Encoded:
    """Threshold binary quantization: plus or minus tau beyond a threshold tau, else nothing.

    Two bits an element (0 is -tau, 1 is 0, 2 is +tau), as HiPress sends it; what is below the
    threshold waits in the residual. There tau is a number the user tunes to the gradients:
    ``relative=False`` (``x`` is then a rank's share of the mean). Here tau counts mean absolute
    values of the block unless told otherwise.
    """
    threshold = ops.mean(ops.abs(x)) * tau if relative else tau
    code = ops.where(x > threshold, 2.0, ops.where(x < -threshold, 0.0, 1.0))
    packed = ops.pack(code, bits=2)
    return (packed, threshold) if relative else packed


@tbq.decoder
def _decode_tbq(code: Value, *threshold: Value, tau: float, relative: bool) -> Value:
    return (code - 1.0) * (threshold[0] if relative else tau)


@codec(block=4096)
def terngrad(x: Value, *, bits: int = 2, random: bool = True) -> tuple[Packed, Value, Value]:
    """Levels between the smallest and the largest value, rounded at random without bias.

    ``q = floor((x - min) / gap + u)`` with ``gap = (max - min) / (2**bits - 1)`` and ``u`` in [0,
    1), as HiPress has it; there a tensor shares the range, here a block does. ``random=False``
    rounds to the nearest level.
    """
    low = ops.min(x)
    gap = (ops.max(x) - low) / (2.0**bits - 1.0)
    step = ops.where(gap > 0.0, gap, 1.0)
    level = (x - low) / step + (ops.uniform() if random else 0.5)
    return ops.pack(ops.floor(level), bits=bits), low, gap


@terngrad.decoder
def _decode_terngrad(code: Value, low: Value, gap: Value) -> Value:
    return low + code * gap


@codec(block=512)
def nbit(x: Value, *, bits: int = 4, random: bool = True) -> tuple[Packed, Value, Value]:
    """2, 4 or 8 bits an element between the extremes of small blocks, rounded without bias."""
    low = ops.min(x)
    step = (ops.max(x) - low) / (2.0**bits - 1.0)
    level = (x - low) / ops.where(step > 0.0, step, 1.0) + (ops.uniform() if random else 0.5)
    return ops.pack(ops.floor(level), bits=bits), low, step


@nbit.decoder
def _decode_nbit(code: Value, low: Value, step: Value) -> Value:
    return low + code * step
