"""GROUP BY for training: thousands of models at once on Ray, with gradient accumulation parallelism."""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib.metadata import version as _version

__version__ = _version("kingpin-ray")
