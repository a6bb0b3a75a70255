"""What `rolloutctl status` prints of a fleet, and the demo of its commands."""

from io import StringIO

import pytest
from rich.console import Console

from controlplane.cli.tables import command_table, fleet_table
from schemas.commands import ProfileCommand
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing, Reason, Skipped
from schemas.reports import AgentLine, AgentOutcome, FleetStatus, Report


@pytest.mark.parametrize(("life", "told"), [("joining", "0.3 s"), ("live", "0.3 s"), ("gone", "-"), ("left", "-")])
def test_how_long_an_agent_is_silent_is_told_while_somebody_counts(life: str, told: str) -> None:
    line = AgentLine(agent="1.0", incarnation="a", host="vm", state=life, silent_ms=300, seq=7, status=None)
    fleet = FleetStatus(run="r", epoch=1, seq=7, version=0, log="run.db", agents=(line,))
    printed = StringIO()
    fleet_table(Console(file=printed, width=200), fleet)
    row = next(one for one in printed.getvalue().splitlines() if "1.0" in one)
    assert row.split("│")[4].strip() == told


def test_a_narrow_screen_cuts_the_skips_and_keeps_what_failed() -> None:
    conclusions: dict[str, Conclusion] = {
        "0.0": Acted(calls=("stop_profile",)),
        "0.1": Skipped(reason=Reason.NOT_PRIMARY),
        "1.0": Failed(error=ErrorKind.ENGINE_ERROR, message="no"),
        "1.1": Missing(reason="gone"),
    }
    outcomes = tuple(
        AgentOutcome(agent=agent, conclusion=conclusion, rule=1, latency_us=1234)
        for agent, conclusion in conclusions.items()
    )
    report = Report(seq=12, origin=12, command=ProfileCommand(action="stop", step=3), outcomes=outcomes)
    printed = StringIO()
    Console(file=printed, width=80).print(command_table([report]))
    row = next(line for line in printed.getvalue().splitlines() if "profile stop step 3" in line)
    assert [told for told in ("12", "0.0", "1.0 engine_error;", "1.2 ms") if told not in row] == []
    assert "1.1 gone" in printed.getvalue()
