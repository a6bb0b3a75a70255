"""`rolloutctl log`: show, verify and replay a recorded run. What keeps one small is in `controlplane.cli.retention`."""

import datetime
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from msgspec.structs import asdict

from controlplane.cli.reducers import replay_file
from controlplane.cli.retention import archive, export, prune
from controlplane.machine.coordinator import LOGIC
from controlplane.record.entries import LogEntry, LogItem, LogMark
from controlplane.record.invariants import verify
from controlplane.record.log import RunLog
from controlplane.record.log_lines import format_decision, json_line
from controlplane.record.marks import MarkChecker
from schemas.errors import LogCorrupt, ReplayDiffers
from schemas.formatting import one_line, printable
from schemas.identity import NUMBER_MAX

_file = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(short_help="Show, verify, replay and keep recorded runs.")
def log() -> None:
    """Read a recorded run, even while it is being written, or an archive of one."""


@log.command(short_help="Print every decision.")
@_file
@_json
@click.option("--agent", help="Only this agent's decisions, e.g. 0.1; `bus` for the coordinator's.")
@click.option("--kind", help="Only events of this kind, e.g. command or returned.")
@click.option("--from", "start", type=click.IntRange(1, NUMBER_MAX), default=1, help="Position of the first record.")
def show(file: Path, as_json: bool, agent: str | None, kind: str | None, start: int) -> None:
    """Print what each agent and the coordinator saw and decided, in the order of the log."""
    for entry in RunLog.read(file, start):
        if agent not in (None, entry.agent or "bus") or kind not in (None, entry.kind):
            continue
        click.echo(json_line(entry) if as_json else one_line(_line(entry)))


@log.command("verify", short_help="Check the file, and the invariants of every run.")
@_file
@_json
def verify_command(file: Path, as_json: bool) -> None:
    """Check every record, and the invariants that hold in every run. The exit code is 1 if something is wrong."""
    header = RunLog.header(file)
    reading = _Reading(file, header.logic)
    found = list(verify(reading.entries()))
    damage = "; ".join(reading.damage) or None
    if as_json:
        result = {"run": header.run, "records": reading.records, "damage": damage, "violations": found}
        click.echo(msgspec.json.encode(result))
    else:
        for violation in found:
            click.echo(one_line(str(violation)))
        if damage is not None:
            click.echo(one_line(f"damaged: {damage}"))
        violations = f"{len(found)} violations" if found else "no violations"
        marks = f", {reading.marks.compared} marks compared" if reading.marks.compared else ""
        click.echo(one_line(f"run {header.run}: {reading.records} records read{marks}, {violations}"))
    if found or damage is not None:
        click.get_current_context().exit(1)


class _Reading:
    """One pass over a log: its records for the invariants, and its marks compared with them.

    Attributes:
        records: How many were read.
        damage: What is wrong with the file and with its marks.
    """

    def __init__(self, file: Path, logic: int) -> None:
        self.records, self.damage = 0, list[str]()
        self.marks = MarkChecker()
        self._file = file
        self._comparable = logic == LOGIC

    def entries(self) -> Iterator[LogItem]:
        """Yield the records and marks up to the first record that is damaged."""
        try:
            for entry in RunLog.walk(self._file):
                if isinstance(entry, LogMark):
                    self._check(entry)
                elif isinstance(entry, LogEntry):
                    self.records += 1
                    if self._comparable:
                        self.marks.feed(entry)
                yield entry
        except LogCorrupt as error:
            self.damage.append(str(error))

    def _check(self, mark: LogMark) -> None:
        problem: str | None = mark.damage
        if not problem and self._comparable and self.records == 0:
            self._comparable = self.marks.begin(mark)
        elif not problem and self._comparable:
            problem = self.marks.difference(mark)
        if problem:
            self.damage.append(problem)
            self._comparable = self._comparable and self.records > 0


@log.command("replay", short_help="Make every decision again, and compare.")
@_file
@_json
def replay_command(file: Path, as_json: bool) -> None:
    """Make every decision of the log again. At the first that differs, print a diff; the exit code is then 1."""
    try:
        replayed = replay_file(file)
    except ReplayDiffers as difference:
        result = msgspec.json.encode({"same": False, "difference": str(difference)})
        click.echo(result if as_json else printable(str(difference)))
        click.get_current_context().exit(1)
    click.echo(msgspec.json.encode({"same": True, **asdict(replayed)}) if as_json else str(replayed))


def _line(entry: LogEntry) -> str:
    moment = datetime.datetime.fromtimestamp(entry.at_ns / 1e9).strftime("%H:%M:%S.%f")[:-3]
    return f"{entry.position:>7}  {moment}  {entry.agent or 'bus':<6} {format_decision(entry)}"


for command in (prune, archive, export):
    log.add_command(command)
