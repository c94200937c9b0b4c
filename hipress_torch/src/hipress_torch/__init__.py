"""Compressed gradient synchronization for PyTorch DDP and FSDP: codecs, kernels and a planner that compresses only where it pays."""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib.metadata import version as _version

__version__ = _version("hipress-torch")
