"""What commands print: tables in a terminal of any width, and in a pipe."""

import re
from io import StringIO

import pytest
from rich.console import Console

from controlplane.cli.tables import Screen, fleet_table
from tests.screens import FLEET


def printed(width: int) -> str:
    text = StringIO()
    Console(file=text, width=width).print(fleet_table(FLEET))
    return text.getvalue()


def test_a_narrow_terminal_folds_and_cuts_nothing() -> None:
    shown = printed(80)
    assert "…" not in shown and all(line.agent in shown for line in FLEET.agents)


def test_a_wide_terminal_has_what_an_agent_waits_for_beside_it() -> None:
    (row,) = [line for line in printed(200).splitlines() if line.startswith(" 0.0 ")]
    assert "flush (seq 61)" in row


def test_a_pipe_gets_plain_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    Screen().show(fleet_table(FLEET))
    head, *rows = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", head.strip()) == [
        *("agent", "host", "state", "silent", "seq", "condition", "engine", "waits for")
    ]
    assert len(rows) == len(FLEET.agents)
    assert all(row.index("live") == head.index("state") for row in rows if "live" in row), "they are aligned"
