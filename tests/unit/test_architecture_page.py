"""docs/architecture.md: one command goes the way that the page shows, in at most 25 steps."""

import re

from tests.command_trace import run_traced
from tests.running import ROOT

STEPS = re.findall(
    r"^\| \d+ \| .* \| `([\w/]+\.py)` \| `([\w.]+)` \|$", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.M
)
MAX_STEPS = 25


def test_a_command_goes_the_way_that_the_page_shows() -> None:
    assert 20 <= len(STEPS) <= MAX_STEPS
    reports = []
    calls = iter([call[:2] for call in run_traced(lambda plane: reports.append(plane.flush(replicas=0).wait()))])
    for number, step in enumerate(STEPS, 1):
        assert step in calls, f"step {number}, {step[1]} in {step[0]}, is not called, or not after the steps before it"
    assert reports[0].acted == ("0.0",)
