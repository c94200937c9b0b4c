"""The documents: what they point at exists, and the commands that they name are real."""

import re

import pytest

from ci.command_line import _parser
from ci.layout import PLUGINS, ROOT

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


def test_readme_shows_the_two_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    assert "python3 -m ci demo" in text
    assert "python3 -m ci test" in text
