"""Where things are: the repository's root, its plugins, what the commands may write to."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
VENV = ROOT / ".venv"

PLUGINS = ("hipress_torch", "bifeat_pyg", "fedtune_flwr", "kingpin_ray", "mlcd_bo")
