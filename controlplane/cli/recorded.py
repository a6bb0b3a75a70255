"""A recorded run, parsed, for assertions of one's own: what the fixture `run_log` gives."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from controlplane.machine.events import Conclude, Publish
from controlplane.record.entries import LogEntry
from controlplane.record.log import RunHeader, RunLog
from schemas.commands import Command, UnknownCommand
from schemas.errors import ConfigError, LogCorrupt, LogError
from schemas.events import Answer, Effect, Event
from schemas.outcomes import Outcome
from schemas.reports import Report, SyncReport
from schemas.wire import decode_command


class RecordedRun:
    """One log. Read as a whole when it is first asked for. Raises LogCorrupt where it is damaged.

    path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<RecordedRun {self.path.name}>"

    @cached_property
    def header(self) -> RunHeader:
        """Run, when it began, versions."""
        return RunLog.header(self.path)

    @cached_property
    def entries(self) -> tuple[LogEntry, ...]:
        """Every record, in order."""
        return tuple(RunLog.read(self.path))

    @cached_property
    def commands(self) -> dict[int, Command | UnknownCommand]:
        """Every published command, by seq."""
        published = (one for one in self._effects() if isinstance(one, Publish))
        return {one.seq: decode_command(one.envelope.body) for one in published}

    @cached_property
    def reports(self) -> dict[int, Report]:
        """The report of every command that was concluded, by seq."""
        concluded = (one.report for one in self._effects() if isinstance(one, Conclude))
        return {one.seq: one for one in concluded if isinstance(one, Report)}

    @cached_property
    def syncs(self) -> tuple[SyncReport, ...]:
        """The report of every weight sync, in order."""
        concluded = (one.report for one in self._effects() if isinstance(one, Conclude))
        return tuple(one for one in concluded if isinstance(one, SyncReport))

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents whose decisions the log has."""
        return tuple(sorted({one.agent for one in self.entries if one.agent}))

    def decisions(self, agent: str) -> list[tuple[Event, tuple[Effect, ...]]]:
        """What one agent saw and decided, in order."""
        mine = (one for one in self.entries if one.agent == agent)
        return [(one.typed_event(), one.typed_effects()) for one in mine]  # type: ignore[misc]

    def answers(self, agent: str) -> dict[int, Outcome]:
        """What one agent answered to each command, by seq: the first answer, which is the one that counts."""
        found: dict[int, Outcome] = {}
        for _, effects in self.decisions(agent):
            for effect in effects:
                if isinstance(effect, Answer):
                    found.setdefault(effect.seq, effect.outcome)
        return found

    def _effects(self) -> Iterator[object]:
        for entry in self.entries:
            if not entry.agent:
                yield from entry.typed_effects()


def find_logs(place: Path) -> list[Path]:
    """The run logs at a place: the file, or those below the folder. Other files are left out, damaged ones not.

    Raises ConfigError when there is none.
    """
    if not place.exists():
        raise ConfigError(f"--replay-log {place}: there is no such file or folder")
    found = [place] if place.is_file() else [path for path in sorted(place.rglob("*.db")) if _is_run_log(path)]
    if not found:
        raise ConfigError(f"--replay-log {place}: no recorded run (*.db) lies there")
    return found


def _is_run_log(path: Path) -> bool:
    try:
        RunLog.header(path)
    except LogCorrupt:
        return True  # let its test say so
    except LogError:
        return False
    return True
