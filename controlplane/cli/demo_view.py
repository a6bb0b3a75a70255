"""What the demo shows: progress while it runs, then one table of all commands and the places of what it left behind."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from controlplane.coordinator import describe
from schemas.outcomes import Acted, Failed, Missing, Skipped
from schemas.wire import AgentOutcome, Report


def progress(console: Console) -> Progress:
    """A bar over the training steps, with the reward beside it."""
    return Progress(
        TextColumn("[bold]training[/bold]"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("reward {task.fields[reward]:.2f}"),
        TextColumn("weights v{task.fields[version]}"),
        TextColumn("[yellow]{task.fields[note]}[/yellow]"),
        TimeElapsedColumn(),
        console=console,
    )


def command_table(reports: Sequence[Report]) -> Table:
    """Each command in its order: who acted, who skipped and why, who failed or is missing, and how long it took."""
    table = Table(title="Every command of the run", title_justify="left", header_style="bold")
    for name in ("seq", "command", "acted", "skipped", "failed or missing", "slowest"):
        table.add_column(name, justify="right" if name in ("seq", "slowest") else "left", overflow="fold")
    for report in reports:
        table.add_row(
            str(report.seq),
            describe(report.command),
            " ".join(report.acted) or "-",
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
    return "; ".join(f"{' '.join(agents)} {reason}" for reason, agents in sorted(by_reason.items())) or "-"


def _troubles(outcomes: Sequence[AgentOutcome]) -> str:
    lines = []
    for one in outcomes:
        if isinstance(one.conclusion, Failed):
            lines.append(f"[red]{one.agent} failed {one.conclusion.error}[/red]")
        elif isinstance(one.conclusion, Missing):
            lines.append(f"[red]{one.agent} missing ({one.conclusion.why})[/red]")
    return "; ".join(lines) or "-"


def _slowest(outcomes: Sequence[AgentOutcome]) -> str:
    answered = [one.latency_us for one in outcomes if not isinstance(one.conclusion, Missing)]
    return f"{max(answered) / 1000:.1f} ms" if answered else "-"


def summary(reports: Sequence[Report]) -> str:
    """How many outcomes of each kind the run had."""
    kinds = Counter(type(one.conclusion) for report in reports for one in report.outcomes)
    words = {Acted: "acted", Skipped: "skipped", Failed: "failed", Missing: "missing"}
    return ", ".join(f"{kinds[kind]} {word}" for kind, word in words.items())


def places(console: Console, out: Path, traces: Sequence[Path]) -> None:
    """Where everything is, and what to do with it."""
    console.print("\n[bold]Left behind[/bold]")
    for trace in traces:
        console.print(f"  trace  {trace}", soft_wrap=True, highlight=False)
    console.print(f"  log    {out / 'run.db'}", soft_wrap=True, highlight=False)
    console.print(f"\nLook into it:  rolloutctl log show {out / 'run.db'}", soft_wrap=True, highlight=False)
    console.print("Open a trace in https://ui.perfetto.dev or chrome://tracing.", highlight=False)
