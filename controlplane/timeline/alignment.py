"""Where a moment on an agent's clock lies on the bus's, and by how much that may be wrong. Pure.

The bus's clock is the wall clock of the trainer's machine: every record of a log has it. An agent's decisions have its
monotonic clock in whole milliseconds, its engine's traces the wall clock of its node.

Theory of operation. Agents measure their clocks against the bus's on their heartbeats, and tell each new estimate
(`schemas.wire.Clock`); a moment is placed by those around it, as far as they agree. A log without any is older than
these estimates, or its agents were never heard of again. Then the commands themselves bound the offset: a command is
received after it was published, and an answer arrives after it was sent. That places the agents' events, but says
nothing of the wall clocks of their nodes: traces from there are taken as they are.
"""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from controlplane.machine.events import (
    AnswersReceived,
    CoordinatorEffect,
    CoordinatorEvent,
    HelloReceived,
    JoinReceived,
    Publish,
    StatusReceived,
)
from controlplane.record.entries import LogEntry, coordinator_effects_decoder, coordinator_event_decoder
from schemas.commands import ProfileCommand
from schemas.errors import LogCorrupt
from schemas.events import Answer, CommandReceived, Effect, Event, SnapshotReceived, Started
from schemas.identity import Identity
from schemas.outcomes import Acted, Outcome, Trace
from schemas.reports import Clock
from schemas.wire import DECODE_ERRORS, decode_command, effects_decoder, event_decoder

MS = 1_000_000
"""Nanoseconds."""
DRIFT_PPM = 15
"""By how much two clocks drift apart, as NTP assumes (RFC 5905, PHI)."""
REMEMBERED = 1_000
"""Commands and answers of one agent that bound its clock, at most."""


K = TypeVar("K")


class BusRecord(NamedTuple):
    """What the bus saw and decided. at_ns: on its clock."""

    at_ns: int
    event: CoordinatorEvent
    effects: tuple[CoordinatorEffect, ...]


class AgentRecord(NamedTuple):
    """What an agent saw and decided. peer: `agent/incarnation`.   at_ns: when the bus had it, on the bus's clock."""

    at_ns: int
    event: Event
    effects: tuple[Effect, ...]
    agent: str
    peer: str


class ToldTrace(NamedTuple):
    """A trace file as an agent told of it. told_ns: when, on the bus's clock.

    trace: its size, digest and rank.   paths: relative to the traces root; more than one when it was moved.
    step: of the session, where the log tells.
    """

    peer: str
    trace: Trace
    told_ns: int
    paths: tuple[str, ...]
    step: int | None


class Offset(NamedTuple):
    """What to add to a clock for the bus's, and by how much that may be wrong; error None: nobody knows."""

    offset_ns: int
    error_ns: int | None


def decoded(entries: Iterable[LogEntry], unreadable: list[int] | None = None) -> Iterator[BusRecord | AgentRecord]:
    """The records that this version can read. unreadable: gets the positions of the others."""
    peers: dict[str, str] = {}
    for entry in entries:
        at_ns, name = entry.at_ns, entry.agent
        try:
            if not name:
                bus_event = coordinator_event_decoder.decode(entry.event)
                yield BusRecord(at_ns, bus_event, coordinator_effects_decoder.decode(entry.effects))
                continue
            event, effects = event_decoder.decode(entry.event), effects_decoder.decode(entry.effects)
        except DECODE_ERRORS:
            if unreadable is not None:
                unreadable.append(entry.position)
            continue
        if isinstance(event, Started):
            peers[name] = f"{name}/{event.incarnation}"
        yield AgentRecord(at_ns, event, effects, name, peers.get(name, f"{name}/"))


class Reading(NamedTuple):
    """One estimate of an offset. at_ns: when, on the clock that is to be placed."""

    at_ns: int
    offset_ns: int
    error_ns: int


