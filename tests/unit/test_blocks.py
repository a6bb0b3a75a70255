"""Every block of the README, CONTRIBUTING and docs/ is run by a test, or says why not. Some are run here."""

import ast
import re
import shutil
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from controlplane.cli.__main__ import cli
from controlplane.cli.command_line import Command
from schemas import ProfilerConfig
from tests.pages import PAGES, Block, blocks, blocks_of
from tests.running import ROOT

TESTS: Final = ROOT / "tests"
HERE: Final = str(Path(__file__).relative_to(ROOT))
RUN_BY: Final = {
    "README.md": "tests/test_readme.py",
    "docs/backends.md": "tests/unit/test_conformance.py",
    "docs/embedding.md": "tests/processes/test_pages.py",
    "docs/engines.md": "tests/processes/test_pages.py",
    "docs/gamedays.md": "tests/processes/test_chaos.py",
    "docs/keys.md": "tests/processes/test_two_machines.py",
    "docs/metrics.md": "tests/unit/test_metrics.py",
    "docs/observe.md": HERE,
    "docs/profiling-config.md": HERE,
    "docs/profiling.md": HERE,
    "docs/recipes/index.md": "tests/processes/test_recipes.py",
    "docs/simulate.md": "tests/unit/test_simulate.py",
    "docs/timeline.md": "tests/test_readme.py",
    "docs/trainers/gateway.md": "tests/trainers/test_gateway_http.py",
    "docs/trainers/openrlhf.md": "tests/trainers/test_openrlhf.py",
    "docs/trainers/roll.md": "tests/trainers/test_roll.py",
}
"""The test of each page that runs its blocks."""
EVERY: Final = [block for page in PAGES for block in blocks_of(page)]
NEEDS_MORE: Final = {"controlplane.trainers.trl"}
"""Modules that import what is not in this environment; the tests in tests/trainers import them."""
OURS: Final = re.compile(r"^from ((?:schemas|controlplane|workers)[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def test_each_block_is_run_by_a_test_or_says_why_not() -> None:
    silent = [block.place for block in EVERY if block.not_run is None and block.page not in RUN_BY]
    assert not silent, f"no test runs these; mark them with <!-- not run: why -->, or name their test: {silent}"
    for page, test in RUN_BY.items():
        assert any(block.page == page and block.not_run is None for block in EVERY), f"{page} has no block to run"
        assert page in (ROOT / test).read_text("utf-8"), f"{test} does not name {page}"


def test_each_page_of_a_trainer_says_the_commits_and_versions_that_its_rows_in_the_table_do() -> None:
    table = (ROOT / "docs/trainers/index.md").read_text("utf-8")
    rows = re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)[^|]*\| ([^|]+) \|", table, re.MULTILINE)
    rows = [row for row in rows if row[1] != "-"]
    doors = {path.name for path in (ROOT / "docs/trainers").glob("*.md")} - {"index.md", "gateway.md"}
    assert {page for page, _ in rows} == doors
    for page, read in rows:
        said = re.findall(r"`[0-9a-f]{8,9}`|\d+\.\d+\.\d+", read)
        text = (ROOT / "docs/trainers" / page).read_text("utf-8")
        assert said and not [each for each in said if each not in text], page


def test_each_test_and_file_that_a_page_names_exists() -> None:
    defined = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    defined |= {path.stem for path in TESTS.rglob("test_*.py")}
    for page in (page for page in PAGES if not page.startswith("docs/decisions/")):  # those speak of their time
        text = (ROOT / page).read_text("utf-8")
        assert set(re.findall(r"`(test_\w+)`", text)) <= defined, page
        for named in re.findall(r"`((?:tests|controlplane|schemas|workers|bench)/[\w/]+\.\w+)`", text):
            assert (ROOT / named).exists(), f"{page} names {named}"


def test_each_command_of_the_pages_exists_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that can't run here: they are read by the command line, and not carried out."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    for file in ("run.db", "run/run.db", "trainer.yaml", "profile.yaml", "plan.toml", "fleet.toml"):
        Path(file).touch()
    ran(["keys", "new", "me", "--role", "operator"])
    shutil.copy("keys/issued/me.key", "me.key")
    monkeypatch.setenv("ROLLOUTCTL_BUS", "tcp://127.0.0.1:5555")
    monkeypatch.setattr(Command, "invoke", lambda *_: None)
    refused = []
    for block in EVERY:
        for words in block.commands():
            done = CliRunner().invoke(cli, words)
            if done.exit_code:
                refused.append((block.place, words, done.output))
    assert not refused, refused


def test_what_python_blocks_import_from_here_exists() -> None:
    for block in EVERY:
        for module, name in imported(block):
            with suppress(ModuleNotFoundError) if module in NEEDS_MORE else nullcontext():
                assert hasattr(import_module(module), name), f"{block.place}: {module} has no {name}"


def imported(block: Block) -> list[tuple[str, str]]:
    """What a block imports from these packages: module and name. Sketches need not be whole Python."""
    if block.language != "python":
        return [(module, name.strip()) for module, names in OURS.findall(block.text) for name in names.split(",")]
    imports = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.ImportFrom)]
    ours = ("schemas", "controlplane", "workers")
    return [(str(n.module), a.name) for n in imports for a in n.names if str(n.module).partition(".")[0] in ours]


# --- pages without a trainer ------------------------------------------------------------------------------------------


def ran(words: list[str]) -> str:
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.output


def test_an_observer_in_process_is_defined_as_the_page_shows() -> None:
    (block,) = blocks("docs/observe.md")
    names: dict[str, object] = {}
    exec(block, names)
    assert callable(names["observing"])


def test_a_profile_is_explained_as_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = blocks("docs/profiling-config.md", "text")
    _, explain, *_ = re.split(r"^\$ rolloutctl ", shown, flags=re.MULTILINE)
    command, _, output = explain.partition("\n")
    Path("profile.yaml").write_text(output.partition("# ")[0])
    assert ran(command.split()) == output
    (ours,) = blocks("docs/profiling-config.md", "yaml")
    assert ProfilerConfig.from_yaml(ours).roles.keys() == {"actor", "critic"}


def test_verls_example_is_explained_as_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    configuration, shown, *_ = blocks("docs/profiling.md", "yaml")
    Path("trainer.yaml").write_text(configuration)
    assert ran(["profile", "explain", "trainer.yaml", "--verl"]) == shown
