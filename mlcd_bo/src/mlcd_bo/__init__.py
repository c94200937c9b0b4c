"""The cheapest or fastest deployment for a training job, counting what finding it costs."""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib.metadata import version as _version

__version__ = _version("mlcd-bo")
