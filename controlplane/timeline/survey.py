"""The first pass over a log: its clocks, its agents and the traces that they reported. Pure."""

from bisect import bisect
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Final, NamedTuple

from controlplane.machine import events as bus_events
from controlplane.record.entries import LogEntry
from schemas.agent_status import Clock
from schemas.errors import LogCorrupt
from schemas.events import Answer, Effect, Event, Started
from schemas.identity import Identity, agent_of, process_of
from schemas.outcomes import Acted, Outcome, Trace

MS: Final = 1_000_000
"""Nanoseconds in a millisecond."""


class BusRecord(NamedTuple):
    """What the bus saw and decided, at a moment of its clock."""

    at_ns: int
    event: bus_events.CoordinatorEvent
    effects: bus_events.CoordinatorEffects


class AgentRecord(NamedTuple):
    """What an agent saw and decided."""

    at_ns: int
    event: Event
    effects: tuple[Effect, ...]
    agent: str
    peer: str


class ReportedTrace(NamedTuple):
    """A trace file, as its agent reported it.

    Attributes:
        peer: `agent/incarnation`.
        reported_ns: When it was first reported, on the bus's clock.
        paths: Relative to the traces root, the newest first; more than one if the file was moved.
    """

    peer: str
    trace: Trace
    reported_ns: int
    paths: tuple[str, ...]


