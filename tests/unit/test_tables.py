"""What commands print: tables in a terminal of any width, and in a pipe."""

import re
from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from controlplane.cli.tables import Screen, command_table, skip_table
from schemas.commands import ProfileCommand
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing, Reason, Skipped
from schemas.reports import AgentOutcome, Report


def report() -> Report:
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
    return Report(seq=12, origin=12, command=ProfileCommand(action="stop", step=3), outcomes=outcomes)


def printed(table: Table, width: int) -> str:
    text = StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue()


def test_a_narrow_terminal_has_every_command_in_one_line_and_the_skips_below() -> None:
    commands = printed(command_table([report()], with_skips=False), 80)
    (row,) = [line for line in commands.splitlines() if "profile stop step 3" in line]
    assert row.split("  ") and all(text in row for text in ("12", "0.0", "1.0 engine_error; 1.1 gone", "1.2 ms"))
    skips = printed(skip_table([report(), report()]), 80)
    (row,) = [line for line in skips.splitlines() if "not_primary" in line]
    assert row.split() == ["not_primary", "0.1", "2"]
    assert "…" not in commands + skips


def test_a_wide_terminal_has_the_skips_beside_each_command() -> None:
    (row,) = [line for line in printed(command_table([report()]), 160).splitlines() if "profile stop" in line]
    assert "0.1 not_primary" in row


def test_a_pipe_gets_plain_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    Screen().show(command_table([report()]))
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["seq", "command", "acted", "skipped", "failed", "slowest"]
    columns = re.split(r"\s{2,}", row.strip())
    assert columns == ["12", "profile stop step 3", "0.0", "0.1 not_primary", "1.0 engine_error; 1.1 gone", "1.2 ms"]
    assert row.index("0.0") == head.index("acted"), "they are aligned"
