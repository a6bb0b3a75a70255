"""One file for Perfetto: a run's log and the traces that it names, on the bus's clock.

Theory of operation. The log is read twice: once for its clocks, places and traces (`clocks`), once for what
happened (`control`). Then each trace is checked and streamed (`traces`). Events are written as they
come; the viewer sorts them. What can't be had is left out, named and said why: a timeline with a hole is of use, one
that hides it is not.

The file appears when it is whole, under its name, in one step; nothing is ever written over unless that is asked for.
"""

import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Final

from msgspec import Struct, json, structs

from controlplane.record.atomic_write import atomic_write, check_destination
from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from controlplane.timeline.alignment import MS, AgentClock, Survey
from controlplane.timeline.control import Control
from controlplane.timeline.torch_traces import Numbers, TorchTrace, TraceFile, found, is_torch_trace
from controlplane.timeline.tracks import Lanes, TraceEvent
from schemas.errors import ConfigError, LogError
from schemas.identity import ROLLOUT

WRITE_BYTES: Final = 1 << 20
COMPRESSION: Final = 3
"""Four fifths of what the best gives, in half the time."""
BUS_PID: Final = 1
FRONT_END: Final = ".async_llm."
"""In the name of what vLLM's front end leaves, beside the traces of its ranks."""
SORTS: Final = 10
"""Places of an agent and its traces in the order of processes."""

_encoder = json.Encoder(decimal_format="number")


class ClockLine(Struct, frozen=True, kw_only=True):
    """What is known of the clocks of one agent's incarnation.

    offset_ns: from its node's wall clock to the bus's, at the end; None when it was never measured. Then the agent's
    events are placed by commands and answers, and its node's traces as they are.   error_ns: by how much what is known
    may be wrong, there or where a trace begins; None when nothing is known.   estimates: how often it was told.
    """

    agent: str
    incarnation: str
    offset_ns: int | None
    error_ns: int | None
    estimates: int

    def __str__(self) -> str:
        error = f"± {self.error_ns / MS:.3f} ms" if self.error_ns is not None else "± unknown"
        if self.offset_ns is None:
            return f"agent {self.agent}: clock offset unknown; events placed by commands and answers, {error}"
        told = f"{self.estimates} estimate{'s' if self.estimates > 1 else ''}"
        return f"agent {self.agent}: clock offset {self.offset_ns / MS:+.3f} ms {error} ({told})"


class Timeline(Struct, frozen=True, kw_only=True):
    """What was written. control_events: of the log.   traced_events: of `traces`.   warnings: what is left out.

    whole: the log could be read to its end.
    """

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
    roots: Sequence[Path] = (),
    *,
    force: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> Timeline:
    """Write the timeline of a run's log. roots: where the agents' traces lie, or copies of them.

    force: write over what is there.   say: told of each trace that is read, since that may take long.
    Compressed if the name ends with `.gz`. A damaged log is drawn up to there. Raises ConfigError, LogError (also when
    it can't be written), LogCorrupt for what is no log.
    """
    check_destination(out, force, [log])
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"--traces {root}: there is no such folder")
    run = RunLog.header(log).run
    draft = Draft(run, Survey(RunLog.read(log)))
    try:
        with _packed(out, force) as stream:  # first, for traces may take minutes, and then there may be no such place
            files = draft.check(roots, say)
            check_destination(out, force, [file.path for file in files])
            _write(stream, draft.head(), chain(draft.control(RunLog.read(log)), draft.traced(files, say)))
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


