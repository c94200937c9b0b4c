"""The cheapest or fastest deployment for a training job, counting what finding it costs."""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import profilers as profilers
from ._catalog import Catalog as Catalog
from ._catalog import InstanceType as InstanceType
from ._errors import CatalogChanged as CatalogChanged
from ._errors import CatalogError as CatalogError
from ._errors import InvalidInput as InvalidInput
from ._errors import MissingExtra as MissingExtra
from ._errors import MLCDError as MLCDError
from ._errors import NoFeasibleDeployment as NoFeasibleDeployment
from ._errors import NothingObserved as NothingObserved
from ._errors import ProfilingFailed as ProfilingFailed
from ._errors import StoreError as StoreError
from ._errors import TraceError as TraceError
from ._errors import UnknownName as UnknownName
from ._job import Job as Job
from ._ledger import Ledger as Ledger
from ._optimizer import DeploymentOptimizer as DeploymentOptimizer
from ._recommendation import Estimate as Estimate
from ._recommendation import Recommendation as Recommendation
from ._scenario import Scenario as Scenario
from ._space import Deployment as Deployment
from ._space import SearchSpace as SearchSpace
from ._step import step as step
from ._strategies import strategies as strategies
from ._transfer import EarlierJob as EarlierJob
from ._trial import Limits as Limits
from ._trial import Observation as Observation
from ._trial import Profiler as Profiler
from ._trial import Trial as Trial
from ._trial import TrialCost as TrialCost
from .profilers._local import LocalTorchrun as LocalTorchrun
from .profilers._ray import RayProfiler as RayProfiler
from .profilers._sky import SkyProfiler as SkyProfiler
from .profilers._trace import TraceProfiler as TraceProfiler

if _TYPE_CHECKING:
    from ._acquisition import LogEIPerCost as LogEIPerCost
    from ._acquisition import PandoraGittinsIndex as PandoraGittinsIndex
    from ._acquisition import ReserveConstraint as ReserveConstraint
    from ._scaling_mean import ScalingMean as ScalingMean

__version__ = _version("mlcd-bo")

# The BoTorch parts load BoTorch, which a training script that only calls `step` must not pay for.
_BOTORCH_PARTS = {
    "LogEIPerCost": "_acquisition",
    "PandoraGittinsIndex": "_acquisition",
    "ReserveConstraint": "_acquisition",
    "ScalingMean": "_scaling_mean",
}


def __getattr__(name: str) -> object:
    if name in _BOTORCH_PARTS:
        from importlib import import_module

        return getattr(import_module(f".{_BOTORCH_PARTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_BOTORCH_PARTS])
