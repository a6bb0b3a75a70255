"""The page about the public API names what the packages export, no more and no less, and all of it can be imported."""

import importlib
import re

import pytest

from tests.running import ROOT

PAGE = (ROOT / "docs" / "public-api.md").read_text("utf-8")
LINES = re.findall(r"^\| `([\w.]+)`.*? \| (.+) \|$", PAGE, re.MULTILINE)
ABSENT = {"controlplane.trainers.trl"}
"""What needs packages that are not in this environment; the tests in tests/trainers import it."""


def exported(package: str) -> list[str]:
    """The names that a package means for others."""
    source = (ROOT / package / "__init__.py").read_text("utf-8")
    whole = map(importlib.import_module, re.findall(r"^from ([\w.]+) import \*", source, re.MULTILINE))
    all_of_them = [name for module in whole for name in vars(module) if not name.startswith("_")]
    return [*re.findall(r"import (\w+) as \1$", source, re.MULTILINE), *all_of_them]


@pytest.mark.parametrize("package", ["controlplane", "schemas", "workers"])
def test_the_page_has_what_the_package_exports(package: str) -> None:
    module = importlib.import_module(package)
    named = {name for room, names in LINES if room == package for name in re.findall(r"`(\w+)`", names)}
    assert named - {"run_log"} == {*exported(package)}
    assert [name for name in exported(package) if not hasattr(module, name)] == []
    assert not hasattr(module, "no_such_name")


def test_other_modules_have_what_the_page_names() -> None:
    for room, names in LINES:
        if room not in {"controlplane", "schemas", "workers"} | ABSENT:
            module = importlib.import_module(room)
            assert [name for name in re.findall(r"`(\w+)`", names) if not hasattr(module, name)] == []
