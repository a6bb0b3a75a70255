"""What must have held in every run, checked over its log in one pass. Pure.

    I1  no torn serving     no engine is left generating on other weights than those committed for its replica
    I2  proof               what an engine serves has the digest that the sync announced, where both are known
    I3  at most once        one command has one outcome per agent, however often it arrived
    I4  monotonic           seq goes up by one, epochs, positions and committed versions never go down
    I5  every command ends  by its deadline, with one outcome for each agent that was in the fleet when it was issued
    I6  no silent skip      every skip names the row of the decision table, every failure says something
    I7  profiles close      no session is left open that nobody wants any more, its trainer gone or not
    I8  no way back alive   who was lost is told to say hello, and nothing it says counts before that

I9, that a replay decides the same, is `controlplane.record.replay`. I10, that control never waits behind an engine's
call, is not to be seen in a log that only holds what arrived: the agent's tests hold it.

The checks take nothing from the machines but the meaning of commands (`schemas.desired.intend`): they look at what was
asked, what engines were seen to be, and what was told, and would catch a machine that fools itself. An agent may be
seen in a state that is wrong; it may not leave it at that. So I1 asks whether a call follows, or a failure was told.

Where the log lacks decisions of an agent, what it wants from there on is not known: I1, I2 and I7 are not asked of the
rest of that journal. `controlplane.record.replay` says where such holes are.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine.events import (
    AnswersReceived,
    Closed,
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    HelloReceived,
    JoinReceived,
    Opened,
    PeerLost,
    Publish,
    ResendRequested,
    Send,
    StatusReceived,
)
from controlplane.record.entries import LogEntry
from schemas.commands import WeightSync
from schemas.desired import Desired, desired_after, orphaned
from schemas.events import (
    Answer,
    CommandReceived,
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    Fault,
    HeadSeen,
    LeaseExpired,
    Observation,
    Perform,
    SnapshotReceived,
    Started,
)
from schemas.identity import identity_of
from schemas.outcomes import Failed, Outcome, Reason, Skipped
from schemas.reports import Report
from schemas.wire import Rejoin, Snapshot, Welcome, decode_command

K = TypeVar("K", bound=Hashable)
_Alike = dict[Hashable, Hashable]


class Violation(Struct, frozen=True):
    """Something that must not be. position: of the record that shows it."""

    invariant: str
    position: int
    agents: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        who = f" ({', '.join(self.agents)})" if self.agents else ""
        return f"{self.invariant} at record {self.position}{who}: {self.text}"


def verify(entries: Iterable[LogEntry]) -> Iterator[Violation]:
    """Yield what does not hold, in the order of the log. Raises LogCorrupt at a record that can't be read."""
    bus = _Bus()
    agents: dict[tuple[str, str], _Agent] = {}
    alike: _Alike = {}
    for entry in entries:
        event, effects = entry.typed_event(), entry.typed_effects()
        if not entry.agent:
            yield from bus.take(entry, event, effects)  # type: ignore[arg-type]
            continue
        key = (entry.agent, entry.journal)
        if key not in agents:
            agents[key] = _Agent(entry.agent, alike)
        yield from agents[key].take(entry, event, effects)  # type: ignore[arg-type]


# --- the bus ----------------------------------------------------------------------------------------------------------


class _Open(Struct):
    fleet: frozenset[str]
    over_us: int


