"""The wheels: built, looked into, imported in a clean environment, extended by third parties."""

import json
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from ci import wheels
from ci.layout import PLUGINS, ROOT

POINTS = {
    "hipress_torch": "codecs",
    "bifeat_pyg": "quantizers",
    "fedtune_flwr": "tuners",
    "kingpin_ray": "models",
    "mlcd_bo": "profilers",
}
SITE = sysconfig.get_path("purelib")


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _check(command: list[str], cwd: Path | str = "/") -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _environment(folder: Path, link: str) -> Path:
    """Makes an environment whose only packages are those that `link` brings in."""
    _check([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    [site] = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(link + "\n")
    return folder


def _install(folder: Path, *what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", _python(folder), "install", "-q"]
    _check([*pip, "--no-deps", "--no-index", "--no-build-isolation", *what])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("wheels")
    return {plugin: wheels.build(plugin, out) for plugin in PLUGINS}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, built: dict[str, Path]) -> Path:
    """An environment with the five wheels; of this one only the dependencies are visible.

    A bare path in a .pth file is searched for packages, but the editable installs that are
    themselves .pth files in that folder are not followed.
    """
    folder = _environment(tmp_path_factory.mktemp("clean"), SITE)
    _install(folder, *map(str, built.values()))
    return folder


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that sees the editable installs of this one."""
    link = f"import site; site.addsitedir({SITE!r})"
    return _environment(tmp_path_factory.mktemp("editable"), link)


@pytest.fixture(scope="module")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distribution by somebody else that adds a module to each of the five points."""
    root = tmp_path_factory.mktemp("acme")
    entries = ""
    for plugin, point in POINTS.items():
        module = root / "src" / plugin / point / "acme"
        module.mkdir(parents=True)
        (module / "__init__.py").write_text('"""Somebody else\'s."""\n\nTHING = object()\n')
        entries += f'[project.entry-points."{plugin}.{point}"]\n'
        entries += f'acme = "{plugin}.{point}.acme:THING"\n'
    (root / "pyproject.toml").write_text(
        textwrap.dedent("""
            [build-system]
            requires = ["hatchling"]
            build-backend = "hatchling.build"
            [project]
            name = "acme-extensions"
            version = "1.0"
            [tool.hatch.build.targets.wheel]
            only-include = ["src"]
            sources = ["src"]
            [tool.hatch.build]
            dev-mode-dirs = ["src"]
        """)
        + entries
    )
    return root


@pytest.mark.parametrize("plugin", PLUGINS)
def test_wheel_holds_what_it_should(plugin: str, built: dict[str, Path]):
    wheels.look_inside(built[plugin], plugin)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_wheel_imports_in_a_clean_environment(plugin: str, clean: Path):
    code = f"import {plugin}; print({plugin}.__version__); print({plugin}.__file__)"
    version, file = _check([_python(clean), "-c", code]).splitlines()[-2:]
    assert version
    assert Path(file).is_relative_to(clean), "it is not the wheel that was imported"


@pytest.mark.parametrize("plugin", PLUGINS)
def test_command_line_of_the_wheel_starts(plugin: str, clean: Path):
    assert "usage" in _check([_python(clean), "-m", plugin, "--help"])


CODE_ALL = """
from hipress_torch import codecs
from hipress_torch.testing import check_codec
from hipress_torch._native import _toolchain
assert _toolchain.compiler() is None
for name in ("onebit", "terngrad", "tbq", "nbit", "fp16", "graddrop"):
    options = {"ratio": 0.05} if name == "graddrop" else {}
    print(name, check_codec(codecs.get(name)(**options)).backend)
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="without a C compiler the wheel has no kernels")
def test_kernels_of_the_hipress_torch_wheel_run_without_a_compiler(clean: Path):
    # No PATH: neither a compiler nor anything else is found.
    env = {"PATH": "", "CC": "no-such-compiler", "HIPRESS_TORCH_CACHE": "/nonexistent"}
    command = [_python(clean), "-c", CODE_ALL]
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert len(found) == 6
    assert set(found.values()) <= {"avx512", "avx2", "plain", "neon"}


FIND = """
import importlib, json
found = {}
for plugin, point in json.loads('%s').items():
    package = importlib.import_module(f"{plugin}.{point}")
    module = importlib.import_module(f"{plugin}.{point}.acme")
    found[plugin] = ["acme" in package.available(), module.THING is not None,
                     hasattr(importlib.import_module(plugin), "__version__")]
print(json.dumps(found))
"""


@pytest.mark.parametrize("extension", ["wheel", "editable"])
@pytest.mark.parametrize("host", ["wheel", "editable"])
def test_third_party_extension_is_found(
    host: str,
    extension: str,
    request: pytest.FixtureRequest,
    third_party: Path,
    tmp_path: Path,
):
    folder: Path = request.getfixturevalue("clean" if host == "wheel" else "editable")
    _install(folder, *(["-e"] if extension == "editable" else []), str(third_party))
    try:
        printed = _check([_python(folder), "-c", FIND % json.dumps(POINTS)], cwd=ROOT)
    finally:
        pip = [sys.executable, "-m", "pip", "--python", _python(folder)]
        _check([*pip, "uninstall", "-q", "-y", "acme-extensions"])
    assert json.loads(printed.splitlines()[-1]) == {p: [True, True, True] for p in PLUGINS}


def test_look_inside_refuses_what_does_not_belong(tmp_path: Path, built: dict[str, Path]):
    import zipfile

    spoiled = tmp_path / built["mlcd_bo"].name
    with zipfile.ZipFile(built["mlcd_bo"]) as source, zipfile.ZipFile(spoiled, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
        target.writestr("mlcd_bo/tests/test_x.py", "")
    with pytest.raises(wheels.WheelError, match=r"tests/test_x\.py"):
        wheels.look_inside(spoiled, "mlcd_bo")
