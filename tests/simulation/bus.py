"""The trainer's side of the simulated cluster: a log that outlives trainers, and one life of a bus on it.

A bus writes each decision to the log before it performs the effects. The log takes records of one life only, the
newest: that is the fence at the storage. A trainer that was replaced and does not know it (a zombie) continues to
send what it has in memory until it has to write, and ends there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, cast

from msgspec.msgpack import Decoder
from msgspec.structs import replace

from controlplane.bus.inbox import Inbox, connection_of
from controlplane.machine import events
from controlplane.machine.coordinator import CoordinatorState, decide, next_deadline
from controlplane.machine.coordinator_state import UNKNOWN_PEER, member_at
from controlplane.record.log import RunLog
from schemas.agent_status import AgentStatus
from schemas.wire import (
    CommandOutcome,
    Downward,
    Envelope,
    PlaceAssigned,
    TimeReply,
    Upward,
    decode_command,
    encode,
    encode_header,
)
from tests.simulation import watcher

if TYPE_CHECKING:
    from tests.simulation.agent import Process
    from tests.simulation.cluster import World

TIME_REPLY = TimeReply(sent_ns=0, received_ns=0, replied_ns=0)

event_decoder: Decoder[events.CoordinatorEvent] = Decoder(events.CoordinatorEvent)


COMMIT_MS = (1, 3, 30)
"""How long the disk may take for a commit, with durability `disk`."""


class Decision(NamedTuple):
    """What one event of a turn led to: the state after it, and its effects."""

    event: events.CoordinatorEvent
    after: CoordinatorState
    effects: tuple[events.CoordinatorEffect, ...]


@dataclass
class Log:
    """The run's log. `owner` is the life that may write."""

    owner: int = 0
    records: list[tuple[bytes, bytes]] = field(default_factory=list)


