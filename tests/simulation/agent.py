"""One agent of the simulated cluster: the shell around the real machine.

The shell only follows the protocol: it journals a decision before it performs it, says hello, joins
after the first frame of its subscription, sends heartbeats, watches its lease. It can die between any two effects, and
in the middle of a write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from schemas import events
from schemas.agent_status import Clock
from schemas.commands import DRAIN_MARGIN_MS
from schemas.outcomes import Trace
from schemas.transport.sockets import FRAME_BYTES_MAX
from schemas.wire import (
    TOPIC_COMMAND,
    CommandOutcome,
    Downward,
    Envelope,
    Goodbye,
    Hello,
    Join,
    Leave,
    Page,
    Rejoin,
    Replay,
    ResendRequest,
    Snapshot,
    Upward,
    Welcome,
    encode,
    encode_header,
    event_decoder,
)
from tests.simulation import adapter_verdicts, verdicts, watcher
from tests.simulation.adapters import GRACE_MS
from tests.simulation.engine import Attempt
from workers.link.frames import read_control, read_publication, read_replay
from workers.link.heartbeat import ASKED_EVERY, status_of
from workers.machine.decide import decide, next_deadline
from workers.machine.state import AgentState, is_written_first

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.slot import Slot

HOLD = 8
SILENT_MS = 3_000
HEADS_MISSED_MS = 5_000
WALL_NS = 10**18
NO_TOKENIZER = events.Observation(engine="model", tokenizer="absent")


class Process:
    """One incarnation of an agent. Everything here dies with it."""

    def __init__(self, slot: Slot) -> None:
        self.slot, self.world = slot, slot.world
        self.incarnation = f"{f'd{slot.double}' if slot.double else ''}i{slot.incarnations}"
        self.alive = True
        self.state = AgentState()
        self.pending: list[tuple[bytes, bytes]] = []
        self.connection = self.world.new_connection()  # number of its control connection
        self.silent: set[str] = set()  # which of the two connections, control and pub, carries nothing any more
        self.still_read: set[str] = set()  # older connections of which the bus reads what was in flight
        self.hellos = 0
        self.bus: Bus | None = None
        self.sub: Bus | None = None
        self.last_arrival_ms = {"up": 0, "down": 0}
        self.welcomed = self.hears = self.snapshot_due = False
        self.heard_ms = self.answered_ms = self.published_ms = self.world.now
        self.lease_over = False
        self.next_hello_ms = self.next_join_ms = 0
        self.deadline_ms: int | None = None
        self.looked: events.Observation | None = None
        self.held_ms = 0  # how long what it takes in now has waited for the disk
        self.disk_until_ms = -1  # it does nothing before: its disk hangs
        self.waiting: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()  # for the disk, each since when
        self.new_key = False
        self.calls_alone: list[int] = []  # by launch, since it was cut off for good, and its lease has ended
        self.commanded_ms = self.world.now  # when a command could last have reached it
        self.asks: Leave | None = None  # that its replica leave the fleet
        offset_ns = self.world.now * 1_000_000 - WALL_NS
        self.clock = Clock(at_ms=self.clock_ms, wall_ns=WALL_NS, offset_ns=offset_ns, error_ns=0)

    @property
    def clock_ms(self) -> int:
        return self.world.now + self.slot.clock_ms

    def since(self, at_ms: int) -> int:
        """Return the time since a moment of its clock."""
        return self.clock_ms - at_ms

    @property
    def peer(self) -> str:
        """Its newest connection."""
        return f"{self.slot.name}/{self.incarnation}/{self.connection:010x}"

    @property
    def trigger(self) -> events.CommandReceived | None:
        """The command for which its last call was asked."""
        return self.state.activity.trigger if self.state.activity is not None else None

    # --- life ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Fold the journal, begin the incarnation, observe the engine, and connect."""
        state = AgentState()
        self.slot.journal = self.slot.disk.recover()
        for event, _ in self.slot.journal:
            state, _effects = decide(state, event_decoder.decode(event))
        self.state = state
        self.world.say(f"{self.peer} starts at seq {state.seq}")
        settings = events.MachineSettings(
            max_buffered=HOLD,
            reconcile_timeout_ms=5000,
            on_lost_bus=self.slot.on_lost_bus,
            memory=self.slot.engine.memory if self.slot.engine is not None else "agent",
            adapter_grace_ms=GRACE_MS,
        )
        started = events.Started(
            at_ms=self.clock_ms, identity=self.slot.identity, incarnation=self.incarnation, settings=settings
        )
        self.feed(started)
        for delay, act in (
            (self.world.rng.choice((0, 30, 300)), self.look),
            (self.world.rng.choice((0, 10, 100)), self.connect),
            (self.world.rng.randrange(1000), self.beat),
        ):
            self.world.at(delay, act)

    def die(self) -> None:
        """Be killed: what is not in the journal is lost. The engine may or may not finish its call."""
        if not self.alive:
            return
        self.world.say(f"{self.peer} dies")
        if self.slot.engine is not None:
            self.slot.engine.cut()
        self.stop()
        self.world.at(self.world.rng.choice((10, 500, 3000)), self.slot.start)

    def leave(self) -> None:
        """An orderly end: the call in flight is awaited, and no other is begun."""
        if not self.alive:
            return
        if not self.state.stopping:
            self.feed(events.Stopping(at_ms=self.clock_ms))
        if not self.alive:
            return
        if self.state.activity is not None:
            self.world.at(50, self.leave)
            return
        self.commit()
        self.up(Goodbye())
        self.die()

    def ask_to_leave(self, grace_ms: int) -> None:
        """Be asked to end in good order: drain the replica, and end without that if it takes too long."""
        if self.alive and self.state.joined and self.asks is None:
            self.world.say(f"{self.peer} asks to leave the fleet")
            self.asks = Leave(grace_ms=grace_ms)
            self.up(self.asks)
            self.world.at(grace_ms + DRAIN_MARGIN_MS, self.leave)

    def give_up(self) -> None:
        """The bus refuses this agent for good. Now and then somebody starts it again all the same."""
        if self.slot.engine is not None:
            self.slot.engine.cut()
        self.stop()
        self.slot.turn_away(self.peer)

    def stop(self) -> None:
        self.alive = False
        self.slot.process = None
        if self.pending:
            self.slot.disk.tear(self.pending)

    def commit(self) -> None:
        if self.pending:
            self.slot.disk.write(self.pending)
        self.slot.journal += self.pending
        self.pending.clear()

    # --- the machine --------------------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """Decide, journal, perform. Any line below may be the last one of this incarnation."""
        if not self.alive:
            return
        if self.waits_for_disk(self.feed, event):
            return
        before = self.state
        self.state, effects = decide(before, event)
        if self.world.story is not None and (effects or self.state is not before):
            self.world.say(f"    {self.peer} {event}\n            -> {list(effects)}")
        if effects or (self.state is not before and self.state != before):
            self.pending.append((encode(event), encode(effects)))
        self.world.promises.after_agent(self, before, event, effects)
        if is_written_first(before, effects) or self.world.rng.random() < 0.3:
            self.commit()
            self._hang()
        for effect in effects:
            if self.waits_for_disk(self.perform, effect):
                continue
            if self.world.strikes("agent"):
                self.die()
                return
            self.perform(effect)
        if self.world.strikes("agent"):
            self.die()
            return
        self.arm()

    def _hang(self) -> None:
        """Now and then the disk takes seconds for a commit, and all else in the agent waits for it."""
        hangs = self.world.weather.hangs
        if self.alive and hangs and self.slot.disk.rng.random() < hangs:
            self.world.say(f"{self.peer}: the disk hangs")
            self.disk_until_ms = self.world.now + 3000
            self.world.at(3000, self._go_on)

    def waits_for_disk(self, act: Callable[..., None], *args: Any) -> bool:
        """Whether an act has to wait for the disk; it is then done when the disk is back, in order."""
        if waits := bool(self.waiting) or self.world.now < self.disk_until_ms:
            self.waiting.append((self.world.now - self.held_ms, act, args))
        return waits

    def _go_on(self) -> None:
        waiting, self.waiting = self.waiting, deque()
        for since_ms, act, args in waiting:
            if self.alive:
                self.held_ms = self.world.now - since_ms
                act(*args)
        self.held_ms = 0
        if self.alive:
            self.arm()

    def arm(self) -> None:
        deadline_ms = next_deadline(self.state)
        if deadline_ms is None or deadline_ms == self.deadline_ms:
            return
        self.deadline_ms = deadline_ms
        self.world.at(max(0, deadline_ms - self.clock_ms), self.tick, deadline_ms)

    def tick(self, deadline_ms: int) -> None:
        if not self.alive or self.deadline_ms != deadline_ms or self.waits_for_disk(self.tick, deadline_ms):
            return
        self.deadline_ms = None
        self.feed(events.Tick(at_ms=self.clock_ms))
        if self.alive and self.deadline_ms is not None and self.deadline_ms <= self.clock_ms:
            self.world.promises.broken("P8 bounded", f"{self.peer} spins: its deadline stays in the past")

    def perform(self, effect: events.Effect) -> None:
        match effect:
            case events.Perform():
                self.call(effect)
            case events.Answer():
                self.up(CommandOutcome(outcome=effect.outcome, rule=effect.rule), seq=effect.seq, origin=effect.epoch)
            case events.RequestResend():
                self.up(ResendRequest(first=effect.first, credit=64))
            case events.Restart():
                self.commit()
                self.up(Goodbye())
                if self.slot.engine is not None:
                    self.slot.engine.cut()
                self.stop()
                self.world.at(0, self.slot.start, False)
            case events.RequestSnapshot():
                self.up(Join())

    # --- the engine ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Observe the engine after the start, while it launches, and now and then."""
        if not self.alive or self.waits_for_disk(self.look):
            return
        engine = self.slot.engine
        seen = NO_TOKENIZER if engine is None else engine.looked_at()
        idle = engine is None or (engine.attempt is None and self.state.activity is None)
        if engine is not None and idle:
            engine.shown(seen, self.slot.double)
        if idle and (seen != self.looked or self.looked is None):
            self.looked = seen
            self.feed(events.EngineObserved(at_ms=self.clock_ms, observation=seen))
        if engine is not None:
            self.world.at(1000, self.look)

    def call(self, perform: events.Perform) -> None:
        engine = self.slot.engine
        if engine is not None and isinstance(perform.call, events.AwaitPush | events.AwaitIdle | events.Observe):
            self.world.promises.performing(self, perform)
            self.world.at(1, self.read, perform, 10)
            return
        if engine is None and isinstance(perform.call, events.DiskCall):
            self.world.at(self.world.rng.choice((1, 50, 3000)), self.collected, perform.call_id)
            return
        if engine is None:
            self.world.promises.broken("P5 one effect", f"{self.peer} has no engine and calls it")
            return
        attempt, duration_ms = self.slot.begin_call(self, perform, engine)
        self.world.at(duration_ms, self.returned, attempt)

    def read(self, perform: events.Perform, delay_ms: int) -> None:
        """Observe the engine, for as long as the machine waits for a label; as `workers.driver` does."""
        activity, engine, call = self.state.activity, self.slot.engine, perform.call
        if not self.alive or engine is None or activity is None or activity.call_id != perform.call_id:
            return
        if self.waits_for_disk(self.read, perform, delay_ms):
            return
        seen = engine.observe()
        engine.shown(seen, self.slot.double)
        busy = isinstance(call, events.AwaitIdle) and (engine.frozen or (engine.traffic and engine.generating))
        if not busy and (not isinstance(call, events.AwaitPush) or seen.label == call.source.label):
            self.looked = seen
            returned = events.Returned()
            self.feed(
                events.EngineReturned(at_ms=self.clock_ms, call_id=perform.call_id, result=returned, observation=seen)
            )
            return
        if seen != self.looked:
            self.looked = seen
            self.feed(events.EngineObserved(at_ms=self.clock_ms, observation=seen))
        self.world.at(delay_ms, self.read, perform, min(2 * delay_ms, 500))

    def collected(self, call_id: int) -> None:
        """A node without an engine has collected the traces on its disk."""
        if self.alive:
            returned = events.Returned(traces=(Trace("global_step_1/replica_0/rank1.json", 1, "sha256"),))
            self.feed(
                events.EngineReturned(at_ms=self.clock_ms, call_id=call_id, result=returned, observation=NO_TOKENIZER)
            )

    def returned(self, attempt: Attempt) -> None:
        engine = self.slot.engine
        if not self.alive or engine is None or attempt.returned or self.waits_for_disk(self.returned, attempt):
            return
        attempt.returned = True
        result = engine.end(attempt)
        gives_way = self.state.queue and (self.state.activity is None or self.state.activity.trigger is None)
        seen = self.looked = None if gives_way else engine.observe()
        self.world.called(self.slot)
        if seen is not None:
            engine.shown(seen, self.slot.double)
        self.feed(events.EngineReturned(at_ms=self.clock_ms, call_id=attempt.call_id, result=result, observation=seen))
        failed = isinstance(result, events.Fault) and self.world.weather.aim == "failing loads"
        if failed and self.world.rng.random() < 0.3:
            self.world.at(self.world.rng.choice((0, 50)), self.die)

    # --- the network --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Dial the address: whichever bus answers there is the bus."""
        if not self.alive or self.bus is not None:
            return
        bus = self.world.bus
        if bus is None or not bus.alive or self.world.blocked(self.slot, "up"):
            self.world.at(500, self.connect)
            return
        self.bus = bus
        self.silent.discard("control")
        self.answered_ms = self.world.now
        self.world.at(self.world.rng.choice((1, 20, 400)), self.subscribe, self.connection)
        if not self.welcomed:
            self.hello()

    def subscribe(self, connection: int) -> None:
        if self.alive and connection == self.connection and self.bus is not None:
            self.silent.discard("pub")
            self.published_ms = self.world.now
            self.sub = self.bus
            self.bus.greet(self)

    def cut(self) -> None:
        """Break both connections. What was in flight is lost, or the bus has it already and reads it late."""
        if self.alive:
            if self.world.rng.random() < 0.3:
                self.still_read.add(self.peer)
            self.connection = self.world.new_connection()
            self.bus = self.sub = None
            self.hears = False
            self.world.at(self.world.rng.choice((5, 200, 1500)), self.connect)

    def _use_new_key(self) -> None:
        """Dial anew with the key that its file has now; not in a sync, in which an agent that joins takes no part."""
        if not self.new_key or self.state.in_a_sync:
            return
        self.new_key, self.welcomed = False, False
        self.world.say(f"{self.peer} dials with its new key")
        self.world.promises.dials(self)
        self.cut()

    def fall_silent(self, connections: tuple[str, ...]) -> None:
        """Half-open connections: from now on they carry nothing, and neither side is told."""
        self.world.say(f"{self.peer}: nothing passes on {', '.join(connections)} any more")
        self.silent.update(connections)

    def watch_connections(self) -> None:
        """Dial anew the connection on which nothing comes, as `workers.link.connection` does."""
        now = self.world.now
        if self.bus is None:
            return
        if now - self.answered_ms > ASKED_EVERY * self.world.settings.heartbeat_ms + SILENT_MS:
            self.world.say(f"{self.peer} gets no answer and dials anew")
            self.world.abandoned.add(self.peer)
            self.welcomed = False
            self.cut()
        elif self.sub is not None and self._heads_stopped(now):
            self.world.say(f"{self.peer} hears no heads and subscribes anew")
            self.sub, self.published_ms = None, now
            self.world.at(self.world.rng.choice((1, 20, 400)), self.subscribe, self.connection)

    def _heads_stopped(self, now: int) -> bool:
        return now - self.published_ms > HEADS_MISSED_MS and self.answered_ms > now - HEADS_MISSED_MS

    def up(self, message: Upward, seq: int = 0, origin: int = 0) -> None:
        """Send to the bus: in order, unless the connection breaks."""
        bus = self.bus
        if bus is not None and "control" not in self.silent and not self.world.blocked(self.slot, "up"):
            self.world.in_order(self, "up", self._arrives, bus, self.peer, message, seq, origin)

    def _arrives(self, bus: Bus, peer: str, message: Upward, seq: int, origin: int) -> None:
        if (peer == self.peer or peer in self.still_read) and bus.alive and not self.world.blocked(self.slot, "up"):
            self.world.promises.judge("P10 closed", watcher.key(self, message))
            bus.receive(peer, message, seq, origin)

    def hello(self, again: bool = True) -> None:
        if not self.alive:
            return
        self.welcomed = False
        if again and self.world.rng.random() < self.world.weather.hasty:
            self.world.at(self.world.rng.choice((1, 20, 200)), self.hello, False)
        self.next_hello_ms = self.world.now + self.world.rng.randrange(500, 1500)
        place, journal, attempt = self.slot.identity, self.slot.name, self.hellos
        self.hellos += 1
        hello = Hello(identity=place, incarnation=self.incarnation, journal=journal, host="h", pid=1, attempt=attempt)
        self.up(replace(hello, rejoin=self.slot.rejoins))

    def join(self) -> None:
        self.next_join_ms = self.world.now + 1000
        self.up(Join())

    def beat(self) -> None:
        """At each heartbeat: send the status, repeat what was not answered, watch the lease."""
        if not self.alive:
            return
        self.world.at(self.world.settings.heartbeat_ms, self.beat)
        if self.world.now < self.disk_until_ms:
            return
        self.watch_connections()
        self._use_new_key()
        self.commit()
        now = self.world.now
        if not self.welcomed:
            if now >= self.next_hello_ms:
                self.hello()
        elif self.snapshot_due and self.hears and now >= self.next_join_ms:
            self.join()
        else:
            self.up(adapter_verdicts.beat(self, status_of(self.state, self.clock)), seq=self.state.seq)
            if self.asks is not None and not self.state.desired.draining:
                self.up(self.asks)
        if now - self.heard_ms > self.world.settings.lease_ms and not self.lease_over:
            self.lease_over = True
            self.world.say(f"{self.peer}: the lease has expired")
            self.feed(events.LeaseExpired(at_ms=self.clock_ms))
        if self.alive:
            self.world.promises.judge("P7 trainer first", verdicts.leased(self))

    def hear(self, epoch: int) -> None:
        """Renew the lease of an agent that has joined; until then the bus commands nothing here, however it answers.
        One that was replaced never does.
        """
        if not self.welcomed or self.snapshot_due or epoch < self.state.epoch:
            return
        self.heard_ms = self.world.now
        self.lease_over = False

    def on_published(self, epoch: int, origin: int, seq: int, envelope: Envelope | None) -> None:
        """A frame of the subscription; without an envelope it is a head."""
        if not self.alive or self.waits_for_disk(self.on_published, epoch, origin, seq, envelope):
            return
        self.hear(epoch)
        self.published_ms = self.commanded_ms = self.world.now
        if not self.hears:
            self.hears = True
            if self.welcomed and self.snapshot_due:
                self.join()
        if envelope is None:
            self.feed(events.HeadSeen(at_ms=self.clock_ms, epoch=epoch, seq=seq))
            return
        frames = [TOPIC_COMMAND, encode_header(epoch, origin, seq), encode(envelope)]
        if self._fits(frames):
            self.feed(read_publication(frames, envelope.run, self.clock_ms))

    def _fits(self, frames: list[bytes]) -> bool:
        """What is too large for a frame is not delivered, and the connection that it came over is cut."""
        fits = max(map(len, frames)) <= FRAME_BYTES_MAX
        if not fits:
            self.cut()
        return fits

    def on_control(self, epoch: int, seq: int, message: Downward) -> None:
        if not self.alive or self.waits_for_disk(self.on_control, epoch, seq, message):
            return
        self.answered_ms = self.world.now
        if isinstance(message, Snapshot | Replay) and epoch >= self.state.epoch:
            self.commanded_ms = self.world.now
        match message:
            case Welcome():
                self.welcomed = self.snapshot_due = True
                if self.hears:
                    self.join()
            case Snapshot():
                self.snapshot_due = False
                self.feed(events.SnapshotReceived(at_ms=self.clock_ms, epoch=epoch, seq=seq, desired=message.desired))
            case Replay():
                frames = [encode_header(epoch, 0, seq), encode(message)]
                if self._fits(frames):
                    head, page = read_control(frames)
                    assert isinstance(page, Page)
                    for event in read_replay(head, page, message.records[0].envelope.run, self.clock_ms):
                        self.world.promises.replayed(self, event)
                        self.feed(event)
            case Rejoin(give_up=True):
                self.give_up()
            case Rejoin():
                if self.welcomed:
                    self.hello()
            case _:
                pass
        self.hear(epoch)
