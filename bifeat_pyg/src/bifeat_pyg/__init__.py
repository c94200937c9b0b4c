"""Quantized node features for PyTorch Geometric: stored and moved packed, dequantized at use.

>>> packed = bifeat_pyg.quantize(data, spec=bifeat_pyg.SQ(bits=4))
>>> sampler = bifeat_pyg.CSCNeighborSampler(packed, num_neighbors=[10, 5])
>>> loader = bifeat_pyg.QuantizedLoader(NodeLoader(packed, sampler, batch_size=128), device="cuda")
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

import typing as _typing
from importlib import import_module as _import_module
from importlib.metadata import version as _version

from bifeat_pyg._errors import BiFeatError as BiFeatError
from bifeat_pyg._errors import ChecksumError as ChecksumError
from bifeat_pyg._errors import FeatureError as FeatureError
from bifeat_pyg._errors import FormatError as FormatError
from bifeat_pyg._errors import LoaderError as LoaderError
from bifeat_pyg._errors import NonFiniteError as NonFiniteError
from bifeat_pyg._errors import NotAGraphError as NotAGraphError
from bifeat_pyg._errors import RowIndexError as RowIndexError
from bifeat_pyg._errors import SpecError as SpecError
from bifeat_pyg._errors import StorageError as StorageError
from bifeat_pyg._errors import UnknownAttrError as UnknownAttrError
from bifeat_pyg._errors import VersionError as VersionError

if _typing.TYPE_CHECKING:
    from bifeat_pyg import paper as paper
    from bifeat_pyg import quantizers as quantizers
    from bifeat_pyg._cache import CachedRows as CachedRows
    from bifeat_pyg._choose import Choice as Choice
    from bifeat_pyg._choose import choose_spec as choose_spec
    from bifeat_pyg._dequantize import Dequantize as Dequantize
    from bifeat_pyg._file import quantize_file as quantize_file
    from bifeat_pyg._loader import QuantizedLoader as QuantizedLoader
    from bifeat_pyg._quantize import quantize as quantize
    from bifeat_pyg._report import Report as Report
    from bifeat_pyg._report import TableReport as TableReport
    from bifeat_pyg._sampler import CSCNeighborSampler as CSCNeighborSampler
    from bifeat_pyg._store import QuantizedFeatureStore as QuantizedFeatureStore
    from bifeat_pyg.quantizers.scalar import SQ as SQ
    from bifeat_pyg.quantizers.vector import VQ as VQ

__version__ = _version("bifeat-pyg")

# Where the names above are, for when they are first used: torch and PyG take seconds to import, and
# `--help` needs neither.
_HOME = {
    "paper": "paper",
    "quantizers": "quantizers",
    "CachedRows": "_cache",
    "Choice": "_choose",
    "choose_spec": "_choose",
    "Dequantize": "_dequantize",
    "quantize_file": "_file",
    "QuantizedLoader": "_loader",
    "quantize": "_quantize",
    "Report": "_report",
    "TableReport": "_report",
    "CSCNeighborSampler": "_sampler",
    "QuantizedFeatureStore": "_store",
    "SQ": "quantizers.scalar",
    "VQ": "quantizers.vector",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _import_module(f"{__name__}.{_HOME[name]}")
    # Kept, so that the next use does not come here. A module of its own has no such member.
    found = globals()[name] = getattr(module, name, module)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
