"""The demo's table of commands."""

from io import StringIO

from rich.console import Console

from controlplane.cli.tables import command_table
from schemas.commands import ProfileCommand
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing, Reason, Skipped
from schemas.reports import AgentOutcome, Report


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
