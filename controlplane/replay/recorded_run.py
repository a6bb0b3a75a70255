"""A recorded run, decoded, for assertions in tests: the value of the fixture `run_log`."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from controlplane.machine.coordinator import CoordinatorState, decide
from controlplane.machine.events import Conclude, Publish
from controlplane.machine.fleet_view import FleetView
from controlplane.record.entries import LogEntry, LogMark
from controlplane.record.log import RunHeader, RunLog
from controlplane.record.marks import decode_state
from schemas.commands import Command, UnknownCommand
from schemas.errors import ConfigError, LogCorrupt, LogError
from schemas.events import Answer, Effect, Event
from schemas.outcomes import Outcome
from schemas.reports import Report, SyncReport
from schemas.wire import decode_command


class RecordedRun:
    """One log, read as a whole on first use. Raises LogCorrupt where it is damaged.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def header(self) -> RunHeader:
        """The run's id, when it began, and versions."""
        return RunLog.header(self.path)

    @cached_property
    def entries(self) -> tuple[LogEntry, ...]:
        """Every record, in order."""
        return tuple(RunLog.read(self.path))

    @cached_property
    def commands(self) -> dict[int, Command | UnknownCommand]:
        """Every published command, by seq."""
        published = (effect for effect in self._effects() if isinstance(effect, Publish))
        return {effect.seq: decode_command(effect.envelope.body) for effect in published}

    @cached_property
    def reports(self) -> dict[int, Report]:
        """The report of every concluded command, by seq."""
        return {report.seq: report for report in self._concluded() if isinstance(report, Report)}

    @cached_property
    def syncs(self) -> tuple[SyncReport, ...]:
        """The report of every weight sync, in order."""
        return tuple(report for report in self._concluded() if isinstance(report, SyncReport))

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents whose decisions are in the log."""
        return tuple(sorted({entry.agent for entry in self.entries if entry.agent}))

    def decisions(self, agent: str) -> list[tuple[Event, tuple[Effect, ...]]]:
        """What one agent saw and decided, in order."""
        entries = (entry for entry in self.entries if entry.agent == agent)
        return [(entry.typed_event(), entry.typed_effects()) for entry in entries]  # type: ignore[misc]

    def answers(self, agent: str) -> dict[int, Outcome]:
        """One agent's answer to each command, by seq. Only the first answer to a command counts."""
        found: dict[int, Outcome] = {}
        for _, effects in self.decisions(agent):
            for effect in effects:
                if isinstance(effect, Answer):
                    found.setdefault(effect.seq, effect.outcome)
        return found

    def fleet_at(self, position: int | None = None) -> FleetView:
        """Return what the bus knew of the fleet, for instance to ask for the provenance of an answer of that moment.

        Args:
            position: Of the last record that it had written; None for the end of the log.
        """
        state: CoordinatorState | None = None
        for entry in RunLog.walk(self.path):
            if isinstance(entry, LogMark) and state is None:  # the log begins with it
                state = decode_state(entry)
            elif isinstance(entry, LogEntry) and not entry.agent and (position is None or entry.position <= position):
                state, _ = decide(state or CoordinatorState(), entry.typed_event())  # type: ignore[arg-type]
        return FleetView(state or CoordinatorState())

    def _effects(self) -> Iterator[object]:
        for entry in self.entries:
            if not entry.agent:
                yield from entry.typed_effects()

    def _concluded(self) -> Iterator[object]:
        return (effect.report for effect in self._effects() if isinstance(effect, Conclude))


def find_logs(place: Path) -> list[Path]:
    """Return the run logs at a place: the file, or all below the folder, including damaged ones.

    Raises ConfigError if there is none.
    """
    if not place.exists():
        raise ConfigError(f"--replay-log {place}: there is no such file or folder")
    found = [place] if place.is_file() else [path for path in sorted(place.rglob("*.db")) if _is_run_log(path)]
    if not found:
        raise ConfigError(f"--replay-log {place}: there is no recorded run (*.db)")
    return found


def _is_run_log(path: Path) -> bool:
    try:
        RunLog.header(path)
    except LogCorrupt:
        return True  # its test will fail and say so
    except LogError:
        return False
    return True
