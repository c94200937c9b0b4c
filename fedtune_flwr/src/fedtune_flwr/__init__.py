"""Per-client hyperparameters for Flower, tuned on the server with proxy data."""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib.metadata import version as _version

from . import tuners as tuners
from ._client import FedTuneMod as FedTuneMod
from ._client import HParams as HParams
from ._client import fedtune_client as fedtune_client
from ._client import hparams as hparams
from ._emulate import Emulator as Emulator
from ._errors import ConfigError as ConfigError
from ._errors import FedTuneError as FedTuneError
from ._errors import MetricsError as MetricsError
from ._errors import ProxyError as ProxyError
from ._errors import SpaceError as SpaceError
from ._errors import StateError as StateError
from ._errors import TunerError as TunerError
from ._errors import UnknownTunerError as UnknownTunerError
from ._generators import FeatureGain as FeatureGain
from ._generators import FeatureShift as FeatureShift
from ._generators import Generator as Generator
from ._generators import LabelNoise as LabelNoise
from ._metrics import METRICS as METRICS
from ._metrics import Metric as Metric
from ._options import TuneOptions as TuneOptions
from ._policy import Policy as Policy
from ._privacy import Noise as Noise
from ._profile import profile as profile
from ._report import Gain as Gain
from ._report import Trial as Trial
from ._report import TuneReport as TuneReport
from ._space import Choice as Choice
from ._space import Int as Int
from ._space import Linear as Linear
from ._space import Log as Log
from ._space import SearchSpace as SearchSpace
from ._strategy import FedTune as FedTune
from ._task import ProxyTask as ProxyTask
from ._tune import tune as tune

__version__ = _version("fedtune-flwr")
