"""The loop of the bus: what happens each time that something wakes it. Decides nothing.

Theory of operation. Whatever wakes the bus (a message, a command from the trainer's thread, a timer) begins a turn. A
turn takes in all there is, makes events of it, lets the coordinator decide them one after the other, records the
decisions as one group, and then performs their effects in order. A peer that proves unreachable is another event of the
same turn. A turn runs to its end within a callback, the write to the log included: nothing comes between.

Rule 1  Recorded first. Nothing is sent, and no caller gets an answer, before the decisions that led to it are in the
        log. Decisions without effects are written with the next that have some, or a moment later.
Rule 2  A turn waits for no peer. What finds no room on its way to an agent is dropped: the agent asks again.
Rule 3  A bus that can't write stops deciding and sends agents nothing, not even heads, so that their leases end and no
        engine stays paused. Callers get BusFaulted; operators still get the status. So does a bus whose turn raised
        anything else: whatever the cause, no caller waits for a bus that is dead.
Rule 4  A log that only takes long is waited for, up to a lease, by when the agents have left the bus anyway. Meanwhile
        another thread (`watch`) ends tickets at their deadlines. A commit keeps the loop, so it takes that one's place
        at the sockets: operators get the status as of the turn before, and what agents send is kept for the turns to
        come. `_lock` belongs to the loop at all times but during a commit, and only its holder touches the sockets.
"""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, assert_never

import anyio
from msgspec.structs import replace

from controlplane.bus.callers import NOTHING_SENT, Callers
from controlplane.bus.inbox import Inbox, connection_of
from controlplane.bus.notices import note_event, note_report
from controlplane.bus.recent import Recent
from controlplane.bus.turn_clock import TurnClock
from controlplane.machine import events
from controlplane.machine.coordinator import CoordinatorState, decide, next_deadline
from controlplane.machine.coordinator_state import member_at
from controlplane.machine.fleet_view import FleetView
from controlplane.machine.status import fleet_status
from controlplane.record.log import RunLog
from schemas import wire
from schemas.config import BusConfig
from schemas.errors import BusError, BusFaulted, LogError, LogLocked, RolloutctlError
from schemas.listeners import Listeners
from schemas.logs import logger_of
from schemas.reports import FleetStatus
from schemas.transport.async_socket import AsyncZmqSocket, Sent
from schemas.transport.publisher_socket import PublisherSocket
from schemas.transport.timer import Timer
from schemas.wall_clock import wall_clock_ns

logger = logger_of("bus")

