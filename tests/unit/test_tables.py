"""What `rolloutctl status` prints of a fleet."""

from io import StringIO

import pytest
from rich.console import Console

from controlplane.cli.tables import fleet_table
from schemas.wire import AgentLine, FleetStatus


@pytest.mark.parametrize(("life", "told"), [("joining", "0.3 s"), ("live", "0.3 s"), ("gone", "-"), ("left", "-")])
def test_how_long_an_agent_is_silent_is_told_while_somebody_counts(life: str, told: str) -> None:
    line = AgentLine(agent="1.0", incarnation="a", host="vm", life=life, silent_ms=300, seq=7, status=None)
    fleet = FleetStatus(run="r", epoch=1, seq=7, version=0, log="run.db", agents=(line,))
    printed = StringIO()
    fleet_table(Console(file=printed, width=200), fleet)
    row = next(one for one in printed.getvalue().splitlines() if "1.0" in one)
    assert row.split("│")[4].strip() == told
