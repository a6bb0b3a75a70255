"""Writes a run's log and the traces that it names as one file for Perfetto, on the bus's clock.

Theory of operation. The log is read twice: once for its clocks, agents and traces (`survey`), once for what happened
(`fleet_tracks`). Then each trace is checked and streamed (`torch_traces`). Events are written as they come; the viewer
sorts them. Whatever can't be drawn is left out, and a warning says why.

The file appears under its name in one step when it is complete. It never replaces another file unless asked to.
"""

import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import IO, Final

from msgspec import Struct, json, structs

from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from controlplane.timeline.fleet_tracks import fleet_events
from controlplane.timeline.survey import MS, AgentClock, LogSurvey
from controlplane.timeline.torch_traces import FoundTrace, JsonEvent, Numbers, TorchTrace, find_trace, is_torch_trace
from controlplane.timeline.tracks import ProcessTracks, TraceEvent
from schemas.errors import ConfigError, LogError
from schemas.formatting import agent_order
from schemas.identity import ROLLOUT, agent_of
from schemas.storage.atomic_write import atomic_write, check_destination

WRITE_BYTES: Final = 1 << 20
COMPRESSION: Final = 3
"""Saves four fifths of what the best level saves, in half the time."""
BUS_PID: Final = 1
FRONT_END: Final = ".async_llm."
"""In the name of the trace that vLLM's front end writes beside those of its ranks."""
SORTS: Final = 10
"""Positions reserved for an agent and its traces in the order of processes."""

_encoder = json.Encoder(decimal_format="number")


class ClockLine(Struct, frozen=True, kw_only=True):
    """What is known of the clocks of one agent's incarnation.

    Attributes:
        offset_ns: From its node's wall clock to the bus's, at the end of the log. None if it was never measured: the
            agent's events are then placed by when the bus heard of them, and its node's traces keep their own times.
        error_ns: Bound of the error at that moment; None with `offset_ns`.
    """

    agent: str
    incarnation: str
    offset_ns: int | None
    error_ns: int | None
    estimates: int

    def __str__(self) -> str:
        if self.offset_ns is None or self.error_ns is None:
            return f"agent {self.agent}: clock offset unknown; events placed by when the bus heard of them"
        count = f"{self.estimates} estimate{'s' if self.estimates > 1 else ''}"
        offset = f"{self.offset_ns / MS:+.3f} ms ± {self.error_ns / MS:.3f} ms"
        return f"agent {self.agent}: clock offset {offset} ({count})"


class Timeline(Struct, frozen=True, kw_only=True):
    """What was written."""

    run: str
    path: str
    nbytes: int
    control_events: int
    traced_events: int
    traces: tuple[str, ...]
    clocks: tuple[ClockLine, ...]
    warnings: tuple[str, ...]
    whole: bool