class AgentClock:
    """The clocks of one incarnation of an agent, as its heartbeats have them.

    One that ended before it could measure them is placed by when the bus received its records, which is up to some
    hundred milliseconds late.
    """

    def __init__(self, peer: str) -> None:
        self.agent, _, self.incarnation = peer.partition("/")
        self.measured: list[Clock] = []
        self._most_ns: int | None = None  # of what the monotonic clock lacks to the bus's, by the records

    def add(self, clock: Clock) -> None:
        """Add a measurement. One that was reported before is ignored."""
        if not self.measured or clock.at_ms > self.measured[-1].at_ms:
            self.measured.append(clock)

    def happened_before(self, bus_ns: int, at_ms: int) -> None:
        """Note that what the agent did in its millisecond `at_ms` happened before `bus_ns`."""
        most = bus_ns - at_ms * MS
        self._most_ns = most if self._most_ns is None else min(self._most_ns, most)

    def bus_ns(self, at_ms: int) -> int:
        """Map a moment of the monotonic clock to the bus's clock."""
        return self._near(at_ms)[0].bus_ns(at_ms) if self.measured else at_ms * MS + (self._most_ns or 0)

    def wall(self, bus_ns: int) -> tuple[int, int] | None:
        """Return what to add to the node's wall clock to get the bus's, and a bound of the error; None if unknown.

        Args:
            bus_ns: The moment, on the bus's clock.
        """
        if not self.measured:
            return None
        first = self.measured[0]
        clock, error_ns = self._near(first.at_ms + (bus_ns - first.bus_ns(first.at_ms)) // MS)
        return clock.offset_ns, error_ns

    def _near(self, at_ms: int) -> tuple[Clock, int]:
        """Of the measurements before and after a moment the one that is more exact there, and its error."""
        at = bisect(self.measured, at_ms, key=lambda clock: clock.at_ms)
        around = self.measured[max(0, at - 1) : at + 1]
        return min(((clock, clock.grown_error_ns(at_ms)) for clock in around), key=itemgetter(1))


def decode_entries(
    entries: Iterable[LogEntry], unreadable: list[int] | None = None
) -> Iterator[BusRecord | AgentRecord]:
    """Yield the records that this version can read. The positions of all others go to `unreadable`."""
    peers: dict[str, str] = {}
    for entry in entries:
        try:
            event, effects = entry.typed_event(), entry.typed_effects()
        except LogCorrupt:
            if unreadable is not None:
                unreadable.append(entry.position)
            continue
        if not entry.agent:
            yield BusRecord(entry.at_ns, event, effects)  # type: ignore[arg-type]
            continue
        if isinstance(event, Started):
            peers[entry.agent] = f"{entry.agent}/{event.incarnation}"
        peer = peers.get(entry.agent, f"{entry.agent}/")
        yield AgentRecord(entry.at_ns, event, effects, entry.agent, peer)  # type: ignore[arg-type]


class LogSurvey:
    """What one pass over a log tells about its clocks, agents and traces.

    Attributes:
        traces: Reported trace files, each once, by agent and digest.
        begins_ns: The first moment of the run, on the bus's clock; agents may start before the first record.
        last_ns, last: Moment and position of the last record.
        unreadable: Positions of records that can't be read: another version's, or no decisions at all.
        damage: Why the log can't be read after `last`; empty if it was read to its end.
    """

    def __init__(self, entries: Iterable[LogEntry]) -> None:
        self.clocks: dict[str, AgentClock] = {}
        self.identities: dict[str, Identity] = {}
        self.traces: dict[tuple[str, str], ReportedTrace] = {}
        self.begins_ns = self.last_ns = self.last = self._count = 0
        self.unreadable: list[int] = []
        self.damage = ""
        self._started: dict[str, int] = {}
        for number, record in enumerate(decode_entries(self._until_damage(entries), self.unreadable)):
            if number == 0:
                self.begins_ns = self.last_ns = record.at_ns
            self.last_ns = max(self.last_ns, record.at_ns)
            if isinstance(record, AgentRecord):
                self._survey_agent(record)
            else:
                self._survey_bus(record)
        starts = (self.moment_ns(peer, at_ms) for peer, at_ms in self._started.items())
        self.begins_ns = min((self.begins_ns, *starts))

    def same_entries(self, entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
        """Yield the surveyed part of the log, read again: a run that goes on has written more since."""
        return islice(entries, self._count)

    def clock(self, peer: str) -> AgentClock:
        """Return the clocks of one incarnation; new ones know nothing yet."""
        return self.clocks.setdefault(peer, AgentClock(peer))

    def moment_ns(self, peer: str, at_ms: int) -> int:
        """Map a moment of an agent's monotonic clock to the bus's clock."""
        return self.clock(peer).bus_ns(at_ms)

    def _until_damage(self, entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
        try:
            for entry in entries:
                self.last = entry.position
                self._count += 1
                yield entry
        except LogCorrupt as error:
            self.damage = str(error)

    def _survey_bus(self, record: BusRecord) -> None:
        event, at_ns = record.event, record.at_ns
        match event:
            case bus_events.StatusReceived(status=status) if status.clock is not None:
                self.clock(process_of(event.peer)).add(status.clock)
            case bus_events.HelloReceived():
                self.identities[event.hello.identity.agent] = event.hello.identity
                self.clock(process_of(event.peer))
            case bus_events.AnswersReceived():
                for answer in event.answers:
                    self._note_traces(process_of(answer.peer), answer.outcome, at_ns)

    def _survey_agent(self, record: AgentRecord) -> None:
        event, peer = record.event, record.peer
        self.clock(peer).happened_before(record.at_ns, event.at_ms)
        if isinstance(event, Started):
            self.identities.setdefault(record.agent, event.identity)
            self._started[peer] = event.at_ms
        for effect in record.effects:
            if isinstance(effect, Answer):
                self._note_traces(peer, effect.outcome, record.at_ns)

    def _note_traces(self, peer: str, outcome: Outcome, at_ns: int) -> None:
        for trace in outcome.traces if isinstance(outcome, Acted) else ():
            key = agent_of(peer), trace.sha256
            known = self.traces.get(key)
            if known is None:
                self.traces[key] = ReportedTrace(peer, trace, at_ns, (trace.path,))
            elif trace.path not in known.paths:
                self.traces[key] = known._replace(paths=(trace.path, *known.paths))
