"""The trainer's end of the bus: a shell around `controlplane.machine.coordinator`. Owns the sockets, the log, the clock
and the callers' tickets; decides nothing.

Theory of operation. Whatever wakes the bus (a message, a command handed over by the trainer's thread, a moment that was
waited for) begins a turn. A turn takes all there is, makes events of it, lets the coordinator decide them one after the
other, writes the decisions down as one group, and then performs their effects in order. A peer that turns out to be
unreachable is another event of the same turn.

Rule 1  Written down first. Nothing is sent, and no caller is told, before the decisions that led to it are in the log.
        Decisions without effects are written with the next that have some, or a moment later.
Rule 2  A turn waits for nobody. What finds no room on its way to an agent is dropped: the agent asks again.
Rule 3  A bus that can't write decides no more and speaks to no agent any more, not even by heads, so that the agents'
        leases end and no engine stays paused. Callers get BusFaulted; status is still told.
Rule 4  Every ticket ends: concluded, refused, or failed when the bus closes, however it ends.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final, Self, assert_never

import anyio
import zmq
from anyio import CancelScope, to_thread
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from controlplane.bus.inbox import Inbox
from controlplane.machine.coordinator import LOGIC, CoordinatorState, decide, next_deadline
from controlplane.machine.events import (
    Closed,
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    CoordinatorSettings,
    Issued,
    Opened,
    PeerLost,
    Ping,
    Publish,
    Refuse,
    Send,
    SyncRequested,
    TimerFired,
)
from controlplane.machine.fleet import member_at
from controlplane.machine.status import fleet_status
from controlplane.record.log import RunLog
from controlplane.tickets import Ticket
from schemas.carriers.sockets import Context, Sent, bus_publisher, bus_router
from schemas.carriers.wakeup import Wakeup
from schemas.commands import Command, EngineCommand, Manifest, ProfileCommand, Source, Target
from schemas.config import BusConfig
from schemas.errors import (
    AddressInUse,
    BusClosed,
    BusFaulted,
    BusOverloaded,
    CommandError,
    LogError,
    SyncInProgress,
)
from schemas.identity import InFlight
from schemas.reports import FleetStatus, Report, SyncReport
from schemas.wire import (
    DECODE_ERRORS,
    MAX_BYTES,
    TOPIC_COMMAND,
    TOPIC_HEAD,
    Ack,
    Downward,
    Reply,
    RequestRejected,
    StatusRequest,
    Submit,
    TimeReply,
    encode,
    encode_header,
)

logger = logging.getLogger("rolloutctl.bus")

TURN_MAX: Final = 256
"""Messages taken in one turn: more wait for the next, so that a flood holds up nothing else for long."""
FLUSH_US: Final = 50_000
"""How long decisions without effects may stay in memory."""
ASLEEP_US: Final = 1_000_000
"""A head that is later than this shows that the bus itself did not run."""
BIND_PATIENCE_S: Final = 0.5
"""How long an address may still be held by a bus of this process that was just closed."""
OPERATORS_MAX: Final = 64
"""Commands of operators that may be open at once."""

_NIL: Final = b"\xc0"
_order_decoder = Decoder(Issued | SyncRequested)
BY_HAND: Final = (ProfileCommand, EngineCommand)
NOT_BY_HAND: Final = (
    "only a profile command or an engine command can be published by itself: a weight sync is several commands in a "
    "row, so ask for the sync; an epoch begins when a bus is opened"
)

_REFUSALS: Final = {"command": CommandError, "sync_in_progress": SyncInProgress, "closed": BusClosed}


class Bus:
    """One life of the bus on one run's log. `async with Bus(...) as bus:`, under asyncio or trio.

    address: where agents and operators find it; `tcp://127.0.0.1:0` lets the system choose a port, see `.address`.
    log: open, and closed by the bus.   insecure: bind an address that other machines reach, without keys.
    context: for `inproc://` addresses, which exist within one context only; else the process's own.

    `publish` and `sync` may be called from any thread, everything else in the loop of the bus.
    Entering raises AddressInUse, BusAddressError and LogError.
    """

    def __init__(
        self,
        address: str,
        log: RunLog,
        config: BusConfig | None = None,
        *,
        insecure: bool = False,
        context: Context | None = None,
    ) -> None:
        self.address = address
        self.state = log.state
        self.fault: BusFaulted | None = None
        self._log, self._config, self._insecure = log, config or BusConfig(), insecure
        self._context = context or zmq.Context.instance()
        self._inbox = Inbox(log)
        self._skew_us = 0
        self._effects: list[CoordinatorEffect] = []
        self._lost: list[str] = []
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Ticket[Any] | str] = {}  # by number; of an operator's command, the operator
        self._orders: deque[Issued | SyncRequested] = deque()
        self._closed = True
        self._next_head_us = 0
        self._flush_us: int | None = None
        self._planned_us = 0
        self._open = AsyncExitStack()

    @property
    def malformed(self) -> int:
        """Messages that could not be read, of all peers."""
        return self._inbox.malformed

    @property
    def safety_polls(self) -> int:
        """Messages that waited because a socket did not signal them. Must stay 0."""
        return self._router.safety_polls + self._publisher.safety_polls

    # --- for callers --------------------------------------------------------------------------------------------------

    def publish(self, command: Command, target: Target, timeout_ms: int) -> Ticket[Report]:
        """Hand a command over. Waits for nothing; from any thread.

        Raises CommandError for what is no command, BusOverloaded, BusFaulted, BusClosed.
        """
        ticket: Ticket[Report] = Ticket(next(self._numbers))
        order = Issued(at_us=0, at_ns=0, ticket=ticket.number, command=command, target=target, timeout_ms=timeout_ms)
        self._hand_over(ticket, order)
        return ticket

    def sync(
        self,
        version: int,
        source: Source,
        manifest: Manifest | None,
        *,
        in_flight: InFlight,
        quorum: int | None,
        target: Target,
        timeout_ms: int,
    ) -> Ticket[SyncReport]:
        """Hand over a weight sync. timeout_ms: of each phase. Otherwise as `publish`."""
        ticket: Ticket[SyncReport] = Ticket(next(self._numbers))
        order = SyncRequested(
            at_us=0,
            at_ns=0,
            ticket=ticket.number,
            version=version,
            source=source,
            manifest=manifest,
            in_flight=in_flight,
            quorum=quorum,
            target=target,
            timeout_ms=timeout_ms,
        )
        self._hand_over(ticket, order)
        return ticket

    def status(self) -> FleetStatus:
        """The fleet at this moment."""
        return fleet_status(self.state, self._now_us(), str(self._log.path), self._inbox.heard)

    async def wait_until(self, holds: Callable[[CoordinatorState], bool]) -> CoordinatorState:
        """Return the first state, from now on, for which `holds` is true. Raises BusFaulted, BusClosed."""
        while not holds(self.state):
            self._check()
            await self._changed.wait()
        return self.state

    def _hand_over(self, ticket: Ticket[Any], order: Issued | SyncRequested) -> None:
        # What is built in Python is not checked when it is built, and a log with such a command in it could not be read
        # any more. Here it costs the caller a few microseconds and gets the right traceback. What goes on is what was
        # read back: a list that stands for a set is a set then, and nobody else can change it.
        if isinstance(order, Issued) and not isinstance(order.command, BY_HAND):
            raise CommandError(f"{type(order.command).__name__}: {NOT_BY_HAND}. Nothing was sent")
        try:
            order = _order_decoder.decode(encode(order))
        except (*DECODE_ERRORS, TypeError) as error:
            raise CommandError(f"not a command that can be published: {error}. Nothing was sent") from None
        self._check()
        if len(self._waiting) >= self._config.queue:
            raise BusOverloaded(
                f"{self._config.queue} commands are handed over and not concluded (`queue` in BusConfig): wait for "
                "their tickets before publishing more. Nothing was sent"
            )
        self._waiting[ticket.number] = ticket
        self._orders.append(order)
        self._wakeup.notify()
        if self._closed or self.fault is not None:  # meanwhile, and perhaps after everyone who waits was told
            self._waiting.pop(ticket.number, None)
            ticket.fail(self.fault or _closed(self.address))

    def _now_us(self) -> int:
        """The bus's monotonic clock: it shows what the event loop's shows."""
        return time.monotonic_ns() // 1000 + self._skew_us

    def _check(self) -> None:
        if self.fault is not None:
            raise BusFaulted(*self.fault.args)
        if self._closed:
            raise _closed(self.address)

    # --- one life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        # The loop's clock has the resolution of a millisecond under uvloop, which is long for a latency.
        self._skew_us = int(anyio.current_time() * 1_000_000) - time.monotonic_ns() // 1000
        self._turning = anyio.Lock(fast_acquire=True)
        self._changed, self._sooner = anyio.Event(), anyio.Event()
        self._wakeup = Wakeup()
        async with AsyncExitStack() as stack:
            stack.callback(self._wakeup.close)
            stack.push_async_callback(self._close_log)
            await self._bind(stack)
            stack.callback(self._fail_all)
            await self._begin()
            tasks = await stack.enter_async_context(anyio.create_task_group())
            self._closed = False
            stack.push_async_callback(self._end)
            stack.callback(tasks.cancel_scope.cancel)
            stack.push_async_callback(self._hear_out)
            for task in (self._read_router, self._read_subscriptions, self._read_orders, self._keep_time):
                tasks.start_soon(task)
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, anyio.get_cancelled_exc_class()):
            return bool(await self._open.__aexit__(kind, error, trace))
        await self._open.aclose()  # an error of the caller's is not wrapped into a group
        return False

    async def _bind(self, stack: AsyncExitStack) -> None:
        patience = anyio.current_time() + BIND_PATIENCE_S
        while True:
            try:
                self._router = bus_router(self._context, self.address, insecure=self._insecure)
                break
            except AddressInUse:
                if anyio.current_time() > patience:
                    raise
                await anyio.sleep(BIND_PATIENCE_S / 10)
        stack.callback(self._router.close)
        self.address = self._router.address
        if self.address.startswith("tcp://"):
            beside = f"{self.address.rpartition(':')[0]}:0"
        else:
            beside = f"{self.address}-publish"
        self._publisher = bus_publisher(self._context, beside, insecure=self._insecure)
        stack.callback(self._publisher.close)

    async def _begin(self) -> None:
        """The first decision of this life."""
        config = self._config
        port = self._publisher.address.rpartition(":")[2]
        settings = CoordinatorSettings(
            heartbeat_ms=config.heartbeat_ms,
            agent_timeout_ms=config.agent_timeout_ms,
            lease_ms=config.lease_ms,
            history=config.history,
            retransmit_ms=config.retransmit_ms,
            publish_port=int(port) if self.address.startswith("tcp://") else None,
        )
        at_us, at_ns = self._now_us(), time.time_ns()
        opened = Opened(at_us=at_us, at_ns=at_ns, run=self._log.run, settings=settings, logic=LOGIC)
        self._next_head_us = at_us
        await self._work([opened], at_us, at_ns)
        if self.fault is not None:  # there is no bus that could not write its first decision
            raise self.fault
        logger.info("bus of run %s, epoch %d, at %s", self._log.run, self.state.epoch, self.address)

    async def _hear_out(self) -> None:
        """Agents tell of a decision a part of a heartbeat after they made it: the last belong into the log, too."""
        self._closed = True
        if self.fault is None and any(member.state == "live" for member in self.state.members.values()):
            await anyio.sleep(self._config.heartbeat_ms * 3 / 8000)

    async def _end(self) -> None:
        """The last decision. Runs when the tasks have ended; what is still queued leaves within the linger time."""
        with CancelScope(shield=True):
            self._closed = True
            if self.fault is None:
                at_us, at_ns = self._now_us(), time.time_ns()
                orders = self._take_orders(at_us, at_ns)
                await self._work([*orders, Closed(at_us=at_us, at_ns=at_ns)], at_us, at_ns)

    def _fail_all(self) -> None:
        self._closed = True
        error = self.fault or _closed(self.address)
        while self._waiting:
            _, waiter = self._waiting.popitem()
            if isinstance(waiter, Ticket):
                waiter.fail(error)
            else:
                self._reply(waiter, RequestRejected(reason=str(error)))
        self._wake_watchers()

    async def _close_log(self) -> None:
        try:
            self._log.close()
        except LogError as error:
            if self.fault is None:
                raise BusFaulted(f"the last decisions of the bus could not be recorded: {error}") from error

    # --- what begins a turn -------------------------------------------------------------------------------------------

    async def _read_router(self) -> None:
        while True:
            await self._turn(await self._router.recv())

    async def _read_subscriptions(self) -> None:
        """Nobody is welcomed on a publisher that does not read who subscribes."""
        while True:
            await self._publisher.recv()

    async def _read_orders(self) -> None:
        while True:
            await self._wakeup.wait()
            await self._turn()

    async def _keep_time(self) -> None:
        while True:
            self._sooner = anyio.Event()
            self._planned_us = self._due_us()
            with CancelScope(deadline=self._planned_us / 1_000_000):
                await self._sooner.wait()
                continue
            await self._turn()

    def _due_us(self) -> int:
        deadline_us = next_deadline(self.state)
        moments = (self._next_head_us, deadline_us, self._flush_us)
        return min(moment for moment in moments if moment is not None)

    # --- a turn -------------------------------------------------------------------------------------------------------

    async def _turn(self, arrived: list[bytes] | None = None) -> None:
        async with self._turning:
            at_us, at_ns = self._now_us(), time.time_ns()
            drained = self._read(arrived, at_us, at_ns)
            self._hear_operators()
            if self.fault is not None:
                self._next_head_us = at_us + self._config.head_interval_ms * 1000
                return
            self._tell_time()
            self._keep_alive(at_us, drained)
            events = self._inbox.collect(at_us)
            events += self._take_orders(at_us, at_ns)
            if (deadline_us := next_deadline(self.state)) is not None and at_us >= deadline_us:
                events.append(TimerFired(at_us=at_us))  # last, so that what arrived in time counts
            await self._work(events, at_us, at_ns)

    def _read(self, arrived: list[bytes] | None, at_us: int, at_ns: int) -> bool:
        """Take what lies on the socket. Returns whether that was all."""
        take, more, state = self._inbox.take, self._router.recv_nowait, self.state
        if arrived is not None:
            take(arrived, at_us, at_ns, state)
        for _ in range(TURN_MAX):
            frames = more()
            if frames is None:
                return True
            take(frames, at_us, at_ns, state)
        return False

    def _take_orders(self, at_us: int, at_ns: int) -> list[CoordinatorEvent]:
        orders: list[CoordinatorEvent] = []
        while self._orders:
            orders.append(replace(self._orders.popleft(), at_us=at_us, at_ns=at_ns))
        return orders

    def _keep_alive(self, at_us: int, drained: bool) -> None:
        """Once per beacon: tell agents where the head is, and look for agents that fell silent."""
        late_us = at_us - self._next_head_us
        if late_us < 0:
            return
        if late_us > ASLEEP_US:
            self._inbox.forgive(late_us, at_us)
        self._beacon()
        self._next_head_us = at_us + self._config.head_interval_ms * 1000
        if drained:  # else what lies unread may be the sign of life
            self._inbox.silent(at_us - self._config.agent_timeout_ms * 1000, at_us, self.state)

    async def _work(self, events: list[CoordinatorEvent], at_us: int, at_ns: int) -> None:
        """Decide, write down, perform; and again for what came to light by that."""
        while True:
            state, effects = self.state, self._effects
            for event in events:
                before = state
                state, decided = decide(state, event)
                if decided or state is not before:
                    self._log.note(event, decided, at_ns)
                    effects.extend(decided)
            if (effects or self._inbox.kept) and not await self._commit():
                return
            changed, self.state = state is not self.state, state
            for effect in effects:
                self._perform(effect)
            effects.clear()
            self._tell_kept()
            if changed:
                self._wake_watchers()
            if not self._lost:
                break
            events = [PeerLost(at_us=at_us, peer=peer, reason="unreachable") for peer in self._lost]
            self._lost.clear()
        if self._log.pending and self._flush_us is None:
            self._flush_us = at_us + FLUSH_US
        elif self._flush_us is not None and at_us >= self._flush_us:
            await self._commit()
        if self._due_us() < self._planned_us:
            self._sooner.set()

    async def _commit(self) -> bool:
        """Write the group. If that can't be had, the bus is at its end (rule 3)."""
        try:
            if self._config.durability == "disk":
                with CancelScope(shield=True):
                    await to_thread.run_sync(self._log.commit)
            else:
                self._log.commit()
        except LogError as error:
            self.fault = BusFaulted(f"the bus of run {self._log.run} publishes nothing any more: {error}")
            logger.error("%s", self.fault)
            self._inbox.deaf = True
            self._inbox.kept.clear()
            self._effects.clear()
            self._orders.clear()
            self._flush_us = None
            self._fail_all()
            return False
        self._flush_us = None
        return True

    # --- effects ------------------------------------------------------------------------------------------------------

    def _perform(self, effect: CoordinatorEffect) -> None:
        match effect:
            case Publish(epoch=epoch, seq=seq):
                self._publisher.send_nowait([TOPIC_COMMAND, encode_header(epoch, epoch, seq), encode(effect.envelope)])
                self._publisher.set_welcome(TOPIC_HEAD + encode_header(epoch, 0, seq))
            case Send():
                self._send(effect.peer, effect.epoch, effect.seq, effect.message)
            case Ping():
                self._probe(effect.peer)
            case Conclude():
                self._conclude(effect)
            case Refuse():
                self._refuse(effect)
            case _:
                assert_never(effect)

    def _send(self, peer: str, epoch: int, seq: int, message: Downward) -> None:
        sent = self._router.send_nowait([peer.encode(), encode_header(epoch, 0, seq), encode(message)])
        if sent is Sent.GONE and member_at(self.state, peer) is not None and peer not in self._lost:
            self._lost.append(peer)

    def _probe(self, peer: str) -> None:
        """Send what the agent takes for old news: the socket says whether there is a way to it."""
        name = member_at(self.state, peer)
        if name is not None:
            journal = self.state.members[name].hello.journal
            self._send(peer, self.state.epoch, self.state.seq, Ack(journal=journal, through=0))

    def _tell_kept(self) -> None:
        for peer, kept in self._inbox.kept:
            self._send(peer, self.state.epoch, self.state.seq, kept)
        self._inbox.kept.clear()

    def _tell_time(self) -> None:
        """At once: what a turn writes and sends would only add to the way back."""
        for peer, sent_ns, received_ns in self._inbox.times:
            told = TimeReply(sent_ns=sent_ns, received_ns=received_ns, replied_ns=time.time_ns())
            self._send(peer, self.state.epoch, self.state.seq, told)
        self._inbox.times.clear()

    def _beacon(self) -> None:
        self._publisher.send_nowait([TOPIC_HEAD, encode_header(self.state.epoch, 0, self.state.seq), _NIL])

    def _conclude(self, effect: Conclude) -> None:
        waiter = self._waiting.pop(effect.ticket, None) if effect.ticket is not None else None
        if isinstance(waiter, Ticket):
            waiter.resolve(effect.report)
        elif waiter is not None and isinstance(effect.report, Report):
            self._reply(waiter, effect.report)

    def _refuse(self, effect: Refuse) -> None:
        waiter = self._waiting.pop(effect.ticket, None)
        if isinstance(waiter, Ticket):
            waiter.fail(_REFUSALS[effect.kind](effect.reason))
        elif waiter is not None:
            self._reply(waiter, RequestRejected(reason=effect.reason))

    # --- operators ----------------------------------------------------------------------------------------------------

    def _hear_operators(self) -> None:
        for peer, asked in self._inbox.asked:
            if isinstance(asked, StatusRequest):
                self._reply(peer, self.status())
            elif (why := self._unwilling(asked)) is not None:
                self._reply(peer, RequestRejected(reason=why))
            else:
                number = next(self._numbers)
                self._waiting[number] = peer
                self._orders.append(
                    Issued(
                        at_us=0,
                        at_ns=0,
                        ticket=number,
                        command=asked.command,
                        target=asked.target,
                        timeout_ms=asked.timeout_ms,
                    )
                )
        self._inbox.asked.clear()

    def _unwilling(self, asked: Submit) -> str | None:
        if self.fault is not None:
            return str(self.fault)
        if not isinstance(asked.command, BY_HAND):
            return NOT_BY_HAND
        if sum(not isinstance(waiter, Ticket) for waiter in tuple(self._waiting.values())) >= OPERATORS_MAX:
            return f"{OPERATORS_MAX} commands of operators are open already: wait for one of them to end"
        return None

    def _reply(self, peer: str, reply: Reply) -> None:
        body = encode(reply)
        if len(body) > MAX_BYTES - 1024:
            body = encode(
                RequestRejected(reason=f"the answer takes {len(body)} bytes, a message has at most {MAX_BYTES}")
            )
        self._router.send_nowait([peer.encode(), encode_header(self.state.epoch, 0, self.state.seq), body])

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _closed(address: str) -> BusClosed:
    return BusClosed(f"the bus at {address} is not open; nothing was sent")
