"""Tables of a fleet, of reports and of an engine server, for the command line and the demo."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from schemas.formatting import agent_order, describe, format_agents, format_outcome, is_trouble, kind_and_reason
from schemas.identity import Operation
from schemas.outcomes import Acted, Conclusion, Missing
from schemas.reports import AgentLine, FleetStatus, Report

if TYPE_CHECKING:
    from workers.engines.probe import Probed


def command_table(reports: Sequence[Report]) -> Table:
    """Commands in order: who acted, who skipped and why, who failed or is missing, and how long the slowest took."""
    table = Table(
        title="Every command of the run",
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        expand=True,
    )
    for name in ("seq", "command", "acted", "skipped", "failed", "slowest"):
        table.add_column(name, justify="right" if name in ("seq", "slowest") else "left", overflow="fold")
    for position in (0, 1, 3, 5):
        table.columns[position].no_wrap = True
    skipped = table.columns[3]
    skipped.ratio, skipped.overflow = 1, "ellipsis"  # takes the width that the others leave: skips are cut first
    for report in reports:
        answered = [outcome.latency_us for outcome in report.outcomes if not isinstance(outcome.conclusion, Missing)]
        troubles = _by_reason(report, "failed", "missing")
        table.add_row(
            str(report.seq),
            describe(report.command),
            format_agents(report.acted) or "-",
            _by_reason(report, "skipped"),
            troubles if troubles == "-" else f"[red]{troubles}[/red]",
            f"{max(answered) / 1000:.1f} ms" if answered else "-",
        )
    return table


def _by_reason(report: Report, *kinds: str) -> str:
    agents: dict[tuple[str, str], list[str]] = {}
    for outcome in report.outcomes:
        agents.setdefault(kind_and_reason(outcome.conclusion), []).append(outcome.agent)
    texts = [f"{format_agents(names)} {reason}" for (kind, reason), names in sorted(agents.items()) if kind in kinds]
    return "; ".join(texts) or "-"


def report_table(report: Report) -> Table:
    """One command: a line for each agent."""
    table = Table(title=f"{describe(report.command)}, seq {report.seq}", title_justify="left", header_style="bold")
    for name in ("agent", "outcome", "rule", "latency"):
        table.add_column(name, justify="right" if name in ("rule", "latency") else "left", overflow="fold")
    for outcome in sorted(report.outcomes, key=lambda outcome: agent_order(outcome.agent)):
        latency = f"{outcome.latency_us / 1000:.1f} ms"
        table.add_row(outcome.agent, _outcome_cell(outcome.conclusion), str(outcome.rule or "-"), latency)
    return table


def _outcome_cell(outcome: Conclusion) -> str:
    traces = outcome.traces if isinstance(outcome, Acted) else ()
    text = escape("; ".join([format_outcome(outcome), *(trace.path for trace in traces)]))
    return f"[red]{text}[/red]" if is_trouble(outcome) else text


def print_fleet(console: Console, fleet: FleetStatus) -> None:
    """Print the fleet: a line for each agent, then the open commands."""
    console.print(fleet.headline, highlight=False, soft_wrap=True, markup=False)
    table = Table(header_style="bold")
    for name in ("agent", "host", "state", "silent", "seq", "condition", "engine", "waits for"):
        table.add_column(name, justify="right" if name in ("silent", "seq") else "left", overflow="fold")
    for agent in fleet.agents:
        silent = f"{agent.silent_ms / 1000:.1f} s" if agent.state in ("joining", "live") else "-"  # no longer measured
        table.add_row(
            *(agent.agent, escape(agent.host), agent.state, silent, str(agent.seq), _condition_cell(agent)),
            escape(agent.status.engine) if agent.status is not None else "-",
            "; ".join(agent.waits_for) or "-",
        )
    console.print(table)
    for line in fleet.open:
        console.print(f"open: {line}", highlight=False, soft_wrap=True, markup=False)


def _condition_cell(agent: AgentLine) -> str:
    text = escape(agent.condition)
    return f"[red]{text}[/red]" if agent.in_trouble else text


def probe_table(probed: "Probed") -> Table:
    """An engine server's properties, then each operation: supported, or why not."""
    table = Table(show_header=False, box=SIMPLE_HEAD, pad_edge=False)
    properties = {
        "url": probed.url,
        "kind": probed.kind,
        "version": probed.version,
        "tokenizer": probed.tokenizer,
        "node rank": f"{probed.node_rank} of {probed.nnodes}" if probed.node_rank is not None else None,
        "GPUs": probed.world,
        "model": probed.model,
        "weights": probed.weights,
        "instance": probed.instance,
    }
    for name, value in properties.items():
        if value is not None:
            table.add_row(name, escape(str(value)))
    if probed.has or probed.lacks:
        table.add_section()
    for operation in Operation:
        if operation in probed.has:
            table.add_row(operation, "[green]yes[/green]")
        elif operation in probed.lacks:
            table.add_row(operation, f"[yellow]no: {escape(probed.lacks[operation])}[/yellow]")
    if probed.note:
        table.add_section()
        table.add_row("", escape(probed.note))
    return table
