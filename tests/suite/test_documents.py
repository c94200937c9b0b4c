"""The documents: what they point at exists, and the commands that they name are real."""

import ast
import re
import sys
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci.command_line import _parser
from ci.layout import PLUGINS, ROOT
from ci.wheels import first_python_block

DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"{p}/README.md" for p in PLUGINS)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_point_at_files_that_exist(name: str):
    document = ROOT / name
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", document.read_text("utf-8"))
    missing = [t for t in targets if not (document.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_commands_are_real(name: str):
    text = (ROOT / name).read_text("utf-8")
    for command in re.findall(r"python3 -m ci ([a-z][^`\n#|]*)", text):
        args, _ = _parser().parse_known_args(command.split())
        if args.command == "bench" and args.name and "/" in args.name and args.name.islower():
            plugin, _, script = args.name.partition("/")
            if not plugin.startswith("<"):
                assert (ROOT / plugin / "benchmarks" / f"{script}.py").exists(), command


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_place_is_left_to_fill_in(name: str):
    text = (ROOT / name).read_text("utf-8")
    assert not re.findall(r"^[A-Z][A-Z0-9_]{3,}$", text, re.MULTILINE)
    assert not re.findall(r"<!-- *(\w+) *-->\s*<!-- *end *-->", text)


def test_readme_shows_the_two_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    assert "python3 -m ci demo" in text
    assert "python3 -m ci test" in text


def _needs(distribution: str) -> set[str]:
    """Returns what installing a distribution without extras brings in, itself included."""
    found: set[str] = set()
    waiting = [canonicalize_name(distribution)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(requirement.name))
    return found


@pytest.mark.parametrize("plugin", PLUGINS)
def test_ten_lines_need_no_more_than_the_plugin_brings(plugin: str):
    """`pip install ./<plugin>` alone must be enough for the first block of its README."""
    tree = ast.parse(first_python_block(ROOT / plugin / "README.md"))
    nodes = list(ast.walk(tree))
    modules = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    modules |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    tops = {m.partition(".")[0] for m in modules} - sys.stdlib_module_names - {plugin}
    owners = packages_distributions()
    needed = {canonicalize_name(name) for top in tops for name in owners[top]}
    assert needed <= _needs(plugin)
