"""What a person sees of a fleet and of a report, as tables. For the command line and the demo."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from schemas.formatting import describe
from schemas.identity import ROLLOUT, Operation, identity_of, replica_and_node
from schemas.outcomes import Acted, Failed, Missing, Skipped
from schemas.reports import AgentLine, AgentOutcome, FleetStatus, Report

if TYPE_CHECKING:
    from workers.engines.probe import Probed


def command_table(reports: Sequence[Report]) -> Table:
    """Each command in its order: who acted, who skipped and why, who failed or is missing, and how long it took."""
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
    skipped.ratio, skipped.overflow = 1, "ellipsis"  # it has what the others leave: on a narrow screen, skips are cut
    for report in reports:
        table.add_row(
            str(report.seq),
            describe(report.command),
            " ".join(sorted(report.acted)) or "-",
            _skips(report.outcomes),
            _troubles(report.outcomes),
            _slowest(report.outcomes),
        )
    return table


def _skips(outcomes: Sequence[AgentOutcome]) -> str:
    by_reason: dict[str, list[str]] = {}
    for one in outcomes:
        if isinstance(one.conclusion, Skipped):
            by_reason.setdefault(one.conclusion.reason, []).append(one.agent)
    return "; ".join(f"{' '.join(sorted(agents))} {reason}" for reason, agents in sorted(by_reason.items())) or "-"


def _troubles(outcomes: Sequence[AgentOutcome]) -> str:
    lines = []
    for one in outcomes:
        if isinstance(one.conclusion, Failed):
            lines.append(f"[red]{one.agent} {one.conclusion.error}[/red]")
        elif isinstance(one.conclusion, Missing):
            lines.append(f"[red]{one.agent} {one.conclusion.reason}[/red]")
    return "; ".join(lines) or "-"


def _slowest(outcomes: Sequence[AgentOutcome]) -> str:
    answered = [one.latency_us for one in outcomes if not isinstance(one.conclusion, Missing)]
    return f"{max(answered) / 1000:.1f} ms" if answered else "-"


def report_table(report: Report) -> Table:
    """One command: a line for each agent."""
    table = Table(title=f"{describe(report.command)}, seq {report.seq}", title_justify="left", header_style="bold")
    for name in ("agent", "outcome", "row", "latency"):
        table.add_column(name, justify="right" if name in ("row", "latency") else "left", overflow="fold")
    for one in sorted(report.outcomes, key=lambda one: _place(one.agent)):
        table.add_row(one.agent, _words(one), str(one.rule or "-"), f"{one.latency_us / 1000:.1f} ms")
    return table


def fleet_table(console: Console, fleet: FleetStatus) -> None:
    """The fleet: a line for each agent, then what is open."""
    console.print(
        f"run {fleet.run}, epoch {fleet.epoch}, seq {fleet.seq}, weights version {fleet.version}, log {fleet.log}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(header_style="bold")
    for name in ("agent", "host", "life", "silent", "seq", "weights", "state", "engine", "waits for"):
        table.add_column(name, justify="right" if name in ("silent", "seq", "weights") else "left", overflow="fold")
    for one in fleet.agents:
        holds = one.status is not None and one.status.tokenizer == "present" and replica_and_node(one.agent) is not None
        version = f"v{one.status.version}" if one.status is not None and holds else "-"
        silent = f"{one.silent_ms / 1000:.1f} s" if one.state in ("joining", "live") else "-"  # nobody counts any more
        table.add_row(
            *(one.agent, one.host, one.state, silent, str(one.seq), version, _state(one)),
            escape(one.status.engine) if one.status is not None else "-",
            "; ".join(one.waits_for) or "-",
        )
    console.print(table)
    for line in fleet.open:
        console.print(f"open: {line}", highlight=False, soft_wrap=True)


def _place(agent: str) -> tuple[bool, str, int, int]:
    """Replicas first, then training ranks by role."""
    place = identity_of(agent)
    return place.role != ROLLOUT, place.role, place.replica, place.node_rank


def _state(line: AgentLine) -> str:
    status = line.status
    if line.state not in ("live", "joining"):
        return f"[red]{line.state}[/red]" if line.state == "gone" else line.state
    if status is None:
        return "no heartbeat yet"
    if replica_and_node(line.agent) is None:
        return f"profiling step {status.profiling_step}" if status.profiling_step is not None else "trains"
    if status.tokenizer == "absent":
        return "no tokenizer: follows" if status.ready else "[yellow]not ready[/yellow]"
    words = ["generating" if status.generating else "paused"]
    words += [f"asleep {' '.join(status.asleep)}"] if status.asleep else []
    words += [f"profiling step {status.profiling_step}"] if status.profiling_step is not None else []
    words += ["[red]quarantined[/red]"] if status.quarantined else []
    words += ["[red]torn weights[/red]"] if status.torn else []
    words += [f"busy: {escape(status.activity)}"] if status.activity else []
    words += [] if status.ready else ["[yellow]not ready[/yellow]"]
    return ", ".join(words)


def _words(one: AgentOutcome) -> str:
    match one.conclusion:
        case Acted() as acted:
            more = [f"version {acted.version}"] if acted.version is not None else []
            more += ["the engine had stopped by itself"] if acted.auto_stopped else []
            more += [f"trace {escape(trace.path)}" for trace in acted.traces]
            return f"acted: {', '.join(acted.calls) or 'noted'}" + "".join(f"; {word}" for word in more)
        case Skipped(reason=reason):
            return f"skipped: {reason}"
        case Failed(error=error, message=message):
            return f"[red]failed: {error}[/red] {escape(message)}"
        case Missing(reason=why):
            return f"[red]missing: {why}[/red]"


def probe_table(found: "Probed") -> Table:
    """What an engine server is, then each operation with what speaks against it."""
    table = Table(show_header=False, box=SIMPLE_HEAD, pad_edge=False)
    facts = {
        "url": found.url,
        "kind": found.kind,
        "version": found.version,
        "tokenizer": found.tokenizer,
        "node rank": f"{found.node_rank} of {found.nnodes}" if found.node_rank is not None else None,
        "GPUs": found.world,
        "model": found.model,
        "weights": found.weights,
        "instance": found.instance,
    }
    for name, value in facts.items():
        if value is not None:
            table.add_row(name, escape(str(value)))
    if found.has or found.lacks:
        table.add_section()
    for operation in Operation:
        if operation in found.has:
            table.add_row(operation, "[green]yes[/green]")
        elif operation in found.lacks:
            table.add_row(operation, f"[yellow]no: {escape(found.lacks[operation])}[/yellow]")
    if found.note:
        table.add_section()
        table.add_row("", escape(found.note))
    return table