TURN_MAX: Final = 128
"""Messages received in one turn. More wait for the next, so that a flood delays nothing else for long."""
EVENTS_MAX: Final = 64
"""Events that the messages of one turn may give. Most cost far more than an answer; all answers of a turn are one."""
BYTES_MAX: Final = 256 * 1024
"""Bytes of messages in one turn, about. Of uploads, each as large as it may be, 128 took 40 ms."""
FLOOD_TURNS: Final = 40
"""Turns in a row that leave messages unread, full of one connection's messages, before that is cut off."""
HEARTBEATS_PER_S: Final = 250
"""Heartbeats of the whole fleet, about: each agent of a larger one sends fewer, but two within `agent_timeout_ms`."""
FLUSH_US: Final = 50_000
"""How long decisions without effects may stay in memory."""
FLUSH_RECORDS: Final = 128
"""And how many: to commit 900 uploads of a large fleet, and to acknowledge them, took 6 ms."""
STALLED_US: Final = 1_000_000
"""A head beacon that is later than this shows that the bus itself did not run."""
LOOK_S: Final = 0.05
"""How long a look at a loop that is held up waits for another one."""
KEPT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of messages that another thread reads and keeps for the loop."""
FLOODED: Final = "peers subscribe faster than the bus can take in"
_NIL: Final = b"\xc0"


class BusLoop:
    """What one life of a bus does each time that something wakes it. `Bus` owns what it works on.

    Attributes:
        closed: The bus takes no orders: it is not open yet, or closes.
        insecure: Programs on other machines can command this fleet; the status says so.
    """

    router: AsyncZmqSocket
    publisher: PublisherSocket
    inbox: Inbox

    def __init__(self, log: RunLog, config: BusConfig) -> None:
        self.state = log.state
        self.fault: BusFaulted | None = None
        self.closed = True
        self.callers = Callers(config.queue, self._reply)
        self.decisions: Listeners[[events.CoordinatorEvent, events.CoordinatorEffects]] = Listeners()
        self._pending_notifications: list[tuple[events.CoordinatorEvent, events.CoordinatorEffects]] = []
        self.insecure = False
        self._log, self._config = log, config
        self._admit: Callable[[], None] | None = None
        self._skew_us = 0
        self._arrived: deque[list[bytes]] = deque()
        self._unreachable: list[str] = []
        self._floods = defaultdict[bytes, float](float)  # by connection, while messages wait: turns that it filled
        self._recent = Recent()
        self._next_head_us = 0
        self._flush_us: int | None = None
        self._deadline: tuple[CoordinatorState, int | None] | None = None  # what the newest state asked for
        self._timer = Timer(self._on_time)
        self.clock = TurnClock(log.path, config, self.now_us, lambda: log.copy_behind)
        self._lock = threading.Lock()
        self._touched = False  # another thread has touched the sockets
        self._changed: anyio.Event | None = None  # while a state is waited for

    def prepare(self, inbox: Inbox, admit: Callable[[], None] | None) -> None:
        """Make ready for the first turn, in the loop of the bus.

        Args:
            inbox: What arrives.
            admit: Lets peers with good keys connect, from another thread. None for a bus without keys; with them, each
                message on the router begins with its sender's key.
        """
        # Under uvloop, the loop's clock has a resolution of one millisecond, which is too coarse for a latency.
        self._skew_us = int(anyio.current_time() * 1_000_000) - time.monotonic_ns() // 1000
        self.inbox, self._admit = inbox, admit
        self._lock.acquire()
        self._next_head_us = self.now_us()

    def now_us(self) -> int:
        """Return the moment on the bus's monotonic clock, which agrees with the event loop's."""
        return time.monotonic_ns() // 1000 + self._skew_us

    def silent_us(self, peer: str) -> int:
        """Return the time since the peer's last message; 0 if it is not connected. May be called from any thread."""
        now_us = self.now_us()
        return max(0, now_us - self.inbox.last_heard_us.get(peer, now_us))

    def watch(self) -> None:
        """End what must end in time, and answer operators, though the loop hangs (rule 4). Called by a thread."""
        if count := self.publisher.cut_off_floods():
            logger.warning("cut off %d connections: %s", count, FLOODED)
        if self.publisher.held_s * 1_000_000 > STALLED_US:  # that of a turn too: it is not the disk
            self.callers.expire(self.now_us(), BusFaulted(f"{FLOODED}, or this process leaves it no time to run"))
            return
        self.clock.watch(self.callers, self._fault)
        if self.clock.hold_up and self._lock.acquire(blocking=False):
            try:
                self._answer_elsewhere()
            finally:
                self._lock.release()

    def status(self) -> FleetStatus:
        now_us = self.now_us()
        fleet = fleet_status(
            self.state,
            now_us,
            str(self._log.path),
            self.inbox.last_heard_us,
            self._recent.latencies_us(),
            self.inbox.request_counts,
            wall_clock_ns(),
        )
        failures = self._recent.failures(now_us)
        return replace(
            fleet,
            failures=failures,
            insecure=self.insecure,
            hold_up=self.clock.explain(self.fault),
        )

    async def change(self) -> None:
        """Wait until the state may have changed, or the bus has ended."""
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    def fail_all(self, error: BusError) -> None:
        """End every ticket with an error."""
        self.closed = True
        self.callers.fail_all(error)
        self._wake_watchers()

    # --- what begins a turn -------------------------------------------------------------------------------------------

    async def read_router(self) -> None:
        """Begin a turn with each message."""
        await self.router.serve(self._on_message)

    async def keep_time(self) -> None:
        """Begin a turn whenever one is due."""
        self._timer.set(self._due_us() / 1_000_000)
        await self._timer.serve()

    def _on_message(self, frames: list[bytes]) -> None:
        self._arrived.append(frames)
        self.begin()

    def _on_time(self) -> None:
        if self.now_us() >= (due_us := self._due_us()):
            self.begin()
        else:
            self._timer.set(due_us / 1_000_000)

    def _due_us(self) -> int:
        """When the next turn is due, whatever arrives. A bus that has stopped has no deadlines."""
        if self._arrived or (self.callers.has_orders and self.fault is None):
            return 0
        due_us = self._next_head_us
        if self._flush_us is not None:
            due_us = min(due_us, self._flush_us)
        deadline_us = self._next_deadline() if self.fault is None else None
        return due_us if deadline_us is None else min(due_us, deadline_us)

    def _next_deadline(self) -> int | None:
        """When the coordinator wants to be called."""
        if self._deadline is None or self._deadline[0] is not self.state:
            self._deadline = self.state, next_deadline(self.state)
        return self._deadline[1]

    # --- a turn -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take a turn, to its end."""
        self._take(self._turn)

    def run(self, batch: list[events.CoordinatorEvent]) -> None:
        """Take a turn with these events alone, to its end."""
        self._take(partial(self._process, batch, self.now_us(), wall_clock_ns()))

    def _take(self, turn: Callable[[], None]) -> None:
        self.clock.begin()
        try:
            turn()
        except Exception as error:
            self.stop(error)
        self.clock.end()
        self._timer.set(self._due_us() / 1_000_000)

    def _turn(self) -> None:
        at_us, at_ns = self.now_us(), wall_clock_ns()
        if self.fault is not None:
            self._next_head_us = at_us + self._config.head_interval_ms * 1000
            self._fall_silent()
            self._receive(at_us, at_ns)
            self.inbox.take_events()
            return
        drained = self._receive(at_us, at_ns)
        if self.inbox.time_replies:
            self._send_time_replies()
        if at_us >= self._next_head_us:
            self._beat(at_us, drained)
        batch = self.inbox.take_events()
        batch += self.callers.take_orders(len(self.inbox.last_heard_us))
        if (deadline_us := self._next_deadline()) is not None and at_us >= deadline_us:
            batch.append(events.TimerFired())  # last, so that what arrived in time counts
        if not (batch or self._log.pending or self._unreachable or self.inbox.acks):
            return
        self._process(batch, at_us, at_ns)

    def _receive(self, at_us: int, at_ns: int) -> bool:
        """Pass what has arrived to the inbox, and answer operators. Returns whether that was all."""
        self.inbox.begin_turn(at_us, at_ns, self.state)
        arrived, room = self._arrived, TURN_MAX - len(self._arrived)
        messages = self.router.recv_many(room) if room > 0 else []
        arrived.extend(messages)
        receive, decidable, nbytes = self.inbox.receive, self.inbox.events, 0
        while arrived and len(decidable) < EVENTS_MAX and nbytes < BYTES_MAX:
            frames = arrived.popleft()
            nbytes += len(frames[-1])
            receive(frames)
        drained = len(messages) < room
        if drained:
            self._floods.clear()
        elif messages:
            self._note_backlog(messages)
        if self.inbox.requests or self.inbox.replies:
            self._handle_requests()
        return drained and not arrived

    def _note_backlog(self, messages: list[list[bytes]]) -> None:
        """While messages wait, add up each connection's share of the turns, and cut off who floods the bus."""
        place = 0 if self._admit is None else 1
        for connection, count in Counter(frames[place] for frames in messages).items():
            self._floods[connection] += count / TURN_MAX
        newest = messages[-1][place]
        if self._floods[newest] >= FLOOD_TURNS:
            logger.warning("cut off a connection that sends faster than the bus can read")
            self._floods[newest] = 0.0
            self.router.cut_off_sender()

    def _beat(self, at_us: int, drained: bool) -> None:
        """Send the head beacon, and look for agents that fell silent."""
        late_us = at_us - self._next_head_us
        if late_us > STALLED_US:
            self.inbox.discount(late_us)
        self._log.check_copy()
        self.publisher.send_nowait([wire.TOPIC_HEAD, wire.encode_header(self.state.epoch, 0, self.state.seq), _NIL])
        self._next_head_us = at_us + self._config.head_interval_ms * 1000
        # Where messages are left, a sign of life may lie unread.
        if drained and not self.inbox.drop_silent(at_us - self._config.agent_timeout_ms * 1000):
            self._next_head_us = at_us  # the rest in the next turn, at once

    def _process(self, batch: list[events.CoordinatorEvent], at_us: int, at_ns: int) -> None:
        """Decide, record and perform; and again for peers that prove unreachable by that."""
        while True:
            state, effects = self._decide([replace(event, at_us=at_us, at_ns=at_ns) for event in batch], at_ns)
            if effects and not self._commit():
                return
            changed, self.state = state is not self.state, state
            for effect in effects:
                self._perform(effect)
            if changed:
                self._wake_watchers()
            self._tell_listeners()
            # The goodbye of a peer that is gone may lie on the socket, and tells more than its absence.
            if not self._unreachable or not self._receive(at_us, at_ns):
                break
            batch = self.inbox.take_events()
            batch += [events.PeerLost(peer=peer, reason="unreachable") for peer in self._unreachable]
            self._unreachable.clear()
        if self._flush_due(at_us) and not self._commit():
            return
        if self._log.settled:  # so what the acks are for is written
            self._send_acks()

    def _decide(
        self, batch: list[events.CoordinatorEvent], at_ns: int
    ) -> tuple[CoordinatorState, list[events.CoordinatorEffect]]:
        state = self.state
        effects: list[events.CoordinatorEffect] = []
        for event in batch:
            before = state
            state, decided = decide(state, event)
            if decided or state is not before:
                self._log.append(event, decided, at_ns, state if event is batch[-1] else None)
                note_event(event, before, state)
                effects.extend(decided)
                if self.decisions:
                    self._pending_notifications.append((event, decided))
        return state, effects

    def _tell_listeners(self) -> None:
        for event, effects in self._pending_notifications:
            self.decisions.notify(event, effects)
        self._pending_notifications.clear()

    def _flush_due(self, at_us: int) -> bool:
        if self._log.pending and (self._flush_us is None or self.closed):  # the closing of a log waits for no lock
            self._flush_us = at_us + (0 if self.closed else FLUSH_US)
        return self._log.pending >= FLUSH_RECORDS or (self._flush_us is not None and at_us >= self._flush_us)

    def _commit(self) -> bool:
        """Write the group. Returns False if that fails, and then the bus has stopped (rule 3)."""
        self._flush_us = None
        try:
            with self._lent():
                self._write_group()
        except LogError as error:
            self.stop(error)
        return self.fault is None  # `watch` may have found that it took too long

    def _write_group(self) -> None:
        """Commit, again and again while another program keeps the file locked (rule 4)."""
        while True:
            try:
                return self._log.commit()
            except LogLocked:
                if self.fault is not None or self.clock.too_long:
                    raise

    def stop(self, error: Exception) -> None:
        """End this life of the bus for good, for an error that nothing else has dealt with (rule 3)."""
        fault = self._fault(error)
        self._flush_us = None
        self._fall_silent()
        self.fail_all(fault)

    def _fault(self, error: Exception) -> BusFaulted:
        """Note and return why the bus has stopped; the first reason counts. May be called from any thread."""
        if self.fault is not None:
            return self.fault
        what = str(error)
        if not isinstance(error, RolloutctlError):
            what = f"{type(error).__name__}: {error}. This is a fault of rolloutctl; its log has the traceback"
        fault = BusFaulted(f"the bus of run {self._log.run} has stopped publishing: {what}")
        fault.__cause__ = error
        self.fault = fault
        logger.error("%s", fault, exc_info=None if isinstance(error, RolloutctlError) else error)
        return fault

    def _fall_silent(self) -> None:
        """Nothing that agents hear may renew their leases, nor anything that they say fill the memory."""
        self.inbox.operators_only = True
        self.inbox.acks.clear()
        self.publisher.set_welcome(b"")

    # --- effects ------------------------------------------------------------------------------------------------------

    def _perform(self, effect: events.CoordinatorEffect) -> None:
        match effect:
            case events.Publish(epoch=epoch, seq=seq):
                self.publisher.send_nowait(
                    [wire.TOPIC_COMMAND, wire.encode_header(epoch, epoch, seq), wire.encode(effect.envelope)]
                )
                self.publisher.set_welcome(wire.TOPIC_HEAD + wire.encode_header(epoch, 0, seq))
            case events.Send():
                self._send(effect.peer, effect.epoch, effect.seq, effect.message)
            case events.Ping():
                self._ping(effect.peer)
            case events.Conclude():
                if effect.ticket is not None:
                    self.callers.resolve(effect.ticket, effect.report)
                self._recent.note(effect.report, self.now_us())
                note_report(effect.report)
            case events.Refuse():
                self.callers.refuse(effect)
            case events.Retired(ticket=ticket):
                if ticket is not None:
                    self.callers.resolve(ticket, self.status())
            case _:
                assert_never(effect)

    def _send(self, peer: str, epoch: int, seq: int, message: wire.Downward) -> None:
        """Send what was decided. A peer that is gone is lost."""
        sent = self._answer(peer, epoch, seq, message)
        if sent is Sent.GONE and member_at(self.state, peer) is not None and peer not in self._unreachable:
            self._unreachable.append(peer)

    def _answer(self, peer: str, epoch: int, seq: int, message: wire.Downward) -> Sent:
        """Answer a message. If its connection broke meanwhile, the peer may have a new one already."""
        return self.router.send_nowait([connection_of(peer), wire.encode_header(epoch, 0, seq), wire.encode(message)])

    def _ping(self, peer: str) -> None:
        """Send an ack that acknowledges nothing: the socket tells whether the peer is reachable."""
        name = member_at(self.state, peer)
        if name is not None:
            journal = self.state.members[name].hello.journal
            self._send(peer, self.state.epoch, self.state.seq, wire.Ack(journal=journal, through=0))

    def _send_acks(self) -> None:
        for peer, ack in self.inbox.acks:
            self._answer(peer, self.state.epoch, self.state.seq, ack)
        self.inbox.acks.clear()

    def _send_time_replies(self) -> None:
        """First of all: anything else that the turn does would lengthen the round trip."""
        heartbeat_ms = heartbeat_of(self._config, len(self.inbox.last_heard_us))
        for peer, reply in self.inbox.time_replies:
            reply = replace(reply, replied_ns=wall_clock_ns(), heartbeat_ms=heartbeat_ms)
            self._answer(peer, self.state.epoch, self.state.seq, reply)
        self.inbox.time_replies.clear()

    # --- while a commit keeps the loop --------------------------------------------------------------------------------

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Let another thread have the sockets during the block."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            if self._touched:
                self._touched = False
                self.router.recheck()

    def _answer_elsewhere(self) -> None:
        """Answer operators in place of the loop, in another thread."""
        self._touched, arrived = True, self._arrived
        if self._admit is not None:
            self._admit()
        kept = [frames for frames in arrived if not self._is_answered(frames)]
        arrived.clear()
        arrived.extend(kept)
        self.callers.expire(self.clock.expired_us, BusFaulted(self.clock.hold_up), self._reply_elsewhere)
        nbytes = sum(len(frames[-1]) for frames in kept)
        while nbytes < KEPT_BYTES_MAX and (frames := self.router.take_elsewhere()) is not None:
            if not self._is_answered(frames):
                arrived.append(frames)
                nbytes += len(frames[-1])

    def status_if_held_up(self) -> FleetStatus | None:
        """Return the fleet as of the last turn while a commit keeps the loop; else None. In any thread."""
        if not self.clock.hold_up or not self._lock.acquire(timeout=LOOK_S):
            return None
        try:
            return self.status()
        finally:
            self._lock.release()

    def _is_answered(self, frames: list[bytes]) -> bool:
        if (asked := self.inbox.operator_request(frames)) is None:
            return False
        connection, request, is_observer = asked
        if isinstance(request, wire.StatusRequest):
            self._reply_elsewhere(connection, replace(self.status(), read_only=is_observer))
        else:
            refused = wire.RequestRejected(reason=f"{self.clock.hold_up}. {NOTHING_SENT}")
            self._reply_elsewhere(connection, refused)
        return True

    def _reply_elsewhere(self, connection: bytes, reply: wire.Reply) -> None:
        for body in wire.encode_reply(reply):
            self.router.send_elsewhere(self._framed(connection, body))

    # --- operators ----------------------------------------------------------------------------------------------------

    def _handle_requests(self) -> None:
        requests, replies = self.inbox.take_requests()
        fleet: FleetStatus | None = None  # one for all that ask in this turn
        for connection, request, is_observer in requests:
            if isinstance(request, wire.StatusRequest):
                fleet = fleet or self.status()
                self._reply(connection, replace(fleet, read_only=is_observer))
            elif isinstance(request, wire.PeerRequest):
                self._reply(connection, FleetView(self.state).peer_of(request.replica))
            elif (
                reason := self.fault
                and f"{self.fault}. {NOTHING_SENT}"
                or self.callers.add_operator(self.now_us(), connection, request)
            ):
                self._reply(connection, wire.RequestRejected(reason=reason))
        for connection, reply in replies.items():
            self._reply(connection, reply)

    def _reply(self, connection: bytes, reply: wire.Reply | wire.Rejoin) -> None:
        for body in wire.encode_reply(reply):
            self.router.send_nowait(self._framed(connection, body))

    def _framed(self, connection: bytes, body: bytes) -> list[bytes]:
        return [connection, wire.encode_header(self.state.epoch, 0, self.state.seq), body]

    def _wake_watchers(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


def heartbeat_of(config: BusConfig, agents: int) -> int | None:
    """Return the interval of heartbeats in a fleet of this size, in ms; None for the configured one."""
    interval_ms = min(agents * 1000 // HEARTBEATS_PER_S, config.agent_timeout_ms // 2)
    return interval_ms if interval_ms > config.heartbeat_ms else None
