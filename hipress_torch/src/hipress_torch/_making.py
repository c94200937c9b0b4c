"""Makes the codec for what a user passed."""

from typing import Any

from hipress_torch import codecs
from hipress_torch._codec import Codec
from hipress_torch._compll._algorithm import Algorithm
from hipress_torch._errors import CodecError


def make_codec(codec: str | Algorithm | Codec, options: dict[str, Any]) -> Codec:
    """Returns the codec for what a user passed.

    Raises:
        UnknownCodecError: no codec has that name.
        CodecError: the options are wrong, or it is no codec.
    """
    if isinstance(codec, Codec):
        if options:
            raise CodecError(
                f"codec options {sorted(options)} were given with a codec that already has its "
                f"own; pass the codec's name or set them when you make it"
            )
        return codec
    found: Any = codecs.get(codec) if isinstance(codec, str) else codec
    if not callable(found):
        raise CodecError(
            f"codec must be a name, a codec or an algorithm made with @codec, got "
            f"{type(codec).__name__}"
        )
    try:
        made = found(**options)
    except TypeError as error:
        raise CodecError(f"codec {codec!r}: {error}") from error
    if not isinstance(made, Codec):
        raise CodecError(f"codec {codec!r} gave a {type(made).__name__}, not a Codec")
    return made
