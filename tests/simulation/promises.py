"""The promises, checked by name after every step. A broken one raises `Broken` and ends the run.

The checks look from outside: at what goes into a machine and comes out of it, at the log, and at what the engines
really are. They trust nothing that a machine reports about itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from msgspec.msgpack import Decoder

from controlplane.machine.events import (
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    HelloReceived,
    Opened,
    PeerLost,
    Publish,
    Retired,
    Send,
)
from schemas.commands import Command, Drain, Target, UnknownCommand, WeightSync
from schemas.desired import Desired, desired_after
from schemas.events import (
    Answer,
    CommandReceived,
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    HeadSeen,
    LeaseExpired,
    Perform,
    Resume,
    Sleep,
    SnapshotReceived,
    Started,
    StartProfile,
    StopProfile,
    Wake,
)
from schemas.identity import Identity, RolloutMode, agent_of
from schemas.outcomes import Acted, Missing, Outcome
from schemas.reports import Report, SyncReport
from schemas.wire import Snapshot, Welcome, decode_command
from tests.simulation import adapter_verdicts, answers, leaving, serving, verdicts
from tests.simulation.bus import event_decoder
from tests.simulation.engine import LAUNCHED, weights_of, weights_to_serve
from tests.simulation.tickets import Tickets
from workers.machine.state import AgentState

effects_decoder: Decoder[tuple[CoordinatorEffect, ...]] = Decoder(tuple[CoordinatorEffect, ...])

if TYPE_CHECKING:
    from controlplane.machine.coordinator import CoordinatorState
    from tests.simulation.agent import Process
    from tests.simulation.bus import Bus
    from tests.simulation.cluster import World
    from tests.simulation.slot import Slot


class Broken(AssertionError):
    """A promise was broken."""

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")


@dataclass
class Ledger:
    """What one place in the fleet has been seen to do, through all its incarnations.

    Attributes:
        seen: Newest epoch seen by this incarnation.
        seen_ever: Newest epoch seen by any.
        oracle: The desired state, folded here from the last snapshot on.
        folded: Seq up to which it is folded.
        lost_epoch: The life whose last records the log has lost, until a snapshot of a later one; 0 if none.
        lease_over: The lease has expired, and no snapshot came since.
        late_start: Step of a session whose start outlived its deadline, and so failed at this agent.
        resuming: What it was to serve when it last asked its engine to resume.
        quarantined_at: The last command that it had decided when it went out of service by itself; those that were
            queued then come after it.
        unproven: What its engine held by a broadcast when it lost its journal.
        may_be_torn: The launch that it first saw after a load without an answer, and to which that perhaps went.
        received: The commands for which its engine was told to receive a broadcast.
        begun_at: Seq of the snapshot with which this agent began to follow a log that had lost its tail. The bus may
            not have known its place before that.
    """

    seen: int = 0
    seen_ever: int = 0
    decided: dict[int, tuple[int, Outcome]] = field(default_factory=dict)
    last_decided: int = 0
    answered: dict[tuple[int, int], list[Outcome]] = field(default_factory=dict)
    performed: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)
    oracle: Desired | None = None
    folded: int = 0
    lease_over: bool = False
    version: int = 0
    lost_epoch: int = 0
    late_start: int | None = None
    begun_at: int = 0
    quarantined_at: int = 0
    resuming: str = ""
    unproven: str = ""
    may_be_torn: str | None = None
    received: set[tuple[int, int]] = field(default_factory=set)


@dataclass
class Published:
    """One command as the log has it.

    Attributes:
        live: The agents that must answer it.
        may_lack: Those of them that have begun to leave the fleet since.
        away: The agents that were known when it was issued, and not live.
        record: Its position in the log.
        at_ms: When it was published.
        ends_us: When the time of the agents ends.
    """

    origin: int
    command: Command | UnknownCommand
    target: Target
    live: frozenset[str]
    away: frozenset[str]
    record: int
    at_ms: int
    deadline_us: int
    ends_us: int
    life: int
    may_lack: frozenset[str] = frozenset()


class Promises:
    """All checks, and what they remember."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.log: dict[int, Published] = {}
        self.head = 0
        self.peers: dict[str, str] = {}
        self.identities: dict[str, Identity] = {}  # with which it was let in, by agent
        self.known: dict[str, bool] = {}  # every agent that ever joined: is it live?
        self.since: dict[str, int] = {}  # when it was last sent a snapshot, by agent
        self.joined: dict[str, str] = {}  # the incarnation that was last sent a snapshot, by agent
        self.retired: dict[str, str] = {}  # each with the incarnation that was known last
        self.leaving: set[int | str] = set()  # units that are drained
        self.begun_anew: dict[int | str, int] = {}  # units that began as new ones do, each with the seq of then
        self.restarts: dict[int | str, list[int]] = {}  # of the agents of replicas, each with the seq of then
        self.newcomers = leaving.Newcomers()
        self.ever_retired: set[str] = set()  # also by what the log has lost
        self.concluded: dict[tuple[int, int], Report] = {}
        self.learned: set[tuple[str, int, int]] = set()
        self.concluded_at: dict[tuple[int, int], int] = {}  # position in the log
        self.tickets = Tickets()
        self.lost: dict[tuple[int, int], Published] = {}  # by origin and seq: what the log had and has lost

    def broken(self, promise: str, text: str) -> NoReturn:
        raise Broken(promise, f"{text} (at {self.world.now} ms)")

    # --- after a step of an agent -------------------------------------------------------------------------------------

    def after_agent(self, process: Process, before: AgentState, event: Event, effects: tuple[Effect, ...]) -> None:
        ledger, state = process.slot.ledger, process.state
        if isinstance(event, SnapshotReceived) and verdicts.taken(before, event) and ledger.lost_epoch > 0:
            self._begin_again(ledger, event)
        if isinstance(event, Started):
            ledger.seen, ledger.last_decided, ledger.oracle = 0, 0, None
            self.world.sampler.begun(process)
            if process.slot.engine is not None and state.interrupted is not None:  # perhaps its result was not written
                process.slot.engine.doubt(state.interrupted.calls[0])
            return
        if before.stopping and any(isinstance(effect, Perform) for effect in effects):
            self.broken("P5 one effect", f"{process.peer} was asked to end, and begins {effects}")
        self._fenced(process, before, event, effects)
        if state is before and not effects:
            return
        self._ordered(process, before, event, effects)
        for effect in effects:
            if isinstance(effect, Answer):
                ledger.answered.setdefault((effect.epoch, effect.seq), []).append(effect.outcome)
        if isinstance(event, EngineReturned) and before.activity is not None and before.activity.overdue:
            call = before.activity.calls[0]
            ledger.late_start = call.session.step if isinstance(call, StartProfile) else ledger.late_start
        if state.suppressed.quarantined and not before.suppressed.quarantined:
            ledger.quarantined_at = before.queue[0].seq - 1 if before.queue else before.seq
        ledger.may_be_torn = serving.may_be_torn(before, event) or ledger.may_be_torn
        self.judge("I5 quarantine", verdicts.suppressed(self, before, event, state, ledger.quarantined_at))
        heard = isinstance(event, HeadSeen) and event.epoch >= before.epoch and not state.needs_snapshot
        if heard and state.changed_by_others and not state.contested:
            self.broken("I1 no torn serving", f"{process.peer} hears its bus, and leaves what something else did")
        self._folded(process, before, event)
        self.judge("convergence", verdicts.blocked(process, before, event))
        self._bounded(process)
        serving.check(self, process)
        self.judge("P12 adapters", adapter_verdicts.ready(process, self.oracle(process)))

    def _fenced(self, process: Process, before: AgentState, event: Event, effects: tuple[Effect, ...]) -> None:
        """P6: nothing of an older epoch changes anything, and nothing of the newest is refused."""
        if not isinstance(event, CommandReceived | HeadSeen | SnapshotReceived):
            return
        ledger, state = process.slot.ledger, process.state
        if event.epoch < ledger.seen and state != before:
            self.broken("P6 fencing", f"{process.peer} saw epoch {ledger.seen} and heeds epoch {event.epoch}")
        applied = (state.seq, state.joined, state.desired) != (before.seq, before.joined, before.desired)
        if event.epoch < ledger.seen_ever and applied:
            self.broken("P6 fencing", f"{process.slot.name} saw epoch {ledger.seen_ever}, applies {event.epoch}")
        if event.epoch >= ledger.seen and any(isinstance(effect, Answer) and effect.rule == 1 for effect in effects):
            self.broken("P6 fencing", f"{process.peer} refuses epoch {event.epoch}, and has seen none newer")
        ledger.seen = max(ledger.seen, event.epoch)
        ledger.seen_ever = max(ledger.seen_ever, event.epoch)

    def _ordered(self, process: Process, before: AgentState, event: Event, effects: tuple[Effect, ...]) -> None:
        """P1 and P2: each seq is taken once, in order, without a hole, and is what the log has under it."""
        ledger, state = process.slot.ledger, process.state
        base = event.seq if isinstance(event, SnapshotReceived) else before.seq
        if state.seq < base:
            self.broken("P1 order", f"{process.peer} went back from {before.seq} to {state.seq}")
        origins = {answer.seq: answer.epoch for answer in effects if isinstance(answer, Answer)}
        origins |= {queued.seq: queued.origin for queued in state.queue}
        if state.activity is not None and state.activity.trigger is not None:
            origins[state.activity.trigger.seq] = state.activity.trigger.origin
        for seq in range(base + 1, state.seq + 1):
            if seq not in origins:
                self.broken("P2 no hole", f"{process.peer} went from {before.seq} to {state.seq}, leaving out {seq}")
            if self._published_as(origins[seq], seq) is None:
                self.broken("P1 order", f"{process.peer} took a command {seq} that is not the log's")
        cut = before.interrupted.trigger if before.interrupted is not None else None
        for effect in effects:
            if not isinstance(effect, Answer) or effect.rule in (1, 2):
                continue
            settling = isinstance(event, EngineObserved | EngineReturned) and cut is not None and cut.seq == effect.seq
            if settling and (effect.epoch, effect.seq) in self.lost:
                continue  # of a history that the log has lost
            decision = (effect.epoch, effect.outcome)
            if effect.seq not in ledger.decided:
                self._proven(process, effect)
                self.judge("P3 answer", answers.answer(process, before, event, effect))
            if ledger.decided.setdefault(effect.seq, decision) != decision:
                self.broken("P1 order", f"{process.peer} decided {effect.seq} twice, and differently")
            again = isinstance(event, CommandReceived) and event.seq <= before.seq
            if effect.seq <= ledger.last_decided and not settling and not again:
                self.broken("P1 order", f"{process.peer} decided {effect.seq} after {ledger.last_decided}")
            ledger.last_decided = max(ledger.last_decided, effect.seq)

    def _proven(self, process: Process, answer: Answer) -> None:
        """I2: an agent that acted on a commit holds the committed weights."""
        published = self._published_as(answer.epoch, answer.seq)
        engine = process.slot.engine
        if published is None or engine is None or not isinstance(published.command, WeightSync):
            return
        command = published.command
        if command.phase != "commit" or command.source is None or not isinstance(answer.outcome, Acted):
            return
        if process.slot.identity.replica in command.quarantine or serving.misled(process):
            return
        if engine.weights != (wanted := weights_of(command.source)):
            self.broken("I2 proof", f"{process.peer} acted on the commit of {wanted}, has {engine.weights}")

    def _folded(self, process: Process, before: AgentState, event: Event) -> None:
        """P4: a snapshot equals the fold of the log, and committed versions never go back."""
        ledger, state = process.slot.ledger, process.state
        identity = process.slot.identity
        if isinstance(event, SnapshotReceived) and verdicts.taken(before, event):
            syncs = verdicts.syncs(identity)
            newest = self.newest(identity, event.seq) if syncs else None
            held = weights_of(event.desired.committed.source) if event.desired.committed is not None else None
            if not syncs and event.desired.sync is not None:
                self.broken("P4 late joiner", f"the snapshot for {process.peer}, which never syncs, holds a sync")
            if ledger.lost_epoch or identity.agent in self.retired:  # sent before the log lost what it rests on,
                newest = held  # or before its place was retired
            if held != newest:
                self.broken("P4 late joiner", f"the snapshot for {process.peer} says {held}, committed is {newest}")
            if not ledger.lost_epoch and identity.agent not in self.retired:
                profile = event.desired.profile
                wanted = profile.step if profile is not None else None
                self.judge("P4 late joiner", verdicts.session(self, identity, event.seq, wanted))
                self.judge("P4 late joiner", adapter_verdicts.snapshot(self, identity, event))
            ledger.oracle, ledger.folded, ledger.lease_over = event.desired, event.seq, False
        if isinstance(event, LeaseExpired):
            ledger.oracle, ledger.lease_over = None, True
        if not state.joined:
            return
        if verdicts.syncs(identity) and state.desired.version < ledger.version and not ledger.lost_epoch:
            # Else it may follow what was lost since, or its replica was deployed again as one that never syncs.
            self.broken("I4 monotonic", f"{process.peer} goes back to version {state.desired.version}")
        ledger.version = state.desired.version

    def _bounded(self, process: Process) -> None:
        state = process.state
        hold = state.settings.max_buffered
        if len(state.reorder_buffer) > hold or len(state.queue) > hold or len(state.answers) > 64:
            sizes = f"{len(state.reorder_buffer)} held, {len(state.queue)} queued, {len(state.answers)} remembered"
            self.broken("P8 bounded", f"{process.peer} keeps {sizes}, and may keep {hold}")

    def oracle(self, process: Process) -> Desired | None:
        """P4: the desired state of an idle agent is the fold of the log, from its last snapshot to its position."""
        ledger, state = process.slot.ledger, process.state
        desired = ledger.oracle
        if desired is None or ledger.lost_epoch:
            return None
        identity = process.slot.identity
        decided = state.queue[0].seq - 1 if state.queue else state.seq
        for seq in range(ledger.folded + 1, decided + 1):
            published = self.log[seq]
            desired = desired_after(desired, published.command, published.target.includes(identity), identity)
        ledger.oracle, ledger.folded = desired, max(ledger.folded, decided)
        return desired

    def counts(self, seq: int, place: Identity) -> bool:
        """Whether the command is for this place: of those before it began anew only what was for the whole fleet."""
        target = self.log[seq].target
        return target.includes(place) and (target.replicas is None or seq > self.begun_anew.get(place.unit, 0))

    def newest(self, place: Identity, seq: int) -> str | None:
        """Return the source of the newest commit for this place up to `seq`."""
        newest: str | None = None
        version, seq = 0, leaving.until(self, place, seq)
        for at, published in self.log.items():
            command = published.command
            if at > seq or not isinstance(command, WeightSync) or command.phase != "commit" or command.source is None:
                continue
            if self.counts(at, place) and command.version > version:
                newest, version = weights_of(command.source), command.version
        return newest

    # --- around an engine call ----------------------------------------------------------------------------------------

    def performing(self, process: Process, perform: Perform) -> None:
        """P5: no call of the journal is made twice, and no command opens two sessions."""
        ledger = process.slot.ledger
        self.judge("P12 adapters", adapter_verdicts.paused(process, perform))
        if perform.call_id in ledger.performed:
            self.broken("P5 one effect", f"{process.peer} makes call {perform.call_id} again")
        ledger.performed.add(perform.call_id)
        self.judge("P6 fencing", verdicts.alone(process, perform.call))
        self.judge("P5 one effect", answers.superfluous(process, perform.call))
        self.judge("P4 late joiner", answers.unseen(process, perform.call))
        engine = process.slot.engine
        self.judge("P5 one effect", verdicts.receives(process, perform.call))
        if isinstance(perform.call, Sleep | Wake) and engine is not None and engine.memory == "trainer":
            self.broken("P5 one effect", f"{process.peer} calls {perform.call} on memory that is the trainer's")
        if isinstance(perform.call, Resume) and process.slot.on_lost_bus == "pause" and ledger.lease_over:
            self.broken("I1 no torn serving", f"{process.peer} resumes by itself, and was told to wait for a bus")
        if isinstance(perform.call, Resume) and engine is not None:
            ledger.resuming = weights_to_serve(process.state.desired, engine.weights)
        if isinstance(perform.call, StopProfile) and (wrong := verdicts.closing(self, process)):
            self.broken("I7 sessions stay open", wrong)
        if isinstance(perform.call, StartProfile):
            ledger.late_start = None
            self.judge("P5 one effect", verdicts.recording(self, process, perform.call.session.step))
        if isinstance(perform.call, StartProfile) and process.trigger is not None:
            if process.trigger.seq in ledger.started:
                self.broken("P5 one effect", f"{process.peer} opens a second session for {process.trigger.seq}")
            ledger.started.add(process.trigger.seq)

    def dials(self, process: Process) -> None:
        """P3: an agent that is given a new key leaves no sync that it takes part in."""
        self.judge("P3 answer", answers.dials(self, process))

    def commits(self, lost: bool = False) -> list[WeightSync]:
        """Return every published commit, in order; after those that the log has `lost`, if wanted."""
        commands = (published.command for published in (*(self.lost.values() if lost else ()), *self.log.values()))
        return [command for command in commands if isinstance(command, WeightSync) and command.phase == "commit"]

    def resumed(self, slot: Slot) -> None:
        """I1: an engine that starts to generate holds weights that were committed, or those it was launched with."""
        engine = slot.engine
        if engine is None or engine.weights == LAUNCHED or slot.identity.mode is RolloutMode.COLOCATED:
            return
        self.judge("I2 proof", verdicts.trusted(self, slot, engine))
        committed = {weights_of(commit.source) for commit in self.commits(lost=True) if commit.source is not None}
        asked = engine.caller.slot if engine.caller is not None else slot
        if engine.weights in committed or engine.weights == asked.ledger.resuming:
            return
        if engine.caller is not None and serving.misled(engine.caller):  # another one commands it too
            return
        self.broken("I1 no torn serving", f"{slot.name} resumes on {engine.weights}, which were not committed")

    # --- what was told ------------------------------------------------------------------------------------------------

    def told(self, effect: CoordinatorEffect) -> None:
        """Note what agents or callers have learned from the bus."""
        if isinstance(effect, Publish):
            self.learned.add(("published", effect.epoch, effect.seq))
        elif isinstance(effect, Conclude) and isinstance(effect.report, Report):
            self.learned.add(("concluded", effect.report.origin, effect.report.seq))

    def kept(self, records: list[tuple[bytes, bytes]]) -> None:
        """P9: with durability `disk`, all that anybody has learned is in the log, whatever crashed when."""
        learned, self.learned = self.learned, set()
        for _, effects in records:
            for effect in effects_decoder.decode(effects):
                self.told(effect)
        if lost := learned - self.learned:
            self.broken("P9 recorded", f"told and not in the log: {sorted(lost)}")

    def replayed(self, process: Process, event: Event) -> None:
        """P3: a command that is sent again has no more time than is left of the first."""
        if process.bus is not None:
            self.judge("P3 answer", verdicts.replayed(self, process.bus, event, process.held_ms))

    # --- after a step of the bus --------------------------------------------------------------------------------------

    def after_bus(
        self, bus: Bus, before: CoordinatorState, event: CoordinatorEvent, effects: tuple[CoordinatorEffect, ...]
    ) -> None:
        state, joined = bus.state, dict(self.joined)
        self._follow(event, effects)
        for effect in effects:
            if isinstance(effect, Publish):
                self._published(bus, effect)
                self.judge("I2 proof", verdicts.compared(self, before, self.log[effect.seq].command))
                self.judge("P11 true", verdicts.quorum(self, before, self.log[effect.seq]))
            elif isinstance(effect, Conclude) and isinstance(effect.report, Report):
                self.judge("P3 answer", verdicts.waited(self, before, state, effect.report))
                self._concluded(bus, effect.report)
            elif isinstance(effect, Conclude) and isinstance(effect.report, SyncReport):
                self.judge("P11 true", verdicts.report(self, bus, effect.report))
            elif isinstance(effect, Retired):
                self.judge("P3 answer", leaving.retire(self, effect))
        self.judge("P3 answer", self.tickets.after(bus, event, effects))  # each ends once
        self.judge("P3 answer", self.world.places.judge(event, effects))
        self.judge("I5 quarantine", verdicts.released(self, bus, before, event, joined))
        self.judge("P11 true", serving.served(self, bus))
        self.judge("P12 adapters", adapter_verdicts.listed(self, bus))
        if len(state.history) > bus.world.settings.history:
            self.broken("P8 bounded", f"the ring holds {len(state.history)} commands")

    def judge(self, promise: str, wrong: str) -> None:
        if wrong:
            self.broken(promise, wrong)

    def sent(self, bus: Bus, ticket: int) -> None:
        """P3: the load phase of a sync ends soon after the trainer has sent the weights."""
        sync = bus.state.sync
        if sync is not None and sync.request.ticket == ticket and sync.phase == "load" and sync.seq in self.log:
            until_us = bus.now_us + 1000 * self.world.settings.after_send_ms
            self.log[sync.seq].deadline_us = min(self.log[sync.seq].deadline_us, until_us)

    def _follow(self, event: CoordinatorEvent, effects: tuple[CoordinatorEffect, ...]) -> None:
        """Who is known and who is live, by what the bus was told and what it sent."""
        if isinstance(event, Opened):
            self.known, self.newcomers.followed = dict.fromkeys(self.known, False), set()
            self.identities = {name: self.identities[name] for name in self.known}
        elif isinstance(event, PeerLost) and self.peers.get(agent_of(event.peer)) == event.peer:
            self._leaves(agent_of(event.peer))
            if agent_of(event.peer) not in self.known:  # the bus forgets one that never joined
                self.identities.pop(self.peers.pop(agent_of(event.peer), "").partition("/")[0], None)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Welcome | Snapshot):
                self.judge("P3 answer", leaving.admitted(self, effect.peer))
            if isinstance(effect, Send) and isinstance(effect.message, Welcome):
                if isinstance(event, HelloReceived):
                    self._let_in(event.hello.identity, event.hello.incarnation)
                self.peers[agent_of(effect.peer)] = effect.peer
                self._leaves(agent_of(effect.peer))
                self.world.hold(effect.peer)
            elif isinstance(effect, Send) and isinstance(effect.message, Snapshot):
                name, incarnation = effect.peer.split("/")[:2]
                unit = self.world.slot(name).identity.unit
                if all(self.world.slot(other).identity.unit != unit for other in self.joined):
                    self.begun_anew[unit] = self.head  # what was for some replicas, this one among them, is not kept
                if name == f"{unit}.0" and self.joined.get(name) != incarnation:
                    self.restarts.setdefault(unit, []).append(self.head)
                self.newcomers.arrived.setdefault(name, self.head)
                self.known[name], self.joined[name], self.since[name] = True, incarnation, self.world.now
                self.retired.pop(name, None)

    def _let_in(self, identity: Identity, incarnation: str) -> None:
        """P3, P4: a place has one holder, the nodes of a replica one shape. With another mode it begins anew."""
        name = identity.agent
        others = {other: place for other, place in self.identities.items() if place.unit == identity.unit}
        if self.known.get(name) and self.joined.get(name, incarnation) != incarnation:
            self.broken("P3 answer", f"{name} is let in as {incarnation}, and {self.joined[name]} is not lost")
        for other, place in others.items():
            if other != name and self.known.get(other) and place.shape != identity.shape:
                self.broken("P4 late joiner", f"{name} is let in as {identity.shape}, and {other} is {place.shape}")
        first = min(others.values(), key=lambda place: place.node_rank, default=identity)
        if first.syncs != identity.syncs:
            self.begun_anew[identity.unit] = self.head
            for slot in self.world.slots:
                if slot.identity.unit == identity.unit:
                    slot.ledger.version = 0
                    self.joined.pop(slot.name, None)
        self.identities[name] = identity

    def _leaves(self, name: str) -> None:
        if name in self.known:
            self.known[name] = False

    def _published(self, bus: Bus, effect: Publish) -> None:
        if effect.seq != self.head + 1:
            self.broken("P1 order", f"the bus publishes {effect.seq} after {self.head}")
        self.head = effect.seq
        opened = next((command for command in bus.state.open if command.record.seq == effect.seq), None)
        staying = leaving.staying(self)
        self.log[effect.seq] = Published(
            origin=effect.epoch,
            command=decode_command(effect.envelope.body),
            target=effect.envelope.target,
            live=frozenset(name for name, live in staying.items() if live),
            away=frozenset(name for name, live in staying.items() if not live),
            record=len(bus.world.log.records) - 1,
            at_ms=self.world.now,
            deadline_us=opened.deadline_us if opened is not None else bus.now_us,
            ends_us=(opened.issued_us if opened is not None else bus.now_us) + effect.envelope.ttl_ms * 1000,
            life=bus.life,
        )
        if isinstance(self.log[effect.seq].command, Drain):
            leaving.begins(self, effect.seq)
        self.judge("P3 answer", verdicts.in_time(bus, self.log[effect.seq]))
        self.judge("I4 monotonic", verdicts.version(self, bus, self.log[effect.seq]))
        self.judge("P12 adapters", adapter_verdicts.version(self, self.log[effect.seq]))

    def _concluded(self, bus: Bus, report: Report) -> None:
        """P3: once, in time, one conclusion for each known agent, `absent` for those that were away when it was issued,
        and each answer is one that was given.
        """
        published = self.log[report.seq]
        key = (report.origin, report.seq)
        if key in self.concluded:
            self.broken("P3 answer", f"command {report.seq} was concluded twice")
        self.concluded[key] = report
        places = {name: slot.identity for name, slot in self.world.by_name.items()}
        self.judge("I7 windows close", self.world.steps_of_trainer.concluded(report, places))
        self.concluded_at[key] = len(bus.world.log.records) - 1
        names = [line.agent for line in report.outcomes]
        wrong = (frozenset(names) ^ (published.live | published.away)) - published.may_lack
        if len(names) != len(set(names)) or wrong:
            self.broken("P3 answer", f"command {report.seq} was for {published.live | published.away}, not {names}")
        missing = {line.agent: line.conclusion for line in report.outcomes if isinstance(line.conclusion, Missing)}
        absent = {agent for agent, conclusion in missing.items() if conclusion.reason == "absent"}
        if absent - published.may_lack != published.away - published.may_lack:
            self.broken("P3 answer", f"command {report.seq}: {published.away} were away, {absent} are named absent")
        if published.life == bus.life and bus.now_us > published.deadline_us + bus.late_us:
            self.broken("P3 answer", f"command {report.seq} was concluded after its deadline")
        for line in (line for line in report.outcomes if not isinstance(line.conclusion, Missing)):
            given = self.world.slot(line.agent).ledger.answered.get(key, [])
            if not verdicts.was_given(report.command, line.conclusion, given):
                self.broken("P3 answer", f"{line.agent} never gave the answer concluded for {report.seq}")

    # --- a log that lost its tail -------------------------------------------------------------------------------------

    def forget(self, left: int) -> None:
        """The log has `left` records left. The others count no more; what agents did because of them still happened."""
        for seq in [seq for seq, published in self.log.items() if published.record >= left]:
            published = self.log.pop(seq)
            self.lost[published.origin, seq] = published
        self.concluded = {key: report for key, report in self.concluded.items() if self.concluded_at[key] < left}
        self.known, self.peers, self.joined, self.retired, self.leaving = {}, {}, {}, {}, set()
        self.head, self.begun_anew, self.identities, self.restarts = 0, {}, {}, {}
        self.newcomers = leaving.Newcomers()
        self.world.places.kept.clear()
        self.world.files.let_go.clear()  # which of them the log still lets go is another question
        for event, encoded in self.world.log.records:
            effects = effects_decoder.decode(encoded)
            self._follow(event_decoder.decode(event), effects)
            for effect in effects:
                if isinstance(effect, Publish) and isinstance(decode_command(effect.envelope.body), Drain):
                    self.leaving |= leaving.units(self, effect.envelope.target)
                elif isinstance(effect, Retired):
                    self.judge("P3 answer", leaving.retire(self, effect))
            self.head = max((effect.seq for effect in effects if isinstance(effect, Publish)), default=self.head)
        epoch = max((published.origin for published in self.log.values()), default=0)
        for slot in self.world.slots:
            slot.ledger.lost_epoch = epoch

    def _begin_again(self, ledger: Ledger, event: SnapshotReceived) -> None:
        """An agent follows the log that is left: what it decided beyond that belongs to another history. A snapshot may
        be older than the loss, and follow another one.
        """
        seq = event.seq
        if event.epoch > ledger.lost_epoch:
            ledger.lost_epoch = ledger.version = 0
            ledger.begun_at = seq
        ledger.decided = {at: decision for at, decision in ledger.decided.items() if at <= seq}
        ledger.started = {at for at in ledger.started if at <= seq}
        ledger.last_decided = min(ledger.last_decided, seq)

    def _published_as(self, origin: int, seq: int) -> Published | None:
        """What was published under this seq in that life, whether or not the log still has it."""
        published = self.log.get(seq)
        return published if published is not None and published.origin == origin else self.lost.get((origin, seq))