class _Bus:
    """What the coordinator's records say: order, membership, ends."""

    def __init__(self) -> None:
        self._epoch = self._seq = self._version = 0
        self._members: dict[str, str] = {}  # peers that said hello and were welcomed, by name
        self._live: set[str] = set()
        self._open: dict[int, _Open] = {}
        self._now_us = 0

    def take(
        self, entry: LogEntry, event: CoordinatorEvent, effects: tuple[CoordinatorEffect, ...]
    ) -> Iterator[Violation]:
        at = entry.position
        yield from self._overdue(at, event)
        yield from self._strangers(at, event, effects)
        self._follow(event, effects)
        for effect in effects:
            if isinstance(effect, Publish):
                yield from self._published(at, effect, event.at_us)
            elif isinstance(effect, Conclude) and isinstance(effect.report, Report):
                yield from self._concluded(at, effect.report)
        if isinstance(event, Closed | Opened):
            for seq in [seq for seq in self._open if seq < self._seq or isinstance(event, Opened)]:
                if seq != self._seq:
                    del self._open[seq]
                    yield Violation("I5", at, (), f"seq {seq} was still open when its bus ended")

    def _overdue(self, at: int, event: CoordinatorEvent) -> Iterator[Violation]:
        """Events of one moment are one turn of the bus, so what is overdue must have ended before the next moment."""
        if isinstance(event, Opened):
            self._now_us = event.at_us  # another life, another clock
            self._open = {seq: replace(one, over_us=event.at_us) for seq, one in self._open.items()}
            return
        if event.at_us > self._now_us:
            for seq in [seq for seq, one in self._open.items() if one.over_us < self._now_us]:
                waiting = tuple(sorted(self._open.pop(seq).fleet))
                yield Violation("I5", at, waiting, f"seq {seq} was still open past its deadline")
            self._now_us = event.at_us

    def _strangers(
        self, at: int, event: CoordinatorEvent, effects: tuple[CoordinatorEffect, ...]
    ) -> Iterator[Violation]:
        said = [event.peer] if isinstance(event, StatusReceived | JoinReceived) else []
        said += [one.peer for one in event.answers] if isinstance(event, AnswersReceived) else []
        told = {one.peer for one in effects if isinstance(one, Send) and isinstance(one.message, Rejoin)}
        for peer in said:
            name = peer.partition("/")[0]
            if self._members.get(name) != peer and peer not in told:
                yield Violation("I8", at, (name,), f"{peer} is not in the fleet, and was not told to say hello")

    def _follow(self, event: CoordinatorEvent, effects: tuple[CoordinatorEffect, ...]) -> None:
        """Who is in the fleet after this event."""
        match event:
            case Opened():
                self._members.clear()
                self._live.clear()
            case HelloReceived():
                name = event.peer.partition("/")[0]
                if any(isinstance(one, Send) and isinstance(one.message, Welcome) for one in effects):
                    self._members[name] = event.peer
                    self._live.discard(name)
            case JoinReceived() | ResendRequested():  # who lacks more than is kept is told what is desired, too
                if any(isinstance(one, Send) and isinstance(one.message, Snapshot) for one in effects):
                    self._live.add(event.peer.partition("/")[0])
            case PeerLost():
                name = event.peer.partition("/")[0]
                if self._members.get(name) == event.peer:
                    del self._members[name]
                    self._live.discard(name)
            case _:
                pass

    def _published(self, at: int, effect: Publish, at_us: int) -> Iterator[Violation]:
        if effect.seq != self._seq + 1:
            yield Violation("I4", at, (), f"seq {effect.seq} follows seq {self._seq}")
        if effect.epoch < self._epoch:
            yield Violation("I4", at, (), f"epoch {effect.epoch} follows epoch {self._epoch}")
        self._epoch, self._seq = effect.epoch, effect.seq
        command = decode_command(effect.envelope.body)
        if isinstance(command, WeightSync) and command.phase == "commit":
            if command.version <= self._version and effect.envelope.target.replicas is None:
                text = f"version {command.version} was committed after version {self._version}"
                yield Violation("I4", at, (), text)
            self._version = max(self._version, command.version)
        # Agents are given a little less time than the caller waits: at most a second less.
        over_us = at_us + (effect.envelope.ttl_ms + 1000) * 1000
        self._open[effect.seq] = _Open(frozenset(self._live), over_us)

    def _concluded(self, at: int, report: Report) -> Iterator[Violation]:
        opened = self._open.pop(report.seq, None)
        if opened is None:
            yield Violation("I5", at, (), f"seq {report.seq} was concluded, and was not open")
            return
        told = [one.agent for one in report.outcomes]
        twice = {name for name, times in Counter(told).items() if times > 1}
        wrong = tuple(sorted((set(told) ^ opened.fleet) | twice))
        if wrong:
            text = f"the report of seq {report.seq} has not exactly one outcome for each agent of its fleet"
            yield Violation("I5", at, wrong, text)
        for one in report.outcomes:
            if isinstance(one.conclusion, Skipped) and one.rule == 0:
                yield Violation("I6", at, (one.agent,), f"skipped seq {report.seq} without a row of the table")


# --- an agent ---------------------------------------------------------------------------------------------------------