class Draft:
    """What goes into one timeline. control_events, traced_events: how many were given so far.

    clocks: of every incarnation in the log.   warnings: what is left out, and why.   survey: that it is made from.
    """

    def __init__(self, run: str, survey: Survey) -> None:
        self.control_events = self.traced_events = 0
        self.clocks = tuple(_clock_line(one, [survey.last_ns]) for one in survey.clocks.values())
        self.warnings: list[str] = []
        self._run, self.survey = run, survey
        self._zero_ns = survey.begins_ns
        self._sort = {name: i for i, name in enumerate(sorted(survey.agents, key=self._in_order), start=1)}
        if survey.damage:
            self.warnings.append(f"cut off: the log after its record {survey.last}. {survey.damage}")
        if survey.unreadable:
            count, first = len(survey.unreadable), survey.unreadable[0]
            self.warnings.append(f"left out: {count} records of the log that another version wrote, from {first} on")

    def check(self, roots: Sequence[Path], say: Callable[[str], object]) -> list[TraceFile]:
        """The traces that can be had, in the order in which they were told."""
        files: list[TraceFile] = []
        told = [one for one in self.survey.traces.values() if is_torch_trace(one.trace.path)]
        if told and not roots:
            self.warnings.append(f"left out: {len(told)} traces that the log names; give --traces with their root")
            return files
        for one in told:
            say(f"checking {one.trace.path}")
            had = found(one, roots)
            if isinstance(had, TraceFile):
                files.append(had)
            else:
                self.warnings.append(f"left out: the trace {had}")
        moments = {peer: [self.survey.last_ns] for peer in self.survey.clocks}
        for file in files:
            moments.setdefault(file.told.peer, [self.survey.last_ns]).append(self._begins_ns(file))
        self.clocks = tuple(_clock_line(self.survey.clock(peer), at_ns) for peer, at_ns in moments.items())
        return files

    def head(self) -> bytes:
        """The object up to its events."""
        clocks = [structs.asdict(one) for one in self.clocks]
        about = {"tool": "rolloutctl", "run": self._run, "clock": "wall clock of the bus", "agents": clocks}
        fields = {"displayTimeUnit": "ms", "baseTimeNanoseconds": self._zero_ns, "otherData": about, "traceEvents": []}
        return _encoder.encode(fields).removesuffix(b"]}")

    def control(self, entries: Iterable[LogEntry]) -> Iterator[TraceEvent]:
        """What the bus and its agents did."""
        lanes = {"": Lanes(BUS_PID, "bus (trainer)", 0)}
        for pid, (name, place) in enumerate(self._sort.items(), start=BUS_PID + 1):
            lanes[name] = Lanes(pid, self._title(name), place * SORTS)
        control = Control(self.survey, self._zero_ns, lanes)
        for event in control.events(entries):
            self.control_events += 1
            yield event
        for peer, early_ns in control.early_ns.items():
            allowed_ns = (self.survey.clock(peer).most_error_ns or 0) + MS  # agents' moments are whole milliseconds
            if early_ns > allowed_ns:
                self.warnings.append(
                    f"agent {peer}: commands seemed to be received up to {early_ns / MS:.3f} ms before they were "
                    f"issued, and its clock allows {allowed_ns / MS:.3f} ms: a clock was set, or is wrong"
                )

    def traced(self, files: Sequence[TraceFile], say: Callable[[str], object]) -> Iterator[dict[str, object]]:
        """What their engines and ranks did."""
        numbers = Numbers()
        for file in files:
            say(f"reading {file.path}")
            name = file.told.peer.partition("/")[0]
            clock = self.survey.clock(file.told.peer)
            wall = clock.wall(self._begins_ns(file))
            if wall.error_ns is None:
                self.warnings.append(f"{file.path}: on its node's own clock, whose offset is unknown")
            shift_ns = file.base_ns + wall.offset_ns - self._zero_ns
            trace = TorchTrace(file, self._whose(name, file), shift_ns, self._sort[name] * SORTS + 1, numbers)
            yield from trace.events()
            if trace.fault is not None:
                self.warnings.append(
                    f"cut off: {file.path} is no trace any more after {trace.count} events: {trace.fault}"
                )
            elif not trace.count and not trace.odd:
                self.warnings.append(f"{file.path} has no events: is it a trace of torch's?")
            if trace.odd:
                self.warnings.append(f"left out: {trace.odd} events of {file.path} without a place that can be told")
            self.traced_events += trace.count
            if trace.before:
                what = f"{trace.before} of its {trace.count} events lie before the run began, where Perfetto draws none"
                self.warnings.append(f"{file.path}: {what}; is the clock of its node right?")
            then = clock.wall(self._zero_ns + trace.last_ns)
            moved_ns, allowed_ns = then.offset_ns - wall.offset_ns, (then.error_ns or 0) + (wall.error_ns or 0)
            if abs(moved_ns) > allowed_ns:
                self.warnings.append(
                    f"{file.path}: the clock of its node moved by {moved_ns / MS:+.3f} ms against the bus's meanwhile, "
                    "and the trace is placed by its begin"
                )

    def _begins_ns(self, file: TraceFile) -> int:
        """When a trace begins, on the bus's clock; when it was told, if it does not say. It was not told before."""
        told_ns = file.told.told_ns
        if file.first_ns is None:
            return told_ns
        return min(told_ns, file.first_ns + self.survey.clock(file.told.peer).wall(told_ns).offset_ns)

    def _title(self, name: str) -> str:
        """Of an agent's process. Its newest clock is named, so that whoever looks knows how sure the places are."""
        line = next((one for one in reversed(self.clocks) if one.agent == name), None)
        if line is None or line.offset_ns is None:
            return f"agent {name} (clock offset unknown)"
        error_ms = (line.error_ns or 0) / MS
        return f"agent {name} (clock {line.offset_ns / MS:+.3f} ± {error_ms:.3f} ms)"

    def _whose(self, name: str, file: TraceFile) -> str:
        place, rank = self.survey.places.get(name), file.told.trace.rank
        step = f", step {file.told.step}" if file.told.step is not None else ""
        if place is None:
            return f"agent {name}{step}"
        if rank is None and FRONT_END in file.path.name:
            return f"replica {place.replica} front end{step}"
        if rank is None:
            rank = place.global_ranks.start + (file.rank or 0)
        whose = f"replica {place.replica} rank {rank}" if place.role == ROLLOUT else f"{place.role} rank {rank}"
        return f"{whose}{step}"

    def _in_order(self, name: str) -> tuple[str, int, int]:
        place = self.survey.places.get(name)
        if place is None:
            return name, 0, 0
        return "" if place.role == ROLLOUT else place.role, place.replica, place.node_rank


