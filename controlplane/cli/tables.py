"""What commands print on, and the table of the fleet."""

from collections.abc import Iterable
from io import StringIO
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from schemas.formatting import markup
from schemas.reports import AgentLine, FleetStatus

COLUMNS_MAX: Final = 10_000
"""Width of a line in a file or a pipe."""


class Screen(Console):
    """Where a command prints: stdout, a terminal or a file."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def show(self, table: Table) -> None:
        """Print a table; into a file or a pipe as plain columns, one line for each row, with nothing cut or folded."""
        if self.is_terminal:
            self.print(table)
            return
        table.box, table.expand, table.title = None, False, None
        for column in table.columns:
            column.ratio, column.no_wrap = None, True
        with StringIO() as text:
            Console(file=text, width=COLUMNS_MAX, color_system=None).print(table)
            for line in text.getvalue().splitlines():
                self.out(line.rstrip(), highlight=False)

    def on_broken_pipe(self) -> None:
        """Let the entry of the command line end it. Rich would exit with 1."""
        raise BrokenPipeError


def new_table(columns: Iterable[str], right: Iterable[str] = ()) -> Table:
    """Return a table without rows; its columns to the `right` hold numbers."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def fleet_table(fleet: FleetStatus) -> Table:
    """Return a row for each agent; those in trouble are red."""
    columns = ("agent", "host", "state", "silent", "seq", "condition", "engine", "waits for")
    table = new_table(columns, ("silent", "seq"))
    for agent in fleet.agents:
        silent = f"{agent.silent_ms / 1000:.1f} s" if agent.state in ("joining", "live") else "-"  # no longer measured
        table.add_row(
            *(agent.agent, markup(agent.host), markup(agent.state), silent, str(agent.seq), _condition(agent)),
            markup(agent.status.engine) if agent.status is not None else "-",
            markup("; ".join(agent.waits_for)) or "-",
        )
    return table


def _condition(agent: AgentLine) -> str:
    text = markup(f"{agent.condition}{agent.in_flight}")
    return f"[red]{text}[/red]" if agent.in_trouble else text