class AgentClock:
    """The clocks of one incarnation of an agent. estimates: how often it told of them."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.agent = peer.partition("/")[0]
        self._monotonic: list[Reading] = []
        self._wall: list[Reading] = []
        self._least_ns: int | None = None  # from the monotonic clock to the bus's, by the commands
        self._most_ns: int | None = None

    @property
    def estimates(self) -> int:
        """How many were told."""
        return len(self._monotonic)

    def monotonic(self, at_ms: int) -> Offset:
        """From the agent's monotonic clock at one of its moments to the bus's clock."""
        return _placed(self._monotonic, at_ms * MS) if self._monotonic else self._bounded()

    def wall(self, bus_ns: int) -> Offset:
        """From the wall clock of the agent's node to the bus's clock, at a moment on the bus's."""
        return _placed(self._wall, bus_ns) if self._wall else Offset(0, None)

    @property
    def most_error_ns(self) -> int | None:
        """The worst of the estimates that it is placed by; None when nothing is known."""
        return max((one.error_ns for one in self._monotonic), default=self._bounded().error_ns)

    def add(self, clock: Clock) -> None:
        """Take an estimate, unless it is the last one again."""
        at_ns, bus_ns = clock.at_ms * MS, clock.wall_ns + clock.offset_ns
        if not self._monotonic or at_ns > self._monotonic[-1].at_ns:
            self._monotonic.append(Reading(at_ns, bus_ns - at_ns, clock.error_ns))
            self._wall.append(Reading(bus_ns, clock.offset_ns, clock.error_ns))

    def after(self, bus_ns: int, at_ms: int) -> None:
        """What the agent saw at `at_ms`, or up to a millisecond later, came after `bus_ns`."""
        least = bus_ns - (at_ms + 1) * MS
        self._least_ns = least if self._least_ns is None else max(self._least_ns, least)

    def before(self, bus_ns: int, at_ms: int) -> None:
        """What the agent did at `at_ms` came before `bus_ns`."""
        most = bus_ns - at_ms * MS
        self._most_ns = most if self._most_ns is None else min(self._most_ns, most)

    def _bounded(self) -> Offset:
        least, most = self._least_ns, self._most_ns
        if least is None or most is None:
            return Offset(next((one for one in (least, most) if one is not None), 0), None)
        return Offset((least + most) // 2, abs(most - least) // 2)


def _placed(readings: Sequence[Reading], at_ns: int) -> Offset:
    """The offset that all estimates around a moment agree on, each grown by what clocks drift until there.

    An estimate that contradicts a nearer one on its side is of a time before a clock was set, or after.
    """
    at = bisect(readings, at_ns, key=lambda one: one.at_ns)
    around = [one for one in readings[max(0, at - 2) : at] if _agree(one, readings[at - 1])]
    around += [one for one in readings[at : at + 2] if _agree(one, readings[at])]
    grown = [one.error_ns + abs(at_ns - one.at_ns) * DRIFT_PPM // 1_000_000 for one in around]
    least = max(one.offset_ns - error for one, error in zip(around, grown, strict=True))
    most = min(one.offset_ns + error for one, error in zip(around, grown, strict=True))
    if least <= most:
        return Offset((least + most) // 2, (most - least + 1) // 2)
    # They contradict each other: the clock drifts faster, or was set. A line is right for the one, and within its rise
    # of what is right for the other.
    before, after = readings[max(0, at - 1)], readings[min(at, len(readings) - 1)]
    rise = after.offset_ns - before.offset_ns
    part = rise * (at_ns - before.at_ns) // max(1, after.at_ns - before.at_ns)
    return Offset(before.offset_ns + part, max(before.error_ns, after.error_ns) + abs(rise))


def _agree(one: Reading, other: Reading) -> bool:
    """Both can be right, as clocks drift."""
    drift_ns = abs(one.at_ns - other.at_ns) * DRIFT_PPM // 1_000_000
    return abs(one.offset_ns - other.offset_ns) <= one.error_ns + other.error_ns + drift_ns


class Survey:
    """What one pass over a log tells of its clocks and places.

    clocks: by `agent/incarnation`.   places: identity of each agent, by name, where it is known.   agents: all names.
    traces: what agents told of, each file once.   begins_ns: the first moment of all, agents' too.
    first_ns, last_ns: of the records, by the bus's clock.   last: position of the last record.
    unreadable: positions of records that another version wrote.
    damage: why the log could not be read on after `last`; '' if it could.
    """

    def __init__(self, entries: Iterable[LogEntry]) -> None:
        self.clocks: dict[str, AgentClock] = {}
        self.places: dict[str, Identity] = {}
        self.agents: set[str] = set()
        self.traces: dict[tuple[str, str], ToldTrace] = {}  # by agent and digest
        self.first_ns = self.last_ns = self.last = 0
        self.unreadable: list[int] = []
        self.damage = ""
        self._published: OrderedDict[int, int] = OrderedDict()
        self._answered: OrderedDict[tuple[str, int], int] = OrderedDict()  # answers, until their agents' records tell
        self._sent: OrderedDict[tuple[str, int], int] = OrderedDict()  # by their agents' clocks, until they arrive
        self._steps: OrderedDict[int, int] = OrderedDict()
        self._joined: dict[str, int] = {}
        self._started: dict[str, int] = {}
        for one in decoded(self._passing(entries), self.unreadable):
            self.first_ns = self.first_ns or one.at_ns
            self.last_ns = max(self.last_ns, one.at_ns)
            if isinstance(one, AgentRecord):
                self._agent(one)
            else:
                self._bus(one)
        starts = (self.moment_ns(peer, at_ms) for peer, at_ms in self._started.items())
        self.begins_ns = min((self.first_ns, *starts))

    def surveyed(self, entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
        """The same log, read again, as far as it went the first time: a run that goes on has written more since."""
        for entry in entries:
            if entry.position <= self.last:
                yield entry
            if entry.position >= self.last:
                return

    def clock(self, peer: str) -> AgentClock:
        """That of one incarnation; it knows nothing yet when it is new."""
        self.agents.add(peer.partition("/")[0])
        return self.clocks.setdefault(peer, AgentClock(peer))

    def moment_ns(self, peer: str, at_ms: int) -> int:
        """A moment of an agent's monotonic clock on the bus's."""
        return at_ms * MS + self.clock(peer).monotonic(at_ms).offset_ns

    def _passing(self, entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
        try:
            for entry in entries:
                self.last = entry.position
                yield entry
        except LogCorrupt as error:
            self.damage = str(error)

    def _bus(self, one: BusRecord) -> None:
        event, at_ns = one.event, one.at_ns
        match event:
            case StatusReceived(status=status) if status.clock is not None:
                self.clock(event.peer).add(status.clock)
            case HelloReceived():
                self.places[event.hello.identity.agent] = event.hello.identity
                self.clock(event.peer)
            case JoinReceived():
                self._joined.setdefault(event.peer, at_ns)
            case AnswersReceived():
                for answer in event.answers:
                    key = answer.peer, answer.seq
                    if (sent_ms := self._sent.pop(key, None)) is not None:
                        self.clock(answer.peer).before(at_ns, sent_ms)
                    else:
                        self._remember(self._answered, key, at_ns)
                    self._tell(answer.peer, answer.seq, answer.outcome, at_ns)
        for effect in one.effects:
            if isinstance(effect, Publish):
                self._remember(self._published, effect.seq, at_ns)
                command = decode_command(effect.envelope.body)
                if isinstance(command, ProfileCommand) and command.action != "finish":
                    self._remember(self._steps, effect.seq, command.step)

    def _agent(self, one: AgentRecord) -> None:
        event, peer = one.event, one.peer
        clock = self.clock(peer)
        clock.before(one.at_ns, event.at_ms)
        match event:
            case Started():
                self.places.setdefault(one.agent, event.identity)
                self._started[peer] = event.at_ms
            case CommandReceived() if event.seq in self._published:
                clock.after(self._published[event.seq], event.at_ms)
            case SnapshotReceived() if peer in self._joined:
                clock.after(self._joined[peer], event.at_ms)
        for effect in one.effects:
            if isinstance(effect, Answer):
                key = peer, effect.seq
                if (arrived_ns := self._answered.pop(key, None)) is not None:
                    clock.before(arrived_ns, event.at_ms)
                else:
                    self._remember(self._sent, key, event.at_ms)
                self._tell(peer, effect.seq, effect.outcome, one.at_ns)

    def _tell(self, peer: str, seq: int, outcome: Outcome, at_ns: int) -> None:
        for trace in outcome.traces if isinstance(outcome, Acted) else ():
            key = peer.partition("/")[0], trace.sha256
            known = self.traces.get(key)
            if known is None:
                self.traces[key] = ToldTrace(peer, trace, at_ns, (trace.path,), self._steps.get(seq))
            elif trace.path not in known.paths:
                self.traces[key] = known._replace(paths=(trace.path, *known.paths))

    def _remember(self, known: OrderedDict[K, int], key: K, value: int) -> None:
        known.setdefault(key, value)
        if len(known) > REMEMBERED * max(1, len(self.clocks)):
            known.popitem(last=False)  # of a plain dict, finding the first takes longer the more were dropped before it
