"""`fedtune new NAME`: a Flower app to start from, copied from the package."""

from importlib.resources import files
from pathlib import Path

from ._errors import ConfigError

_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "__init__.py.txt": "{package}/__init__.py",
    "task.py.txt": "{package}/task.py",
    "client_app.py.txt": "{package}/client_app.py",
    "server_app.py.txt": "{package}/server_app.py",
}


def new_app(name: str, folder: Path) -> Path:
    """Writes the template into `folder / name` and returns that path.

    Raises:
        ConfigError: the name is no Python identifier, or the folder exists.
    """
    package = name.replace("-", "_")
    if not package.isidentifier():
        raise ConfigError(f"name={name!r} must be a Python identifier; hyphens are allowed")
    target = folder / name
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another name")
    templates = files(__package__) / "app_template"
    for source, destination in _FILES.items():
        text = (templates / source).read_text(encoding="utf-8")
        path = target / destination.format(package=package)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            text.replace("@NAME@", name).replace("@PACKAGE@", package), encoding="utf-8"
        )
    return target
