"""The page of promises names tests, scenarios and ablations that exist."""

import re
from pathlib import Path

from tests.simulation.test_ablations import ABLATIONS

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "promises.md").read_text("utf-8")
TABLE = [line for line in PAGE.splitlines() if re.match(r"\| (P|I)\d+ ", line)]


def test_every_promise_and_invariant_has_its_line() -> None:
    names = [re.match(r"\| (\w+) ", line)[1] for line in TABLE]  # type: ignore[index]
    assert names == [*(f"P{number}" for number in range(1, 12)), *(f"I{number}" for number in range(1, 14))]


def test_every_test_that_is_named_exists() -> None:
    defined = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named and named <= defined, named - defined


def test_every_file_and_folder_that_is_named_exists() -> None:
    named = set(re.findall(r"`((?:tests|controlplane)/[\w/.]+)`", PAGE))
    assert named and all((TESTS.parent / path).exists() for path in named), named


def test_every_promise_was_attacked_by_something_that_can_be_run_again() -> None:
    attacks = [line.split(" | ") for line in PAGE.partition("## Attacks")[2].splitlines() if line.startswith("| ")][2:]
    promises: set[int] = set()
    for _, _, attacked, command in attacks:
        for first, _, last in re.findall(r"P(\d+)( to P(\d+))?", attacked):
            promises.update(range(int(first), int(last or first) + 1))
        files = re.findall(r"tests/[\w/]+\.py", command)
        assert files or command.startswith("`python -m "), command
        assert all((TESTS.parent / path).exists() for path in files), command
    assert promises == set(range(1, 12))


def test_every_scenario_and_ablation_that_is_named_exists() -> None:
    scenarios = {path.stem for path in (TESTS / "scenarios" / "corpus").glob("*.scenario")}
    named = listed("scenario")
    assert named and named <= scenarios, named - scenarios
    assert listed("ablation") == ABLATIONS.keys()


def listed(kind: str) -> set[str]:
    """The names after a word in the tables, as in: scenarios `a`, `b`."""
    lists = re.findall(rf"{kind}s? ((?:`[\w' -]+`(?:, )?)+)", "\n".join(TABLE))
    return {name for names in lists for name in re.findall(r"`([\w' -]+)`", names)}
