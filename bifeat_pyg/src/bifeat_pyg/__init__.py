"""Quantized node features for PyTorch Geometric: stored and moved packed, dequantized where they are used."""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from importlib.metadata import version as _version

__version__ = _version("bifeat-pyg")
