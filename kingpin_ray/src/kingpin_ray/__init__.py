"""GROUP BY for training: thousands of models at once on Ray."""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib.metadata import version as _version

from kingpin_ray import models as models
from kingpin_ray._costs import Costs as Costs
from kingpin_ray._costs import calibrate as calibrate
from kingpin_ray._errors import BadGroupError as BadGroupError
from kingpin_ray._errors import EmptyDataError as EmptyDataError
from kingpin_ray._errors import InputError as InputError
from kingpin_ray._errors import KingpinError as KingpinError
from kingpin_ray._errors import MissingColumnError as MissingColumnError
from kingpin_ray._errors import MissingDependencyError as MissingDependencyError
from kingpin_ray._errors import MixedTypesError as MixedTypesError
from kingpin_ray._errors import ParameterError as ParameterError
from kingpin_ray._errors import ResourceError as ResourceError
from kingpin_ray._errors import StoreError as StoreError
from kingpin_ray._errors import UnknownGroupError as UnknownGroupError
from kingpin_ray._errors import UnknownModelError as UnknownModelError
from kingpin_ray._errors import UnknownScoringError as UnknownScoringError
from kingpin_ray._errors import UnsupportedColumnError as UnsupportedColumnError
from kingpin_ray._estimator import GroupedEstimator as GroupedEstimator
from kingpin_ray.models._gbdt import GBDT as GBDT
from kingpin_ray.models._linear import Linear as Linear
from kingpin_ray.models._linear import Ridge as Ridge
from kingpin_ray.models._logistic import Logistic as Logistic
from kingpin_ray.models._network import MLP as MLP
from kingpin_ray.models._network import Torch as Torch

__version__ = _version("kingpin-ray")
