"""The codecs: the built-in ones, and those that other distributions add.

A distribution adds one with an entry point in the group ``hipress_torch.codecs``, and may ship its
module as ``hipress_torch/codecs/<name>/`` (without an ``__init__.py`` beside ours).
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib import import_module
from importlib.metadata import entry_points

from hipress_torch._codec import Batch as Batch
from hipress_torch._codec import Codec as Codec
from hipress_torch._codec import Draw as Draw
from hipress_torch._codec import Segment as Segment
from hipress_torch._compll._algorithm import Algorithm as Algorithm
from hipress_torch._errors import CodecError, UnknownCodecError

BUILT_IN = {
    "onebit": "hipress_torch.codecs._onebit:onebit",
    "tbq": "hipress_torch.codecs._quantizers:tbq",
    "terngrad": "hipress_torch.codecs._quantizers:terngrad",
    "nbit": "hipress_torch.codecs._quantizers:nbit",
    "dgc": "hipress_torch.codecs._sparse:DGC",
    "graddrop": "hipress_torch.codecs._sparse:GradDrop",
    "none": "hipress_torch.codecs._casts:none",
    "fp16": "hipress_torch.codecs._casts:fp16",
    "bf16": "hipress_torch.codecs._casts:bf16",
}
_GROUP = "hipress_torch.codecs"


def available() -> tuple[str, ...]:
    """Returns the names of all codecs that are installed, sorted; imports none of them."""
    return tuple(sorted({*BUILT_IN, *(e.name for e in entry_points(group=_GROUP))}))


def get(name: str) -> Algorithm | type[Codec]:
    """Returns the codec of that name: call it with its options to get a :class:`Codec`.

    Raises:
        UnknownCodecError: none of that name is installed.
        CodecError: its entry point cannot be imported or is no codec.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        matches = [e for e in entry_points(group=_GROUP) if e.name == name]
        if not matches:
            raise UnknownCodecError(
                f"codec: no codec is named {name!r}; installed: {', '.join(available())}. Pass "
                f"one of these, a codec object, or install the distribution that brings it"
            )
        try:
            found = matches[0].load()
        except Exception as error:
            raise CodecError(
                f"codec {name!r}: its entry point {matches[0].value!r} cannot be loaded: {error}"
            ) from error
    if not (isinstance(found, Algorithm) or (isinstance(found, type) and issubclass(found, Codec))):
        raise CodecError(
            f"codec {name!r} is a {type(found).__name__}; it must be made with "
            f"@hipress_torch.codec or "
            f"be a subclass of hipress_torch.codecs.Codec"
        )
    return found
