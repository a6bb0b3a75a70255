"""The pages on profiling name tests that exist, and show what their commands print."""

import re
from pathlib import Path

from click.testing import CliRunner

from controlplane.cli.explain import explain

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "profiling.md").read_text("utf-8")


def test_every_row_names_tests_and_every_named_test_exists() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 22))
    tests = (ROOT / "tests").rglob("test_*.py")
    defined = {name for path in tests for name in re.findall(r"def (test_\w+)", path.read_text())}
    for number, row in rows:
        named = set(re.findall(r"`(test_\w+)`", row))
        assert named and named <= defined, (number, named - defined)


def test_every_link_between_pages_leads_to_a_file() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_example_is_explained_as_the_page_shows(tmp_path: Path) -> None:
    (configuration,) = re.findall(r"```yaml\n(global_profiler.*?)```", PAGE, re.DOTALL)
    (tmp_path / "trainer.yaml").write_text(configuration)
    (shown,) = re.findall(r"```yaml\n(steps: .*?)```", PAGE, re.DOTALL)
    result = CliRunner().invoke(explain, [str(tmp_path / "trainer.yaml"), "--verl", "--gpus-per-replica", "2"])
    assert result.output == shown
