"""Per-client hyperparameters for Flower, tuned on the server with proxy data."""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib.metadata import version as _version

__version__ = _version("fedtune-flwr")
