"""What must hold in every run, checked over its log in one pass. Pure.

    I1  no torn serving     no engine is left generating on other weights than those committed for its replica
    I2  proof               what an engine serves has the digest that the sync announced, where both are known, and
                            keeps the one that it had
    I3  at most once        one command has one outcome per agent, however often it arrived
    I4  monotonic           seq goes up by one; epochs, positions and committed versions never go down
    I5  every command ends  by its deadline, with one outcome for each agent that was known when it was issued
    I6  no silent skip      every skip names its rule, every failure has a message
    I7  profiles close      no session stays open that is not desired any more, with or without its trainer
    I8  hello first         a lost agent is told to say hello, and nothing it sends counts before that
    I11 true reports        a sync report names every known replica that is not proven to serve its version
    I12 out of reach        no replica generates on a version after the fleet committed another. Nothing can stop one
                            that is out of reach: what it did then is seen once its agent is back
    I13 readable            what an agent sent for the log is a decision. The bus takes it as it comes
    I14 one adapter, once   a version of an adapter has a path that none of the 64 before it has
    I15 proven samples      the trainer takes no sample of weights that its replica was not proven to hold

Of replicas that are only observed, O1 to O3 are checked (`controlplane.analysis.findings`): a torn fleet, a pause and a
session that never ended.

I9, that a replay decides the same, is checked by `controlplane.replay`. I10, that control never waits behind an
engine call, can't be seen in a log, which holds only what arrived: the agent's tests check it.

The checks use nothing of the machines but the meaning of commands (`schemas.desired.desired_after`). They look at what
was asked, what engines were observed to do, and what was answered, and so would catch a machine that deceives itself.
An agent may observe a state that is wrong, but may not leave it at that: I1 asks whether a call or a failure follows.

Where the log lacks decisions of an agent, or can't be read, its desired state from there on is unknown: I1, I2 and I7
are not checked for the rest of that journal. `controlplane.replay.replayer` reports such holes.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from controlplane.analysis.findings import ObservedFleet, sent
from controlplane.analysis.findings import Violation as Violation
from controlplane.analysis.proof import Proofs
from controlplane.machine import events as bus_events
from controlplane.machine.coordinator_state import CoordinatorState, OpenCommand
from controlplane.record.entries import AgentMark, LogEntry, LogItem, LogMark
from controlplane.record.marks import decode_state
from schemas import events
from schemas.commands import AdapterSync, AdapterVersion, Drain, Pushed, WeightSync
from schemas.desired import Committed, Desired, desired_after, orphaned
from schemas.errors import DecisionUnreadable
from schemas.identity import RolloutMode, agent_of, identity_of
from schemas.outcomes import Failed, Outcome, Reason, Skipped
from schemas.reports import Report, SyncReport
from schemas.wire import Rejoin, Snapshot, Welcome, decode_command

ANSWERS_KEPT: Final = 64
"""Newest answers of one journal that are kept, twice as many at most. An agent itself remembers up to 32."""
PATHS_KEPT: Final = 64
"""Versions of an adapter for which a path is not used again. No engine holds one that is so much older."""
INTERNED_MAX: Final = 65_536
TRIED_AGAIN_NS: Final = 60_000_000_000
"""Time within which an agent must do something about an engine that it failed to pause."""
K = TypeVar("K", bound=Hashable)
_Interned = dict[Hashable, Hashable]


def verify(entries: Iterable[LogItem], observed: ObservedFleet | None = None) -> Iterator[Violation]:
    """Yield the violations in the order of the log. Raises LogCorrupt where the coordinator's can't be read.

    Of marks only one before all records counts: with it begins a log whose oldest records were dropped. `observed`
    follows what is only observed, for a caller who wants more of it.
    """
    bus: _Bus | None = None
    agents: dict[tuple[str, str], _Agent] = {}
    interned: _Interned = {}
    observed = observed or ObservedFleet()
    for entry in entries:
        if isinstance(entry, AgentMark):
            continue
        if isinstance(entry, LogMark):
            if bus is None:
                begin = decode_state(entry)
                bus = _Bus(begin)
                observed.begin(begin)
            continue
        bus = bus or _Bus(CoordinatorState())
        if not entry.agent:
            bus_event, bus_effects = entry.typed_event(), entry.typed_effects()
            observed.follow_bus(entry, bus_event, bus_effects)  # type: ignore[arg-type]
            yield from bus.check(entry, bus_event, bus_effects)  # type: ignore[arg-type]
            continue
        key = (entry.agent, entry.journal)
        if key not in agents:
            agents[key] = _Agent(entry.agent, interned)
        try:
            event, effects = entry.typed_event(), entry.typed_effects()
        except DecisionUnreadable as error:
            yield from agents[key].unreadable(entry, error)
        else:
            observed.follow_agent(entry, event)  # type: ignore[arg-type]
            yield from agents[key].check(entry, event, effects)  # type: ignore[arg-type]
    for agent in agents.values():
        if bus is not None and bus.is_live(agent.name):  # one that is gone need not go on trying
            yield from agent.unpaused_since(bus.now_ns)
    yield from observed.findings()


# --- the bus ----------------------------------------------------------------------------------------------------------


class _OpenCommand(Struct):
    """A command that is not concluded.

    Attributes:
        known: Agents that must have an outcome.
        live: Those of them that could answer.
        may_lack: Those of them that have begun to leave the fleet since, and need have none.
    """

    known: frozenset[str]
    live: frozenset[str]
    deadline_us: int
    may_lack: frozenset[str] = frozenset()


class _Bus:
    """The coordinator's records: order, membership, ends of commands."""

    def __init__(self, begin: CoordinatorState | None) -> None:
        self._unknown = begin is None  # the log begins with a mark that other logic wrote: nothing can be checked
        begin = begin or CoordinatorState()
        members = begin.members.items()
        self._epoch, self._seq, self._version = begin.epoch, begin.seq, begin.default_desired.version
        self._weights = begin.default_desired.committed
        # Peers that said hello and were welcomed, by name.
        self._members = {name: member.peer for name, member in members if member.state in ("joining", "live")}
        self._live = {name for name, member in members if member.state == "live"}
        self._known = {name for name, member in members if member.joined}  # has ever joined, and is not retired
        self._leaving = {name for name, member in members if member.hello.identity.unit in begin.draining}
        self._open = {command.record.seq: _open_command(command) for command in begin.open}
        self._proofs = Proofs(begin)
        self._adapters: dict[str, AdapterVersion] = {}  # by path: which version engines may have loaded from it
        self._newest: dict[str, list[int]] = {}  # by adapter: its newest versions
        for name, known in begin.adapters.items():
            self._newest[name] = [entry.adapter.version for entry in known.used]
            self._adapters |= {entry.adapter.path: entry.adapter for entry in known.used}
        self._now_us = 0
        self.now_ns = 0

    def is_live(self, name: str) -> bool:
        """Whether the agent is in the fleet at this point of the log."""
        return name in self._live

    def check(
        self, entry: LogEntry, event: bus_events.CoordinatorEvent, effects: bus_events.CoordinatorEffects
    ) -> Iterator[Violation]:
        if self._unknown:
            return
        position, self.now_ns = entry.position, entry.at_ns
        yield from self._overdue(position, event)
        yield from self._strangers(position, event, effects)
        if isinstance(event, bus_events.SamplesCounted):
            yield from self._taken(position, event)
        self._follow(event, effects)
        self._proofs.follow(event, effects)
        for effect in effects:
            if isinstance(effect, bus_events.Publish):
                yield from self._published(position, effect, event.at_us)
            elif isinstance(effect, bus_events.Conclude) and isinstance(effect.report, Report):
                yield from self._concluded(position, effect.report)
            elif isinstance(effect, bus_events.Retired):
                self._retire(effect.agents)
            elif isinstance(effect, bus_events.Conclude) and isinstance(effect.report, SyncReport):
                yield from (
                    Violation("I11", position, (), text)
                    for text in self._proofs.wrong(effect.report, self._known - self._leaving)
                )
        if isinstance(event, bus_events.Closed | bus_events.Opened):
            yield from self._left_open(position, effects)

    def _overdue(self, position: int, event: bus_events.CoordinatorEvent) -> Iterator[Violation]:
        """Events of one moment are one turn of the bus, so what is overdue must have ended before the next moment."""
        if isinstance(event, bus_events.Opened):
            self._now_us = event.at_us  # another life, another clock
            self._open = {seq: replace(command, deadline_us=event.at_us) for seq, command in self._open.items()}
            return
        if event.at_us > self._now_us:
            for seq in [seq for seq, command in self._open.items() if command.deadline_us < self._now_us]:
                waiting = tuple(sorted(self._open.pop(seq).live))
                yield Violation("I5", position, waiting, f"seq {seq} was still open past its deadline")
            self._now_us = event.at_us

    def _taken(self, position: int, event: bus_events.SamplesCounted) -> Iterator[Violation]:
        """What the trainer took of weights that are not proven."""
        for count in event.counts:
            if count.accepted and count.proof not in bus_events.PROVEN:
                version = f"v{count.version}" if count.version is not None else "an unknown version"
                what = f"{count.adapter} {version}" if count.adapter else version
                text = (
                    f"step {event.step}: {count.tokens:,} tokens of {what} were taken, whose weights are {count.proof}"
                )
                yield Violation("I15", position, (), text)

    def _left_open(self, position: int, effects: bus_events.CoordinatorEffects) -> Iterator[Violation]:
        """When a life begins or ends, nothing is open but what this published: its start, or aborts of its syncs."""
        new = {effect.seq for effect in effects if isinstance(effect, bus_events.Publish)}
        for seq in [seq for seq in self._open if seq not in new]:
            del self._open[seq]
            yield Violation("I5", position, (), f"seq {seq} was still open when its bus ended")

    def _strangers(
        self, position: int, event: bus_events.CoordinatorEvent, effects: bus_events.CoordinatorEffects
    ) -> Iterator[Violation]:
        senders = [event.peer] if isinstance(event, bus_events.StatusReceived | bus_events.JoinReceived) else []
        senders += [answer.peer for answer in event.answers] if isinstance(event, bus_events.AnswersReceived) else []
        rejected = {effect.peer for effect in sent(effects, Rejoin)}
        for peer in senders:
            name = agent_of(peer)
            if self._members.get(name) != peer and peer not in rejected:
                yield Violation("I8", position, (name,), f"{peer} is not in the fleet, and was not told to say hello")

    def _follow(self, event: bus_events.CoordinatorEvent, effects: bus_events.CoordinatorEffects) -> None:
        """Who is in the fleet after this event."""
        match event:
            case bus_events.Opened():
                self._members.clear()
                self._live.clear()
            case bus_events.HelloReceived(peer=peer) if any(sent(effects, Welcome)):
                self._members[agent_of(peer)] = peer
                self._live.discard(agent_of(peer))
            case bus_events.JoinReceived(peer=peer) | bus_events.ResendRequested(peer=peer) if any(
                sent(effects, Snapshot)
            ):
                self._live.add(agent_of(peer))
                self._known.add(agent_of(peer))
            case bus_events.PeerLost(peer=peer) if self._members.get(agent_of(peer)) == peer:
                del self._members[agent_of(peer)]
                self._live.discard(agent_of(peer))
            case _:
                pass

    def _retire(self, names: tuple[str, ...]) -> None:
        for agents in (self._known, self._leaving, self._live):
            agents.difference_update(names)
        self._members = {name: peer for name, peer in self._members.items() if name not in names}

    def _published(self, position: int, effect: bus_events.Publish, at_us: int) -> Iterator[Violation]:
        if effect.seq != self._seq + 1:
            yield Violation("I4", position, (), f"seq {effect.seq} follows seq {self._seq}")
        if effect.epoch < self._epoch:
            yield Violation("I4", position, (), f"epoch {effect.epoch} follows epoch {self._epoch}")
        self._epoch, self._seq = effect.epoch, effect.seq
        command = decode_command(effect.envelope.body)
        everywhere = effect.envelope.target.replicas is None  # a part of the fleet may be ahead of it
        if isinstance(command, WeightSync) and command.phase == "commit" and everywhere:
            weights = Committed(command.version, command.source, command.manifest) if command.source else None
            repeated = weights is not None and weights == self._weights  # for replicas that missed them
            if command.version <= self._version and not repeated:
                text = f"version {command.version} was committed after version {self._version}"
                yield Violation("I4", position, (), text)
            if command.version >= self._version:
                self._version, self._weights = command.version, weights
        if isinstance(command, AdapterSync):
            yield from self._adapter_published(position, command)
        # Agents get a little less time than the caller waits: at most a second less.
        deadline_us = at_us + (effect.envelope.ttl_ms + 1000) * 1000
        known = frozenset(self._known - self._leaving)
        self._open[effect.seq] = _OpenCommand(known, known & self._live, deadline_us)
        if isinstance(command, Drain):
            leaving = {name for name in known if effect.envelope.target.includes(identity_of(name))}
            self._leaving |= leaving
            for seq in self._open.keys() - {effect.seq}:
                self._open[seq].may_lack |= leaving

    def _adapter_published(self, position: int, command: AdapterSync) -> Iterator[Violation]:
        adapter = command.adapter
        newest = self._newest.setdefault(adapter.name, [])
        if adapter.version not in newest:
            self._newest[adapter.name] = [*newest[-PATHS_KEPT:], adapter.version]
        if command.phase == "load":
            earlier = self._adapters.get(adapter.path, adapter)
            if earlier != adapter and earlier.version in self._newest[earlier.name]:
                text = f"{adapter.model} is loaded from {earlier.path}, which {earlier.model} was loaded from"
                yield Violation("I14", position, (), text)
            self._adapters[adapter.path] = adapter

    def _concluded(self, position: int, report: Report) -> Iterator[Violation]:
        command = self._open.pop(report.seq, None)
        if command is None:
            yield Violation("I5", position, (), f"seq {report.seq} was concluded, and was not open")
            return
        agents = [outcome.agent for outcome in report.outcomes]
        twice = {name for name, times in Counter(agents).items() if times > 1}
        wrong = tuple(sorted(((set(agents) ^ command.known) - command.may_lack) | twice))
        if wrong:
            text = f"the report of seq {report.seq} has not exactly one outcome for each known agent"
            yield Violation("I5", position, wrong, text)
        by_bus = Skipped(Reason.NOT_TARGETED if isinstance(report.command, Drain) else Reason.JOINING)  # by no rule
        for outcome in report.outcomes:
            if isinstance(outcome.conclusion, Skipped) and outcome.rule == 0 and outcome.conclusion != by_bus:
                yield Violation("I6", position, (outcome.agent,), f"skipped seq {report.seq} without naming a rule")


