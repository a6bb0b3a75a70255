"""The tables of `rolloutctl status` and of the demo."""

from io import StringIO

import pytest
from rich.console import Console

from controlplane.cli.tables import command_table, print_fleet
from schemas.commands import ProfileCommand
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing, Reason, Skipped
from schemas.reports import AgentLine, AgentOutcome, FleetStatus, Report


@pytest.mark.parametrize(("state", "shown"), [("joining", "0.3 s"), ("live", "0.3 s"), ("gone", "-"), ("left", "-")])
def test_silence_is_shown_only_of_agents_in_the_fleet(state: str, shown: str) -> None:
    line = AgentLine(agent="1.0", incarnation="a", host="vm", state=state, silent_ms=300, seq=7, status=None)
    fleet = FleetStatus(run="r", epoch=1, seq=7, version=0, log="run.db", agents=(line,))
    printed = StringIO()
    print_fleet(Console(file=printed, width=200), fleet)
    row = next(line for line in printed.getvalue().splitlines() if "1.0" in line)
    assert row.split("│")[4].strip() == shown


def test_a_narrow_screen_cuts_skips_and_keeps_failures() -> None:
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
    assert [text for text in ("12", "0.0", "1.0 engine_error;", "1.2 ms") if text not in row] == []
    assert "1.1 gone" in printed.getvalue()
