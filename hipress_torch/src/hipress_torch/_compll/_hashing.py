"""The random numbers of the codecs: a keyed integer hash of an element's position.

The same few integer operations run in torch, C and Triton and give the same bits, which is what
lets every kernel be tested exactly. lowbias32 is Chris Wellons' public-domain 32-bit mixer; two
keyed rounds of it decorrelate neighbouring positions, parameters and iterations.
"""

import torch

MASK_32 = 0xFFFFFFFF
MASK_64 = 0xFFFFFFFFFFFFFFFF


def splitmix64(x: int) -> int:
    """Returns a well mixed 64-bit number for ``x`` (Steele, Lea and Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def stream_of(seed: int, iteration: int, hop: int) -> int:
    """Returns the 64-bit stream that one encode pass of one iteration draws from."""
    return splitmix64(splitmix64(splitmix64(seed & MASK_64) ^ iteration) ^ hop)


def _lowbias32(x: torch.Tensor) -> torch.Tensor:
    # int64 holds the 32-bit values; products wrap modulo 2**64, which leaves the low 32 bits right.
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK_32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK_32
    return x ^ (x >> 16)


def uniform(position: torch.Tensor, stream: int, parameter: int) -> torch.Tensor:
    """Returns float32 numbers in [0, 1) for int64 positions within a parameter."""
    key = splitmix64(stream ^ (parameter & MASK_64))
    low, high = key & MASK_32, key >> 32
    x = _lowbias32((position + low) & MASK_32)
    x = _lowbias32(x ^ high)
    return (x >> 8).to(torch.float32) * 2.0**-24