def _clock_line(clock: AgentClock, moments_ns: Sequence[int]) -> ClockLine:
    """moments_ns: on the bus's clock; the end of the log, and when traces begin."""
    agent, _, incarnation = clock.peer.partition("/")
    wall, *others = (clock.wall(at_ns) for at_ns in moments_ns)
    known = wall.error_ns is not None
    return ClockLine(
        agent=agent,
        incarnation=incarnation,
        offset_ns=wall.offset_ns if known else None,
        error_ns=max(one.error_ns or 0 for one in (wall, *others)) if known else clock.monotonic(0).error_ns,
        estimates=clock.estimates,
    )


def _write(stream: IO[bytes] | gzip.GzipFile, head: bytes, events: Iterable[TraceEvent | dict[str, object]]) -> None:
    """The whole object. Raises OSError."""
    buffer, between = bytearray(head), b"\n"
    for event in events:
        buffer += between
        buffer += _encoder.encode(event)
        between = b",\n"
        if len(buffer) >= WRITE_BYTES:
            stream.write(buffer)
            buffer.clear()
    buffer += b"\n]}\n"
    stream.write(buffer)


@contextmanager
def _packed(out: Path, force: bool) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """A whole file, compressed if its name says so. Raises OSError."""
    with atomic_write(out, force) as file, ExitStack() as stack:
        if out.suffix == ".gz":
            packed = gzip.GzipFile(filename="", mode="wb", compresslevel=COMPRESSION, fileobj=file)
            yield stack.enter_context(packed)
        else:
            yield file