def _open_command(command: OpenCommand) -> _OpenCommand:
    known = command.expected.union(outcome.agent for outcome in command.absent)
    return _OpenCommand(known, frozenset(command.waiting), command.deadline_us + 1_000_000)


# --- an agent ---------------------------------------------------------------------------------------------------------


class _Agent:
    """One journal of one agent: what it was asked, observed, called and answered."""

    def __init__(self, name: str, interned: _Interned) -> None:
        self.name = name
        self._interned = interned
        self._identity = identity_of(name)
        self._desired = Desired()
        self._generates: int | None = None  # the version that the engine was last seen to generate on
        self._instance: str | None = None  # the launch of the engine that was last seen
        self._waited = 0  # the newest version whose commit waited for that launch
        self._served: tuple[int, str | None, str] | None = None  # a version by a launch of the engine, and its digest
        self._epoch = self._seq = 0
        self._history = 0  # epoch of the last snapshot in this life
        self._joined = False  # has been sent the desired state in this life
        self._listening = False  # to commands: joined, and the lease has not expired since
        self._received: dict[tuple[int, int], events.CommandReceived] = {}  # by epoch and seq of the record
        self._answered: dict[tuple[int, int], Outcome] = {}
        self._calling = False
        self._number = 0  # of the last decision
        self._complete = True  # the log has every decision so far
        # Where, when (ns) and how the engine was left to generate what it must not, after a failure.
        self._unpaused: tuple[int, int, events.Observation] | None = None
        self._unreadable = False

    def unreadable(self, entry: LogEntry, error: DecisionUnreadable) -> Iterator[Violation]:
        """A decision that can't be read is reported once for the journal: a newer agent's may all be."""
        if not self._unreadable:
            yield self._violation("I13", entry.position, str(error))
        self._complete, self._unreadable = False, True

    def check(self, entry: LogEntry, event: events.Event, effects: tuple[events.Effect, ...]) -> Iterator[Violation]:
        position = entry.position
        self._complete = self._complete and entry.number == self._number + 1
        self._number = entry.number
        answers = [effect for effect in effects if isinstance(effect, events.Answer)]
        for answer in answers:
            yield from self._on_answer(position, answer)
        committed, member, generated = self._desired.version, self._joined, self._generates
        observed = event.observation if isinstance(event, events.EngineReturned | events.EngineObserved) else None
        if observed is not None:
            if observed.instance not in (None, self._instance):  # nothing can pause a launch before it is seen
                self._instance = observed.instance
                self._waited = max(map(_committed_by, self._received.values()), default=0)
            self._generates = self._version(observed) if observed.generating and not observed.asleep else None
        yield from self._follow(position, event, answers)
        self._advance()
        if member and self._complete and self._identity.node_rank == 0 and self._desired.version > committed:
            yield from self._out_of_reach(position, generated)
        if isinstance(event, events.EngineReturned):
            self._calling = False
        if any(isinstance(effect, events.Perform) for effect in effects):
            self._calling, self._unpaused = True, None
        yield from self.unpaused_since(entry.at_ns)
        failed = any(isinstance(answer.outcome, Failed) for answer in answers)
        failed = failed or (isinstance(event, events.EngineReturned) and isinstance(event.result, events.Fault))
        if observed is not None and self._complete and not self._calling and not failed:
            yield from self._left_at(position, observed)
        elif observed is not None and self._complete and not self._calling:
            self._unpaused = (position, entry.at_ns, observed)

    def unpaused_since(self, now_ns: int) -> Iterator[Violation]:
        """A failure is an answer, but no excuse to leave it at that: the agent has to try again."""
        if self._unpaused is None or now_ns - self._unpaused[1] <= TRIED_AGAIN_NS:
            return
        position, _, observed = self._unpaused
        self._unpaused = None
        for violation in self._left_at(position, observed):
            if violation.invariant == "I1":
                yield replace(violation, text=f"{violation.text}; a call failed, and none followed in a minute")

    def _version(self, observed: events.Observation) -> int | None:
        """The version that the engine holds; None if not known. The number of a pushed label is no version."""
        committed = self._desired.committed
        if committed is None or not isinstance(committed.source, Pushed):
            return observed.version
        return committed.version if observed.label == committed.source.label else None

    def _on_answer(self, position: int, answer: events.Answer) -> Iterator[Violation]:
        outcome = answer.outcome
        if isinstance(outcome, Skipped) and answer.rule == 0:
            yield self._violation("I6", position, f"skipped seq {answer.seq} without naming a rule")
        if isinstance(outcome, Failed) and not outcome.message:
            yield self._violation("I6", position, f"failed seq {answer.seq} without a message")
        if answer.rule in (1, 2) and outcome in (Skipped(Reason.STALE_EPOCH), Skipped(Reason.SUPERSEDED)):
            return  # answers a copy, or stands for an outcome that is no longer stored
        key = self._intern((answer.epoch, answer.seq))
        if len(self._answered) >= 2 * ANSWERS_KEPT:
            awaited = {key: known for key, known in self._answered.items() if key in self._received}
            self._answered = awaited | dict(list(self._answered.items())[-ANSWERS_KEPT:])
        if self._answered.setdefault(key, self._intern(outcome)) != outcome:
            yield self._violation("I3", position, f"seq {answer.seq} of epoch {answer.epoch} has two outcomes")

    def _follow(self, position: int, event: events.Event, answers: list[events.Answer]) -> Iterator[Violation]:
        """The desired state of the replica after this event, as far as this agent knows it."""
        match event:
            case events.Started():
                self._identity, self._calling = event.identity, False
                self._joined = self._listening = False
                self._history = 0
                self._generates = None
                self._received.clear()
            case events.CommandReceived():
                yield from self._on_command(position, event, answers)
            case events.SnapshotReceived():
                if event.epoch < self._epoch or (event.epoch == self._history and event.seq < self._seq):
                    return  # refused
                self._history = event.epoch
                self._epoch, self._seq, self._desired = event.epoch, event.seq, event.desired
                self._joined = self._listening = True
                # What an earlier bus sent beyond this may be of a tail that its log has lost.
                self._received = {key: sent for key, sent in self._received.items() if sent.epoch >= event.epoch}
            case events.HeadSeen():
                self._epoch = max(self._epoch, event.epoch)
            case events.LeaseExpired():
                self._desired = orphaned(self._desired)
                self._listening = False
            case events.Stopping():
                self._joined = self._listening = False  # whatever is half done stays so
            case _:
                pass

    def _on_command(
        self, position: int, event: events.CommandReceived, answers: list[events.Answer]
    ) -> Iterator[Violation]:
        if event.epoch >= self._epoch:
            self._epoch = event.epoch
            self._received[event.origin, event.seq] = event
        elif any(answer.seq == event.seq and answer.rule != 1 for answer in answers):
            yield self._violation("I4", position, f"accepted seq {event.seq} of the older epoch {event.epoch}")

    def _advance(self) -> None:
        """Apply what is next in line and was answered. The agent may have dropped what it had no room for."""
        while self._listening:
            received = self._received
            event = next((received[key] for key in received if key[1] == self._seq + 1 and key in self._answered), None)
            if event is None:
                return
            self._seq = event.seq
            targeted = event.target.includes(self._identity)
            self._desired = desired_after(self._desired, event.command, targeted, self._identity)
            self._received = {key: command for key, command in received.items() if key[1] > self._seq}

    def _out_of_reach(self, position: int, version: int | None) -> Iterator[Violation]:
        """The agent learns of a commit. Until now its engine generated on `version`, if at all."""
        learned = self._desired.version > self._waited and not self._desired.quarantined
        if version is not None and version < self._desired.version and learned:
            text = f"generated on v{version} while out of reach, after v{self._desired.version} was committed"
            yield self._violation("I12", position, text)

    def _left_at(self, position: int, observed: events.Observation) -> Iterator[Violation]:
        """The agent observed this, and neither calls its engine nor reports a failure."""
        desired = self._desired
        if self._identity.node_rank > 0 or not self._joined or self._identity.mode is RolloutMode.OBSERVED:
            return
        if observed.profiling and desired.profile is None:
            yield self._violation("I7", position, "goes on profiling, although no session is desired")
        if not self._listening or not observed.generating or observed.asleep:
            return
        version, committed = self._version(observed), desired.committed
        if desired.quarantined and desired.sync is None:
            text = f"generates, though quarantined since the sync to v{desired.quarantined}"
            yield self._violation("I1", position, text)
        elif version is not None and committed is not None and version != desired.version:
            yield self._violation("I1", position, f"generates on v{version}, and v{desired.version} is committed")
        elif version is None and committed is not None and isinstance(committed.source, Pushed) and observed.label:
            text = f"generates on weights labelled {observed.label!r}, and {committed.source.label!r} is committed"
            yield self._violation("I1", position, text)
        content = committed.manifest.content if committed is not None and committed.manifest is not None else None
        if content is not None and observed.digest not in (None, content) and version == desired.version:
            yield self._violation("I2", position, f"serves v{version} with other weights than the sync announced")
        if version and version == desired.version and observed.digest is not None:
            before, self._served = self._served, (version, observed.instance, observed.digest)
            if before is not None and before[:2] == self._served[:2] and before != self._served:
                yield self._violation("I2", position, f"serves v{version} with other weights than before")

    def _intern(self, value: K) -> K:
        """Return the one copy of equal values: a large fleet gives a million answers, few of them different."""
        if len(self._interned) >= INTERNED_MAX:
            self._interned.clear()
        return self._interned.setdefault(value, value)  # type: ignore[return-value]

    def _violation(self, invariant: str, position: int, text: str) -> Violation:
        return Violation(invariant, position, (self.name,), text)


def _committed_by(sent: events.CommandReceived) -> int:
    """Return the version that a command commits, 0 if none."""
    return sent.command.version if isinstance(sent.command, WeightSync) and sent.command.phase == "commit" else 0