class _Agent:
    """What one journal of one agent says: what it was asked, what it saw, what it called, what it told."""

    def __init__(self, name: str, alike: "_Alike") -> None:
        self._name = name
        self._alike = alike
        self._identity = identity_of(name)
        self._desired = Desired()
        self._epoch = self._seq = 0
        self._joined = False  # was told what is desired, in this life
        self._listening = False  # to commands: joined, and the lease did not run out since
        self._received_commands: dict[tuple[int, int], CommandReceived] = {}  # by epoch and seq of the record
        self._told: dict[tuple[int, int], Outcome] = {}
        self._calling = False
        self._number = 0  # of the last decision
        self._known = True  # the log holds every decision until here

    def take(self, entry: LogEntry, event: Event, effects: tuple[Effect, ...]) -> Iterator[Violation]:
        at = entry.position
        self._known = self._known and entry.number == self._number + 1
        self._number = entry.number
        for effect in effects:
            if isinstance(effect, Answer):
                yield from self._answered(at, effect)
        yield from self._follow(at, event, effects)
        self._advance()
        if isinstance(event, EngineReturned):
            self._calling = False
        if any(isinstance(one, Perform) for one in effects):
            self._calling = True
        told = any(isinstance(one, Answer) and isinstance(one.outcome, Failed) for one in effects)
        failed = told or (isinstance(event, EngineReturned) and isinstance(event.result, Fault))
        seen = event.observation if isinstance(event, EngineReturned | EngineObserved) else None
        if seen is not None and self._known and not self._calling and not failed:
            yield from self._left_at(at, seen)

    def _answered(self, at: int, answer: Answer) -> Iterator[Violation]:
        outcome = answer.outcome
        if isinstance(outcome, Skipped) and answer.rule == 0:
            yield self._wrong("I6", at, f"skipped seq {answer.seq} without a row of the table")
        if isinstance(outcome, Failed) and not outcome.message:
            yield self._wrong("I6", at, f"failed seq {answer.seq} without a word")
        if answer.rule in (1, 2) and outcome in (Skipped(Reason.STALE_EPOCH), Skipped(Reason.SUPERSEDED)):
            return  # said of a copy, or in the place of an outcome that is not kept any more
        key = self._one_for_all((answer.epoch, answer.seq))
        if self._told.setdefault(key, self._one_for_all(outcome)) != outcome:
            yield self._wrong("I3", at, f"seq {answer.seq} of epoch {answer.epoch} has two outcomes")

    def _follow(self, at: int, event: Event, effects: tuple[Effect, ...]) -> Iterator[Violation]:
        """What is desired of the replica after this event, as far as this agent was told."""
        match event:
            case Started():
                self._identity, self._calling = event.identity, False
                self._joined = self._listening = False
                self._received_commands.clear()
            case CommandReceived():
                yield from self._received(at, event, effects)
            case SnapshotReceived():
                if event.epoch < self._epoch or (self._listening and event.seq < self._seq):
                    return  # refused
                self._epoch, self._seq, self._desired = event.epoch, event.seq, event.desired
                self._joined = self._listening = True
            case HeadSeen():
                self._epoch = max(self._epoch, event.epoch)
            case LeaseExpired():
                self._desired = orphaned(self._desired)
                self._listening = False
            case _:
                pass

    def _received(self, at: int, event: CommandReceived, effects: tuple[Effect, ...]) -> Iterator[Violation]:
        if event.epoch >= self._epoch:
            self._epoch = event.epoch
            self._received_commands[event.origin, event.seq] = event
        elif any(isinstance(one, Answer) and one.seq == event.seq and one.rule != 1 for one in effects):
            yield self._wrong("I4", at, f"took seq {event.seq} of the older epoch {event.epoch}")

    def _advance(self) -> None:
        """Apply what is next in line and was answered. The agent may have dropped what it had no room for."""
        received = self._received_commands
        while self._listening:
            event = next((received[key] for key in received if key[1] == self._seq + 1 and key in self._told), None)
            if event is None:
                return
            self._seq = event.seq
            self._desired = desired_after(
                self._desired, event.command, event.target.includes(self._identity), self._identity
            )
            self._received_commands = received = {key: one for key, one in received.items() if key[1] > self._seq}

    def _left_at(self, at: int, seen: Observation) -> Iterator[Violation]:
        """The agent saw this, and has nothing more to do about it."""
        desired = self._desired
        if self._identity.node_rank > 0 or not self._joined:
            return
        if seen.profiling and desired.profile is None:
            yield self._wrong("I7", at, "goes on profiling, and nobody wants it any more")
        if not self._listening or not seen.generating or seen.asleep:
            return
        if desired.quarantined and desired.sync is None:
            yield self._wrong("I1", at, f"generates, and is out of service since the sync to v{desired.quarantined}")
        elif seen.version is not None and desired.committed is not None and seen.version != desired.version:
            yield self._wrong("I1", at, f"generates on v{seen.version}, and v{desired.version} is committed")
        manifest = desired.committed.manifest if desired.committed is not None else None
        content = manifest.content if manifest is not None else None
        if content is not None and seen.digest not in (None, content) and seen.version == desired.version:
            yield self._wrong("I2", at, f"serves v{seen.version} with other weights than the sync announced")

    def _one_for_all(self, value: K) -> K:
        """The same value, as all agents have it: a large fleet gives a million answers, and few that differ."""
        return self._alike.setdefault(value, value)  # type: ignore[return-value]

    def _wrong(self, invariant: str, at: int, text: str) -> Violation:
        return Violation(invariant, at, (self._name,), text)
