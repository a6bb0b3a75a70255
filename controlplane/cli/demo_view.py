"""What the demo shows: progress while it runs, then one table of all commands and the places of what it left behind."""

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from schemas.outcomes import Acted, Conclusion, Failed, Missing, Skipped
from schemas.reports import Report, SyncReport


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


def sync_words(report: SyncReport) -> str:
    """How a sync ended, in one line."""
    out = f"; out of service: {', '.join(map(str, report.quarantined))}" if report.quarantined else ""
    loaded = ", ".join(map(str, report.loaded)) or "none"
    return f"the sync to version {report.version} {report.status} on replica {loaded}{out}"


def summary(reports: Sequence[Report]) -> str:
    """How many outcomes of each kind the run had."""
    kinds: Counter[type[Conclusion]] = Counter(type(one.conclusion) for report in reports for one in report.outcomes)
    words: dict[type[Conclusion], str] = {Acted: "acted", Skipped: "skipped", Failed: "failed", Missing: "missing"}
    return ", ".join(f"{kinds[kind]} {word}" for kind, word in words.items())


def places(console: Console, out: Path, traces: Sequence[Path]) -> None:
    """Where everything is, and what to do with it."""
    console.print("\n[bold]Left behind[/bold]")
    for trace in traces:
        console.print(f"  trace  {trace}", soft_wrap=True, highlight=False)
    console.print(f"  log    {out / 'run.db'}", soft_wrap=True, highlight=False)
    # Whoever came by `make demo` has the program in a virtual environment, and not on the PATH.
    program = "rolloutctl" if shutil.which("rolloutctl") else Path(sys.executable).with_name("rolloutctl")
    run = out / "run.db"
    console.print("\n[bold]Look into it[/bold]")
    for words, told in (
        (f"log show {run}", "every decision, in words"),
        (f"report {run}", "one page for a browser"),
        (f"timeline {run} --traces {out / 'traces'}", "one file for https://ui.perfetto.dev"),
    ):
        console.print(f"  {program} {words}   [dim]# {told}[/dim]", soft_wrap=True, highlight=False)
