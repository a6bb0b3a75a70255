"""The page about the public API names what the packages export, and all of it can be imported."""

import importlib
import re

import pytest

from tests.running import ROOT

PAGE = (ROOT / "docs" / "public-api.md").read_text("utf-8")


@pytest.mark.parametrize("package", ["controlplane", "schemas", "workers"])
def test_the_page_names_every_export(package: str) -> None:
    module = importlib.import_module(package)
    assert {name for name in module.__all__ if f"`{name}`" not in PAGE} == set()
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(
    "line", re.findall(r"^\| `(\S+?)`.*? \| (.+) \|$", PAGE, re.MULTILINE), ids=lambda line: line[0]
)
def test_every_name_on_the_page_is_there(line: tuple[str, str]) -> None:
    package, names = line
    module = importlib.import_module(package)
    assert [name for name in re.findall(r"`(\w+)`", names) if not hasattr(module, name)] == []
