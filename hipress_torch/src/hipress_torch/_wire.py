"""The 16 bytes at the head of every message, and what is checked in them.

Everything else about a message follows from what all ranks know (codec, sizes), so no sizes are
exchanged. Layout, little-endian: magic ``HP``, version u8, flags u8, iteration u32, part u32
(bucket and part number), and the checksum of the codec's fingerprint u32.
"""

import struct

import torch

from hipress_torch._errors import WireError

HEADER = struct.Struct("<2sBBIII")
HEADER_BYTES = HEADER.size
VERSION = 1
NOT_FINITE = 1


def _view(message: torch.Tensor) -> memoryview:
    return memoryview(message.numpy())  # type: ignore[arg-type]


def write_header(message: torch.Tensor, flags: int, iteration: int, part: int, codec: int) -> None:
    """Writes the header into the first bytes of a uint8 CPU tensor."""
    HEADER.pack_into(
        _view(message), 0, b"HP", VERSION, flags, iteration & 0xFFFFFFFF, part & 0xFFFFFFFF, codec
    )


def read_header(message: torch.Tensor, sender: int, iteration: int, part: int, codec: int) -> int:
    """Returns the flags of a message after checking that it is the one expected.

    Raises:
        WireError: it is not; names the sender and what differs.
    """
    magic, version, flags, its, number, theirs = HEADER.unpack_from(_view(message), 0)
    expected = (b"HP", VERSION, iteration & 0xFFFFFFFF, part & 0xFFFFFFFF, codec)
    if (magic, version, its, number, theirs) != expected:
        raise WireError(
            f"message from group rank {sender}: got (magic, version, iteration, part, codec) = "
            f"{(magic, version, its, number, theirs)}, expected {expected}. The ranks have run a "
            f"different number of backward passes, have different models or different codecs; "
            f"start all ranks from the same checkpoint with the same options"
        )
    return int(flags)