def write_timeline(
    log: Path,
    out: Path,
    roots: Sequence[Path] | None = (),
    *,
    force: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> Timeline:
    """Write the timeline of a run's log. A damaged log is drawn up to the damage. Raises ConfigError or LogError.

    Args:
        log: The log.
        out: The file to write; compressed if its name ends with `.gz`.
        roots: Folders below which the agents' traces lie, or copies of them. None leaves traces out without a warning.
        force: Replace `out` if it exists.
        say: Called with a line for each trace that is read, since that may take long.
    """
    check_destination(out, force, [log])
    for root in roots or ():
        if not root.is_dir():
            raise ConfigError(f"--traces {root}: there is no such folder")
    run = RunLog.header(log).run
    draft = TimelineDraft(run, LogSurvey(RunLog.read(log)))
    try:
        # Opened first: checking the traces takes minutes, and a file that can't be written should fail before.
        with atomic_write(out, force) as file, _compressed(file, out) as stream:
            files = [] if roots is None else draft.find_traces(roots, say)
            check_destination(out, force, [trace.path for trace in files])
            _write(stream, draft.head(), chain(draft.fleet_events(RunLog.read(log)), draft.trace_events(files, say)))
        nbytes = out.stat().st_size
    except OSError as error:
        raise LogError(f"the timeline {out} was not written: {error.strerror or error}") from error
    return Timeline(
        run=run,
        path=str(out),
        nbytes=nbytes,
        control_events=draft.control_events,
        traced_events=draft.traced_events,
        traces=tuple(str(file.path) for file in files),
        clocks=draft.clocks,
        warnings=tuple(draft.warnings),
        whole=not draft.survey.damage,
    )


class TimelineDraft:
    """The content of one timeline."""

    def __init__(self, run: str, survey: LogSurvey) -> None:
        self.control_events = self.traced_events = 0
        self.clocks = tuple(_clock_line(clock, survey.last_ns) for clock in survey.clocks.values())
        self.warnings: list[str] = []
        self._run, self.survey = run, survey
        self._zero_ns = survey.begins_ns
        agents = {clock.agent for clock in survey.clocks.values()}
        self._position = {name: i for i, name in enumerate(sorted(agents, key=agent_order), start=1)}
        if survey.damage:
            self.warnings.append(f"cut off: the log after its record {survey.last}. {survey.damage}")
        if survey.unreadable:
            count, first = len(survey.unreadable), survey.unreadable[0]
            self.warnings.append(f"left out: {count} unreadable log records, the first at position {first}")

    def find_traces(self, roots: Sequence[Path], say: Callable[[str], object]) -> list[FoundTrace]:
        """Return the traces that match the log, in the order in which they were reported."""
        files: list[FoundTrace] = []
        reported = [trace for trace in self.survey.traces.values() if is_torch_trace(trace.trace.path)]
        if reported and not roots:
            self.warnings.append(f"left out: {len(reported)} traces that the log names; --traces says where they are")
            return files
        for trace in reported:
            say(f"checking {trace.trace.path}")
            found = find_trace(trace, roots)
            if isinstance(found, FoundTrace):
                files.append(found)
            else:
                self.warnings.append(f"left out: trace {found}")
        return files

    def head(self) -> bytes:
        """Return the JSON object up to its events."""
        clocks = [structs.asdict(line) for line in self.clocks]
        about = {"tool": "rolloutctl", "run": self._run, "clock": "wall clock of the bus", "agents": clocks}
        fields = {"displayTimeUnit": "ms", "baseTimeNanoseconds": self._zero_ns, "otherData": about, "traceEvents": []}
        return _encoder.encode(fields).removesuffix(b"]}")

    def fleet_events(self, entries: Iterable[LogEntry]) -> Iterator[TraceEvent]:
        processes = {"": ProcessTracks(BUS_PID, "bus (trainer)", 0, self._zero_ns)}
        for name, position in self._position.items():
            processes[name] = ProcessTracks(BUS_PID + position, self._title(name), position * SORTS, self._zero_ns)
        for event in fleet_events(self.survey, processes, entries):
            self.control_events += 1
            yield event

    def trace_events(self, files: Sequence[FoundTrace], say: Callable[[str], object]) -> Iterator[JsonEvent]:
        numbers = Numbers()
        for file in files:
            say(f"reading {file.path}")
            name = agent_of(file.reported.peer)
            wall = self._wall(file)
            shift_ns = file.base_ns + (wall[0] if wall is not None else 0) - self._zero_ns
            trace = TorchTrace(file, self._owner(name, file), shift_ns, self._position[name] * SORTS + 1, numbers)
            yield from trace.events()
            self.traced_events += trace.count
            self.warnings += [] if wall else [f"{file.path}: on its node's own clock, whose offset is unknown"]
            self.warnings += self._trace_warnings(file.path, trace)

    def _trace_warnings(self, path: Path, trace: TorchTrace) -> Iterator[str]:
        if trace.fault is not None:
            yield f"cut off: {path} can't be read after {trace.count} events: {trace.fault}"
        elif not trace.count and not trace.malformed:
            yield f"{path} has no events; is it a torch trace?"
        if trace.malformed:
            yield f"left out: {trace.malformed} malformed events of {path}"
        if trace.before:
            what = f"{trace.before} of {trace.count} events lie before the run began, where Perfetto draws nothing"
            yield f"{path}: {what}; is its node's clock right?"

    def _wall(self, file: FoundTrace) -> tuple[int, int] | None:
        """The clock of a trace's node when it begins, which is at the latest when it was reported."""
        clock, reported_ns = self.survey.clock(file.reported.peer), file.reported.reported_ns
        wall = clock.wall(reported_ns)
        if wall is None or file.first_ns is None:
            return wall
        return clock.wall(min(reported_ns, file.first_ns + wall[0]))

    def _title(self, name: str) -> str:
        """Name of an agent's process, with its newest clock so that a viewer sees how exact the times are."""
        line = next(line for line in reversed(self.clocks) if line.agent == name)
        if line.offset_ns is None:
            return f"agent {name} (clock offset unknown)"
        return f"agent {name} (clock {line.offset_ns / MS:+.3f} ± {(line.error_ns or 0) / MS:.3f} ms)"

    def _owner(self, name: str, file: FoundTrace) -> str:
        """Name of the process that a trace is drawn in: one for each rank."""
        identity, rank = self.survey.identities.get(name), file.reported.trace.rank
        if identity is None:
            return f"traces of agent {name}"
        if rank is None and FRONT_END in file.path.name:
            return f"replica {identity.replica} front end"
        if rank is None and file.rank is None and identity.nnodes > 1:
            return f"replica {identity.replica} node {identity.node_rank}"
        if rank is None:
            rank = identity.global_ranks.start + (file.rank or 0)
        owner = f"replica {identity.replica}" if identity.role == ROLLOUT else identity.role
        return f"{owner} rank {rank}"


def _clock_line(clock: AgentClock, end_ns: int) -> ClockLine:
    offset_ns, error_ns = clock.wall(end_ns) or (None, None)
    return ClockLine(
        agent=clock.agent,
        incarnation=clock.incarnation,
        offset_ns=offset_ns,
        error_ns=error_ns,
        estimates=len(clock.measured),
    )


def _write(stream: IO[bytes] | gzip.GzipFile, head: bytes, events: Iterable[TraceEvent | JsonEvent]) -> None:
    buffer, separator = bytearray(head), b"\n"
    for event in events:
        try:
            encoded = _encoder.encode(event)
        except RecursionError:  # an event of a trace, whose arguments are nested thousands deep: no viewer shows it
            continue
        buffer += separator
        buffer += encoded
        separator = b",\n"
        if len(buffer) >= WRITE_BYTES:
            stream.write(buffer)
            buffer.clear()
    stream.write(buffer + b"\n]}\n")


def _compressed(file: IO[bytes], out: Path) -> AbstractContextManager[IO[bytes] | gzip.GzipFile]:
    if out.suffix != ".gz":
        return nullcontext(file)
    return gzip.GzipFile(filename="", mode="wb", compresslevel=COMPRESSION, fileobj=file)
