"""`rolloutctl log`: show, verify and replay a recorded run."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import click
from msgspec.structs import asdict

from controlplane.analysis.invariants import verify
from controlplane.analysis.log_lines import format_decision, json_line
from controlplane.cli.command_line import Group, file_argument, json_option, note_problem
from controlplane.cli.replay_log import replay_file
from controlplane.record.entries import LogEntry, LogItem, LogMark
from controlplane.record.follow import follow
from controlplane.record.log import RunLog
from schemas.errors import LogCorrupt, ReplayDiffers
from schemas.formatting import format_list, json_text, one_line, printable
from schemas.identity import NUMBER_MAX
from schemas.logs import time_with_zone
from schemas.profiler.conversion import did_you_mean

FOLLOW_S: Final = 0.2
"""Between two looks at a log that is followed."""


@click.group(cls=Group, short_help="Show, verify, replay and keep recorded runs.")
def log() -> None:
    """Read a recorded run, even while it is being written."""


@log.command(short_help="Print every decision.")
@file_argument
@json_option
@click.option("--agent", help="Only this agent's decisions, e.g. 0.1; `bus` for the coordinator's.")
@click.option("--kind", help="Only events of this kind, e.g. command or returned.")
@click.option("--from", "start", type=click.IntRange(1, NUMBER_MAX), default=1, help="Position of the first record.")
@click.option("-f", "--follow", "following", is_flag=True, help="Go on as it is written; a log until its bus closes.")
def show(file: Path, as_json: bool, agent: str | None, kind: str | None, start: int, following: bool) -> None:
    """Print what each agent and the coordinator saw and decided, in the order of the log."""
    shown, agents, kinds = 0, set[str](), set[str]()
    wait = partial(threading.Event().wait, FOLLOW_S)
    for entry in follow(file, start, wait) if following else RunLog.read(file, start):
        whose = entry.agent or "bus"
        agents.add(whose)
        kinds.add(entry.kind)
        if agent in (None, whose) and kind in (None, entry.kind):
            shown += 1
            if as_json:
                click.echo(json_line(entry))
            else:
                moment = time_with_zone(entry.at_ns / 1e9)
                click.echo(one_line(f"{entry.position:>7}  {moment}  {whose:<6} {format_decision(entry)}"))
    if not shown and not following:
        why = _why_nothing(file, start, agent, agents, kind, kinds)
        click.echo(one_line(f"rolloutctl: nothing to show: {why}"), err=True)
        click.get_current_context().exit(1)


def _why_nothing(file: Path, start: int, agent: str | None, agents: set[str], kind: str | None, kinds: set[str]) -> str:
    where = f"{file} from record {start} on" if start > 1 else str(file)
    if agent is not None and agents and agent not in agents:
        near = did_you_mean(agent, agents) or f"; there are {format_list(sorted(agents))}"
        return f"{where} has no decision of agent {agent}{near}"
    if kind is not None and kinds and kind not in kinds:
        near = did_you_mean(kind, kinds) or f"; there are {format_list(sorted(kinds), len(kinds))}"
        return f"{where} has no event of kind {kind}{near}"
    return f"{where} has no such record"


@log.command("verify", short_help="Check the file, and the invariants of every run.")
@file_argument
@json_option
def verify_command(file: Path, as_json: bool) -> None:
    """Check every record, and the invariants that hold in every run. The exit code is 1 if something is wrong."""
    run, records, damages = RunLog.header(file).run, 0, list[str]()

    def readable() -> Iterator[LogItem]:
        nonlocal records
        try:
            for item in RunLog.walk(file):
                records += isinstance(item, LogEntry)
                if isinstance(item, LogMark) and item.damage:
                    damages.append(item.damage)
                yield item
        except LogCorrupt as error:
            damages.append(str(error))

    found = list(verify(readable()))
    damage = "; ".join(damages) or None
    if found or damage is not None:
        note_problem()
    if as_json:
        click.echo(json_text({"run": run, "records": records, "damage": damage, "violations": found}))
    else:
        for violation in found:
            click.echo(one_line(str(violation)))
        if damage is not None:
            click.echo(one_line(f"damaged: {damage}"))
        violations = f"{len(found)} violations" if found else "no violations"
        click.echo(one_line(f"run {run}: {records} decisions read, {violations}"))


@log.command("replay", short_help="Make every decision again, and compare.")
@file_argument
@json_option
def replay_command(file: Path, as_json: bool) -> None:
    """Make every decision of the log again. At the first that differs, print a diff; the exit code is then 1."""
    try:
        replayed = replay_file(file)
    except ReplayDiffers as difference:
        text = str(difference)
        click.echo(json_text({"same": False, "difference": text}) if as_json else printable(text))
        click.get_current_context().exit(1)
    click.echo(json_text({"same": True, **asdict(replayed)}) if as_json else str(replayed))
