"""Compressed gradient synchronization for PyTorch DDP and FSDP.

Codecs, kernels and a planner that compresses only where it pays.
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib.metadata import version as _version

from hipress_torch import codecs as codecs
from hipress_torch import ops as ops
from hipress_torch._calibrate import calibrate as calibrate
from hipress_torch._compll._algorithm import codec as codec
from hipress_torch._errors import CodecError as CodecError
from hipress_torch._errors import ConformanceError as ConformanceError
from hipress_torch._errors import FileError as FileError
from hipress_torch._errors import HiPressError as HiPressError
from hipress_torch._errors import MismatchError as MismatchError
from hipress_torch._errors import PeerError as PeerError
from hipress_torch._errors import PeerTimeoutError as PeerTimeoutError
from hipress_torch._errors import PlanError as PlanError
from hipress_torch._errors import RegistrationError as RegistrationError
from hipress_torch._errors import StateError as StateError
from hipress_torch._errors import UnknownCodecError as UnknownCodecError
from hipress_torch._errors import UnsupportedError as UnsupportedError
from hipress_torch._errors import WireError as WireError
from hipress_torch._fsdp import FSDPState as FSDPState
from hipress_torch._fsdp import apply_fsdp as apply_fsdp
from hipress_torch._fsdp import fsdp1_hook as fsdp1_hook
from hipress_torch._hook import hipress_hook as hipress_hook
from hipress_torch._hook import register as register
from hipress_torch._plan import Plan as Plan
from hipress_torch._plan import Profile as Profile
from hipress_torch._state import HiPressState as HiPressState

__version__ = _version("hipress-torch")