class Bus:
    """One life of the trainer's bus."""

    def __init__(self, world: World, life: int) -> None:
        self.world, self.life = world, life
        self.alive = True
        self.state = CoordinatorState()
        self.clock_us = world.rng.randrange(1_000_000_000)
        self.inbox = Inbox(cast(RunLog, SimpleNamespace(state=self.state, recorded=lambda *_: 0)))
        self.answered = False  # answers have arrived that are not decided yet
        self.told: dict[str, AgentStatus] = {}  # the newest that was decided, by connection, as its agent sent it
        self.deadline_us: int | None = None
        self.tickets = 0
        self.committing: list[Decision] | None = None  # a turn that is being written
        self.queue: list[events.CoordinatorEvent] = []
        self.slowest_ms = max(COMMIT_MS)  # the longest commit
        self.opened_at = 0  # records of the log when this life had opened

    @property
    def now_us(self) -> int:
        return self.world.now * 1000 + self.clock_us

    @property
    def is_replaced(self) -> bool:
        """Whether the log takes no more records of it."""
        return self.world.log.owner != self.life

    @property
    def late_us(self) -> int:
        """How late a timer may be. With durability `disk` it waits for the turn that is being written, then its own."""
        return 1000 * (1 + 2 * self.slowest_ms) if self.world.disk else 1000

    # --- life ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take over the log, fold it, and open an epoch."""
        if self.world.disk:
            self.world.promises.kept(self.world.log.records)
        state = CoordinatorState()
        for event, _ in self.world.log.records:
            state, _effects = decide(state, event_decoder.decode(event))
        self.state = state
        self.world.log.owner = self.life
        self.world.say(f"bus {self.life} opens at seq {state.seq}")
        self.feed(events.Opened(run="run", settings=self.world.settings, logic=1))
        self.opened_at = len(self.world.log.records)
        self.world.at(0, self.beacon)

    def die(self) -> None:
        """The trainer is gone. Connections to it break."""
        if not self.alive:
            return
        self.alive = False
        self.world.say(f"bus {self.life} is gone")
        if self.committing is not None and self.world.log.owner == self.life and self.world.rng.random() < 0.5:
            self._write(self.committing)  # the commit ended, and nothing that follows from it was done
        for slot in self.world.slots:
            process = slot.process
            if process is not None and process.bus is self:
                self.world.at(self.world.rng.randrange(300), process.cut)

    def close(self) -> None:
        """An orderly end."""
        self.feed(events.Closed())
        self.die()

    # --- the machine --------------------------------------------------------------------------------------------------

    def feed(self, *taken: events.CoordinatorEvent) -> None:
        """Take events in, in one turn. What arrives during a commit waits for the next one, which takes all of it."""
        if not (self.alive and taken):
            return
        if self.committing is not None:
            self.queue += taken
        else:
            self._turn([*taken])

    def _turn(self, batch: list[events.CoordinatorEvent]) -> None:
        """Decide, write all decisions to the log as one group, perform: as `Bus._turn` of the product does."""
        opening = bool(batch) and isinstance(batch[0], events.Opened)
        deadline_us = next_deadline(self.state)
        if deadline_us is not None and self.now_us >= deadline_us and not opening:
            batch.append(events.TimerFired())  # last, so that what arrived in time counts
        turn: list[Decision] = []
        state = self.state
        for event in [replace(event, at_us=self.now_us, at_ns=self.world.now) for event in batch]:
            before = state
            state, effects = decide(before, event)
            if effects or (state is not before and state != before):
                turn.append(Decision(event, state, effects))
        if turn and self.is_replaced:
            self.die()  # it cannot write, so it must not send
            return
        if self.world.disk and any(decision.effects for decision in turn) and not opening:
            self._begin_commit(turn)
            return
        self._write(turn)
        self.state = state
        self._perform_all(turn)
        self.arm()

    def _begin_commit(self, turn: list[Decision]) -> None:
        """Durability `disk`: the disk takes its time, and the turn waits for it."""
        self.committing = turn
        hangs = self.world.rng.random() < self.world.weather.hangs
        commit_ms = 3000 if hangs else self.world.rng.choice(COMMIT_MS)
        self.slowest_ms = max(self.slowest_ms, commit_ms)
        self.world.at(commit_ms, self._committed)

    def _committed(self) -> None:
        turn, self.committing = self.committing, None
        if not self.alive or turn is None:
            return
        if self.is_replaced:
            self.die()
            return
        self._write(turn)
        self._perform_all(turn)
        self.arm()
        if self.queue and self.alive:
            batch, self.queue = self.queue, []
            self._turn(batch)

    def _write(self, turn: list[Decision]) -> None:
        for event, after, effects in turn:
            self.world.log.records.append((encode(event), encode(effects)))
            before, self.state = self.state, after
            if isinstance(event, events.StatusReceived):
                self.told[event.peer] = event.status
            self.world.promises.after_bus(self, before, event, effects)

    def _perform_all(self, turn: list[Decision]) -> None:
        for effect in [effect for decision in turn for effect in decision.effects]:
            if self.world.bus is self and self.world.strikes("trainer"):
                self.world.replace_trainer()
            if not self.alive:
                return
            self.world.promises.told(effect)
            self.perform(effect)

    def arm(self) -> None:
        deadline_us = next_deadline(self.state)
        if not self.alive or deadline_us is None or deadline_us == self.deadline_us:
            return
        self.deadline_us = deadline_us
        self.world.at(max(0, -(-(deadline_us - self.now_us) // 1000)), self.time_came, deadline_us)

    def time_came(self, deadline_us: int) -> None:
        if not self.alive or self.deadline_us != deadline_us:
            return
        self.deadline_us = None
        if self.committing is not None:
            return  # the turn after the commit sees to it
        self._turn([])
        if self.alive and self.deadline_us is not None and self.deadline_us <= self.now_us:
            self.world.promises.broken("P8 bounded", "the bus spins: its deadline stays in the past")

    def perform(self, effect: events.CoordinatorEffect) -> None:
        match effect:
            case events.Publish():
                self.world.say(f"bus {self.life} publishes {effect.seq}: {bytes(effect.envelope.body)!r}")
                self.publish(effect.epoch, effect.epoch, effect.seq, effect.envelope)
                self.world.trainer.on_published(self, effect)
                self.world.on_published(self, decode_command(effect.envelope.body))
            case events.Send():
                self.send(effect.peer, effect.epoch, effect.seq, effect.message)
            case events.Ping():
                if self.process_at(effect.peer) is None and effect.peer not in self.world.abandoned:
                    self.unreachable(effect.peer)
            case _:
                pass

    def unreachable(self, peer: str) -> None:
        self.world.at(0, lambda: self.feed(events.PeerLost(peer=peer, reason="unreachable")))

    # --- sending ------------------------------------------------------------------------------------------------------

    def process_at(self, peer: str) -> Process | None:
        """Return the process that is connected as this peer."""
        for slot in self.world.slots:
            process = slot.process
            if process is not None and process.peer == peer and process.bus is self:
                return process
        return None

    def send(self, peer: str, epoch: int, seq: int, message: Downward) -> None:
        process = self.process_at(peer)
        if isinstance(message, PlaceAssigned):
            self.world.places.answered(peer, message)
        elif process is None:
            if peer not in self.world.abandoned:  # else the bus can't tell
                self.unreachable(peer)
        elif "control" not in process.silent and not self.world.blocked(process.slot, "down"):
            self.world.in_order(process, "down", self._arrives, process, peer, epoch, seq, message)

    def _arrives(self, process: Process, peer: str, epoch: int, seq: int, message: Downward) -> None:
        if peer == process.peer and not self.world.blocked(process.slot, "down"):
            process.on_control(epoch, seq, message)

    def publish(self, epoch: int, origin: int, seq: int, envelope: Envelope | None) -> None:
        """Publish to every subscriber: some copies are lost, duplicated or late."""
        for slot in self.world.slots:
            process = slot.process
            if process is not None and process.sub is self:
                for delay_ms in self.world.luck(slot, envelope is None):
                    self.world.at(delay_ms, self._published, process, epoch, origin, seq, envelope)

    def _published(self, process: Process, epoch: int, origin: int, seq: int, envelope: Envelope | None) -> None:
        if "pub" not in process.silent and not self.world.blocked(process.slot, "pub"):
            process.on_published(epoch, origin, seq, envelope)

    def greet(self, process: Process) -> None:
        """The welcome message of the publish socket: a head."""
        if self.alive:
            self.world.at(1, self._published, process, max(1, self.state.epoch), 0, self.state.seq, None)

    def beacon(self) -> None:
        """Once a second: publish the position, and find silent agents. A zombie repeats what it remembers."""
        if not self.alive:
            return
        self.world.at(1000, self.beacon)
        watcher.look(self)
        state = self.state
        self.publish(state.epoch, 0, state.seq, None)
        if self.world.bus is not self and state.history:
            record, _ = self.world.rng.choice(state.history)
            self.publish(state.epoch, record.origin, record.seq, record.envelope)
        self.inbox.begin_turn(self.now_us, self.world.now, state)
        self.inbox.drop_silent(self.now_us - 1000 * self.world.settings.agent_timeout_ms)
        self.flush()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, peer: str, message: Upward, seq: int, origin: int) -> None:
        """Take a control message, as the real inbox reads it. Answers wait for others that are about to arrive."""
        inbox = self.inbox
        inbox.begin_turn(self.now_us, self.world.now, self.state)
        inbox.receive([connection_of(peer), encode_header(self.state.epoch, origin, seq), encode(message)])
        if inbox.take_requests()[1]:
            self.send(peer, self.state.epoch, self.state.seq, UNKNOWN_PEER)
        elif isinstance(message, AgentStatus) and member_at(self.state, peer) is not None:
            self.send(peer, self.state.epoch, self.state.seq, TIME_REPLY)
        elif isinstance(message, CommandOutcome) and not self.answered:
            self.answered = True
            self.world.at(self.world.rng.randrange(2), self.flush)
        taken, inbox.events = inbox.events, []
        self.answered &= not any(isinstance(event, events.AnswersReceived) for event in taken)
        self.feed(*taken)

    def flush(self) -> None:
        """Handle all answers that have arrived as one event."""
        self.answered = False
        self.feed(*self.inbox.take_events())
