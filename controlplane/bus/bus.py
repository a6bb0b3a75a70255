"""The trainer's end of the bus: a shell around `controlplane.machine.coordinator`. It owns the sockets, the log, the
clock and the callers' tickets, and decides nothing.

Theory of operation. Whatever wakes the bus (a message, a command from the trainer's thread, a timer) begins a turn. A
turn takes in all there is, makes events of it, lets the coordinator decide them one after the other, records the
decisions as one group, and then performs their effects in order. A peer that proves unreachable is another event of the
same turn.

Rule 1  Recorded first. Nothing is sent, and no caller gets an answer, before the decisions that led to it are in the
        log. Decisions without effects are written with the next that have some, or a moment later.
Rule 2  A turn waits for nobody. What finds no room on its way to an agent is dropped: the agent asks again.
Rule 3  A bus that can't write stops deciding and sends agents nothing, not even heads, so that their leases end and no
        engine stays paused. Callers get BusFaulted; operators still get the status.
Rule 4  Every ticket ends: concluded, refused, or failed when the bus closes, however it ends.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Final, Self, assert_never

import anyio
import msgspec
import zmq
from anyio import CancelScope, to_thread
from msgspec.structs import replace

from controlplane.bus.access import Access
from controlplane.bus.binding import bound, end_context, warn_of_exposure
from controlplane.bus.callers import Callers, Order, checked_order
from controlplane.bus.descriptors import Descriptors, raise_limit
from controlplane.bus.inbox import Inbox, connection_of
from controlplane.bus.key_folder import KeyFolder
from controlplane.machine import events
from controlplane.machine.coordinator import LOGIC, CoordinatorState, decide, next_deadline
from controlplane.machine.fleet import UNKNOWN_PEER, begin_turn, end_turn, member_at
from controlplane.machine.status import fleet_status
from controlplane.record.log import RunLog
from controlplane.tickets import Ticket
from schemas import wire
from schemas.carriers.edge_socket import EdgeSocket, Sent
from schemas.carriers.sockets import Context, bus_publisher, bus_router, is_local
from schemas.carriers.wakeup import Wakeup
from schemas.commands import Command, Manifest, Source, Target
from schemas.config import BusConfig
from schemas.errors import AddressInUse, BusClosed, BusFaulted, LogError
from schemas.identity import InFlight
from schemas.logs import logger_of
from schemas.reports import FleetStatus, Report, SyncReport

logger = logger_of("bus")

TURN_MAX: Final = 256
"""Messages received in one turn. More wait for the next, so that a flood delays nothing else for long."""
FLOOD_TURNS: Final = 100
"""Turns in a row that leave messages unread, and end with a message of one connection, before that is cut off."""
FLUSH_US: Final = 50_000
"""How long decisions without effects may stay in memory."""
STALLED_US: Final = 1_000_000
"""A head beacon that is later than this shows that the bus itself did not run."""
_NIL: Final = b"\xc0"


class Bus:
    """One life of the bus on one run's log. `async with Bus(...) as bus:`, under asyncio or trio.

    `publish` and `sync` may be called from any thread, everything else in the loop of the bus.

    Args:
        address: Where agents and operators connect. `tcp://127.0.0.1:0` lets the system choose a port, see `.address`.
        log: Open; the bus closes it.
        insecure: Allow an address that other machines can reach, without keys.
        keys: Let in only who holds one of these keys, and what it may do. Not for `inproc://`, which needs none.
        context: For `inproc://` addresses, which exist within one context only; else the process's own, or with keys
            one of the bus's own, since a context has one handler for keys.

    Raises:
        AddressInUse, BusAddressError, KeyFileError, LogError: On entering.
    """

    def __init__(
        self,
        address: str,
        log: RunLog,
        config: BusConfig | None = None,
        *,
        insecure: bool = False,
        keys: KeyFolder | None = None,
        context: Context | None = None,
    ) -> None:
        self.address = address
        self.state = log.state
        self.fault: BusFaulted | None = None
        self._log, self._config, self._insecure = log, config or BusConfig(), insecure
        self._keys = keys if not address.startswith("inproc://") else None
        self._access: Access | None = None
        self._given_context = context
        self._skew_us = 0
        self._arrived: deque[list[bytes]] = deque()
        self._unreachable: list[str] = []
        self._floods = Counter[bytes]()  # by connection, while messages wait
        self._callers = Callers(self._config.queue, self._reply)
        self._closed = True
        self._descriptors = Descriptors()
        self._next_head_us = 0
        self._flush_us: int | None = None
        self._planned_us = 0
        self._open = AsyncExitStack()

    @property
    def malformed(self) -> int:
        """Messages that could not be read, of all peers."""
        return self._inbox.malformed

    @property
    def _exposed(self) -> bool:
        """Whether anybody on another machine can command this fleet."""
        return self._access is None and not is_local(self.address)

    @property
    def safety_polls(self) -> int:
        """Messages that waited because a socket did not signal them. Must stay 0."""
        return self._router.safety_polls + self._publisher.safety_polls

    # --- for callers --------------------------------------------------------------------------------------------------

    def publish(self, command: Command, target: Target, timeout_ms: int) -> Ticket[Report]:
        """Hand a command to the bus. Waits for nothing; may be called from any thread.

        Raises:
            CommandError: It is not a command that can be published.
            BusOverloaded, BusFaulted, BusClosed: Nothing was sent.
        """
        ticket: Ticket[Report] = self._callers.new_ticket()
        order = events.Issued(
            at_us=0, at_ns=0, ticket=ticket.number, command=command, target=target, timeout_ms=timeout_ms
        )
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
        absent: events.Absent = "leave",
    ) -> Ticket[SyncReport]:
        """Hand a weight sync to the bus. `timeout_ms` is for each phase. Otherwise like `publish`."""
        ticket: Ticket[SyncReport] = self._callers.new_ticket()
        order = events.SyncRequested(
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
            absent=absent,
        )
        self._hand_over(ticket, order)
        return ticket

    def note_send_failure(self, ticket: Ticket[SyncReport], reason: str) -> None:
        """Tell the bus that the weights of this sync will not come, which ends its load phase."""
        self._callers.note_send_failure(ticket, reason)
        self._wakeup.notify()

    def retire(self, places: tuple[str, ...]) -> Ticket[FleetStatus]:
        """Take places out of the run for good. Otherwise like `publish`."""
        ticket: Ticket[FleetStatus] = self._callers.new_ticket()
        self._hand_over(ticket, events.RetireRequested(at_us=0, at_ns=0, ticket=ticket.number, places=places))
        return ticket

    def status(self) -> FleetStatus:
        """Return the fleet at this moment."""
        fleet = fleet_status(self.state, self._now_us(), str(self._log.path), self._inbox.last_heard_us)
        return replace(fleet, insecure=self._exposed, descriptors=self._descriptors.warning)

    async def ask_anew(self) -> int:
        """Let the next heartbeat of every agent count as news. Returns when, after all that had arrived by then."""
        await self._turn()
        self._inbox.forget_statuses()
        return self._now_us()

    async def wait_until(self, holds: Callable[[CoordinatorState], bool]) -> CoordinatorState:
        """Return the first state, from now on, for which `holds` is true. Raises BusFaulted or BusClosed."""
        while not holds(self.state):
            self._check()
            await self._changed.wait()
        return self.state

    def _hand_over(self, ticket: Ticket[Any], order: Order) -> None:
        order = checked_order(order)
        self._check()
        self._callers.add(ticket, order)
        self._wakeup.notify()
        if self._closed or self.fault is not None:  # meanwhile, and perhaps after all open tickets were failed
            self._callers.withdraw(ticket, self.fault or _closed(self.address))

    def _now_us(self) -> int:
        """The bus's monotonic clock, which agrees with the event loop's."""
        return time.monotonic_ns() // 1000 + self._skew_us

    def _check(self) -> None:
        if self.fault is not None:
            raise BusFaulted(*self.fault.args)
        if self._closed:
            raise _closed(self.address)

    # --- one life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        # Under uvloop, the loop's clock has a resolution of one millisecond, which is too coarse for a latency.
        self._skew_us = int(anyio.current_time() * 1_000_000) - time.monotonic_ns() // 1000
        self._turning = anyio.Lock(fast_acquire=True)
        self._changed, self._sooner = anyio.Event(), anyio.Event()
        self._wakeup = Wakeup()
        raise_limit(self._config.agents_max)
        async with AsyncExitStack() as stack:
            stack.callback(self._wakeup.close)
            stack.push_async_callback(self._close_log)
            self._prepare_access(stack)
            await self._bind(stack)
            stack.callback(self._fail_all)
            await self._begin()
            tasks = await stack.enter_async_context(anyio.create_task_group())
            self._closed = False
            stack.push_async_callback(self._end)
            stack.callback(tasks.cancel_scope.cancel)
            stack.push_async_callback(self._drain)
            for task in (self._read_router, self._read_subscriptions, self._read_orders, self._keep_time):
                tasks.start_soon(task)
            if self._access is not None:
                tasks.start_soon(self._access.serve, self._handler)
                tasks.start_soon(self._watch_keys, self._access)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, anyio.get_cancelled_exc_class()):
            return bool(await self._open.__aexit__(kind, error, trace))
        await self._open.aclose()  # the caller's own error is not wrapped in a group
        return False

    def _prepare_access(self, stack: AsyncExitStack) -> None:
        """Read the keys, and bind the handler before anybody can connect. Who does waits until it is served."""
        self._context = self._given_context or zmq.Context.instance()
        if self._keys is not None:
            self._access = Access(self._keys)
            if self._given_context is None:
                self._context = zmq.Context()
                stack.push_async_callback(end_context, self._context)
            self._handler = self._access.bind(self._context)
            stack.callback(self._handler.close, 0)
        self._inbox = Inbox(self._log, self._access.grant_of if self._access is not None else None)

    async def _bind(self, stack: AsyncExitStack) -> None:
        pair = self._access.pair if self._access is not None else None
        self._router = await bound(lambda: bus_router(self._context, self.address, insecure=self._insecure, pair=pair))
        stack.callback(self._router.close)
        self.address = self._router.address
        publish = f"{self.address}-publish"
        if self.address.startswith("tcp://"):
            publish = f"{self.address.rpartition(':')[0]}:{self._config.publish_port or 0}"
        self._publisher = await bound(lambda: self._bind_publisher(publish))
        stack.callback(lambda: self._publisher.close())

    def _bind_publisher(self, address: str) -> EdgeSocket:
        pair = self._access.pair if self._access is not None else None
        return bus_publisher(self._context, address, insecure=self._insecure, pair=pair)

    async def _begin(self) -> None:
        """The first decision of this life."""
        settings = msgspec.convert(self._config, events.CoordinatorSettings, from_attributes=True)
        tcp = self.address.startswith("tcp://")
        settings = replace(settings, publish_port=int(self._publisher.address.rpartition(":")[2]) if tcp else None)
        at_us, at_ns = self._now_us(), time.time_ns()
        opened = events.Opened(at_us=at_us, at_ns=at_ns, run=self._log.run, settings=settings, logic=LOGIC)
        self._next_head_us = at_us
        await self._process([opened], at_us, at_ns)
        if self.fault is not None:  # a bus that can't record its first decision does not open
            raise self.fault
        logger.info("bus of run %s, epoch %d, at %s", self._log.run, self.state.epoch, self.address)
        if self._exposed:
            warn_of_exposure(self.address)

    async def _drain(self) -> None:
        """Agents send their decisions a fraction of a heartbeat after making them: wait for the last ones."""
        self._closed = True
        if self.fault is None and any(member.state == "live" for member in self.state.members.values()):
            await anyio.sleep(self._config.heartbeat_ms * 3 / 8000)

    async def _end(self) -> None:
        """The last decision, after the tasks have ended. Messages still queued leave within the linger time."""
        with CancelScope(shield=True):
            self._closed = True
            if self.fault is None:
                at_us, at_ns = self._now_us(), time.time_ns()
                orders = self._callers.take_orders(at_us, at_ns)
                await self._process([*orders, events.Closed(at_us=at_us, at_ns=at_ns)], at_us, at_ns)

    def _fail_all(self) -> None:
        self._closed = True
        self._callers.fail_all(self.fault or _closed(self.address))
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
            # Kept where any turn finds it: this task may have to wait for one that goes on to read what came after it.
            self._arrived.append(await self._router.recv())
            await self._turn()

    async def _read_subscriptions(self) -> None:
        """An XPUB sends its welcome only when its subscriptions are read. Who sends anything else is cut off."""
        while True:
            publisher = self._publisher
            try:
                *_, subscription = await publisher.recv()
            except anyio.ClosedResourceError:
                if publisher is self._publisher:
                    raise
                continue
            if subscription[1:] not in (wire.TOPIC_COMMAND, wire.TOPIC_HEAD):
                publisher.cut_off_sender()

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
        """When the next turn is due, whatever arrives. A bus that has stopped has no deadlines."""
        deadline_us = next_deadline(self.state) if self.fault is None else None
        moments = (self._next_head_us, deadline_us, self._flush_us)
        return min(moment for moment in moments if moment is not None)

    async def _watch_keys(self, access: Access) -> None:
        """Shut out whose key was revoked, within a head interval."""
        while True:
            revoked = await access.changed(self._config.head_interval_ms / 1000)
            self._inbox.keys_changed = True
            await self._turn()
            if revoked:
                await self._drop_subscribers()

    async def _drop_subscribers(self) -> None:
        """End every subscription. Who may still come in subscribes again at once, and asks for what it missed.

        A new publish socket takes the place of the old one: libzmq can't close one connection of it.
        """
        old = self._publisher
        old.unbind()
        while True:
            try:
                self._publisher = await bound(lambda: self._bind_publisher(old.address))
                break
            except AddressInUse as error:
                logger.error("a revoked key still hears what is published, and nobody can join: %s", error)
                await anyio.sleep(self._config.head_interval_ms / 1000)
        self._publisher.set_welcome(wire.TOPIC_HEAD + wire.encode_header(self.state.epoch, 0, self.state.seq))
        old.close(0)

    # --- a turn -------------------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """One turn at a time: with durability `disk`, a commit awaits in the middle of it."""
        async with self._turning:
            at_us, at_ns = self._now_us(), time.time_ns()
            drained = self._receive(at_us, at_ns)
            if self.fault is not None:
                self._next_head_us = at_us + self._config.head_interval_ms * 1000
                return
            self._send_time_replies()
            self._turn_strangers_away()
            if at_us >= self._next_head_us:
                self._beat(at_us, drained)
            batch = self._inbox.take_events()
            batch += self._callers.take_orders(at_us, at_ns)
            if (deadline_us := next_deadline(self.state)) is not None and at_us >= deadline_us:
                batch.append(events.TimerFired(at_us=at_us, at_ns=at_ns))  # last, so that what arrived in time counts
            await self._process(batch, at_us, at_ns)

    def _receive(self, at_us: int, at_ns: int) -> bool:
        """Pass what has arrived to the inbox, and answer operators. Returns whether that was all."""
        self._inbox.begin_turn(at_us, at_ns, self.state)
        receive, recv_nowait = self._inbox.receive, self._router.recv_nowait
        while self._arrived:
            receive(self._arrived.popleft())
        drained = False
        for _ in range(TURN_MAX):
            frames = recv_nowait()
            if frames is None:
                drained = True
                break
            receive(frames)
        self._note_backlog(frames)
        self._handle_requests()
        return drained

    def _note_backlog(self, newest: list[bytes] | None) -> None:
        """While messages wait, count who sent the last one of each turn, and cut off who floods the bus."""
        if newest is None:
            self._floods.clear()
            return
        connection = newest[0] if self._access is None else newest[1]
        self._floods[connection] += 1
        if self._floods[connection] == FLOOD_TURNS:
            logger.warning("cut off a connection that sends faster than the bus can read")
            self._router.cut_off_sender()

    def _beat(self, at_us: int, drained: bool) -> None:
        """Send the head beacon, and look for agents that fell silent."""
        late_us = at_us - self._next_head_us
        if late_us > STALLED_US:
            self._inbox.discount(late_us)
        self._publisher.send_nowait([wire.TOPIC_HEAD, wire.encode_header(self.state.epoch, 0, self.state.seq), _NIL])
        self._next_head_us = at_us + self._config.head_interval_ms * 1000
        if drained:  # else a sign of life may lie unread
            self._inbox.drop_silent(at_us - self._config.agent_timeout_ms * 1000)
        self._descriptors.check(at_us, len(self._inbox.last_heard_us))

    async def _process(self, batch: list[events.CoordinatorEvent], at_us: int, at_ns: int) -> None:
        """Decide, record and perform; and again for peers that prove unreachable by that."""
        while True:
            state, effects = self._decide(batch, at_ns)
            if (effects or self._inbox.acks) and not await self._commit():
                return
            changed, self.state = state is not self.state, state
            for effect in effects:
                self._perform(effect)
            self._send_acks()
            if changed:
                self._wake_watchers()
            # The goodbye of a peer that is gone may lie on the socket, and tells more than its absence.
            if not self._unreachable or not self._receive(at_us, at_ns):
                break
            batch = self._inbox.take_events()
            batch += [
                events.PeerLost(at_us=at_us, at_ns=at_ns, peer=peer, reason="unreachable") for peer in self._unreachable
            ]
            self._unreachable.clear()
        if self._flush_due(at_us):
            await self._commit()
        if self._due_us() < self._planned_us:
            self._sooner.set()

    def _decide(
        self, batch: list[events.CoordinatorEvent], at_ns: int
    ) -> tuple[CoordinatorState, list[events.CoordinatorEffect]]:
        several = len(batch) > 1
        begun = state = begin_turn(self.state) if several else self.state
        effects: list[events.CoordinatorEffect] = []
        for event in batch:
            before = state
            state, decided = decide(state, event)
            if decided or state is not before:
                self._log.append(event, decided, at_ns, state)
                effects.extend(decided)
        if state is begun:
            return self.state, effects
        return end_turn(state) if several else state, effects

    def _flush_due(self, at_us: int) -> bool:
        if self._log.pending and self._flush_us is None:
            self._flush_us = at_us + FLUSH_US
        return self._flush_us is not None and at_us >= self._flush_us

    async def _commit(self) -> bool:
        """Write the group. Returns False if that fails, and then the bus has stopped (rule 3)."""
        try:
            if self._config.durability == "disk" or self._closed:  # the first group of a life goes to the disk too
                with CancelScope(shield=True):
                    await to_thread.run_sync(self._log.commit)
            else:
                self._log.commit()
        except LogError as error:
            self._stop(error)
            return False
        finally:
            self._flush_us = None
        return True

    def _stop(self, error: LogError) -> None:
        self.fault = BusFaulted(f"the bus of run {self._log.run} has stopped publishing: {error}")
        logger.error("%s", self.fault)
        self._inbox.operators_only = True
        self._inbox.acks.clear()
        self._fail_all()

    # --- effects ------------------------------------------------------------------------------------------------------

    def _perform(self, effect: events.CoordinatorEffect) -> None:
        match effect:
            case events.Publish(epoch=epoch, seq=seq):
                self._publisher.send_nowait(
                    [wire.TOPIC_COMMAND, wire.encode_header(epoch, epoch, seq), wire.encode(effect.envelope)]
                )
                self._publisher.set_welcome(wire.TOPIC_HEAD + wire.encode_header(epoch, 0, seq))
            case events.Send():
                self._send(effect.peer, effect.epoch, effect.seq, effect.message)
            case events.Ping():
                self._ping(effect.peer)
            case events.Conclude():
                self._callers.conclude(effect)
            case events.Refuse():
                self._callers.refuse(effect)
            case events.Retired(ticket=ticket):
                self._callers.resolve(ticket, self.status())
            case _:
                assert_never(effect)

    def _send(self, peer: str, epoch: int, seq: int, message: wire.Downward) -> None:
        sent = self._router.send_nowait([connection_of(peer), wire.encode_header(epoch, 0, seq), wire.encode(message)])
        if sent is Sent.GONE and member_at(self.state, peer) is not None and peer not in self._unreachable:
            self._unreachable.append(peer)

    def _ping(self, peer: str) -> None:
        """Send an ack that acknowledges nothing: the socket tells whether the peer is reachable."""
        name = member_at(self.state, peer)
        if name is not None:
            journal = self.state.members[name].hello.journal
            self._send(peer, self.state.epoch, self.state.seq, wire.Ack(journal=journal, through=0))

    def _send_acks(self) -> None:
        for peer, ack in self._inbox.acks:
            self._send(peer, self.state.epoch, self.state.seq, ack)
        self._inbox.acks.clear()

    def _send_time_replies(self) -> None:
        """First of all: anything else that the turn does would lengthen the round trip."""
        for peer, reply in self._inbox.time_replies:
            self._send(peer, self.state.epoch, self.state.seq, replace(reply, replied_ns=time.time_ns()))
        self._inbox.time_replies.clear()

    def _turn_strangers_away(self) -> None:
        """Tell each connection that sent something before its hello to say it. No decision: nothing is recorded."""
        header = wire.encode_header(self.state.epoch, 0, self.state.seq)
        for connection in self._inbox.strangers:
            self._router.send_nowait([connection, header, wire.encode(UNKNOWN_PEER)])
        self._inbox.strangers.clear()

    # --- operators ----------------------------------------------------------------------------------------------------

    def _handle_requests(self) -> None:
        for connection, answer in self._inbox.shut_out.items():
            self._reply(connection, answer)
        self._inbox.shut_out.clear()
        for connection, request in self._inbox.requests:
            if isinstance(request, wire.StatusRequest):
                self._reply(connection, self.status())
            elif reason := str(self.fault or "") or self._callers.add_operator(connection, request):
                self._reply(connection, wire.RequestRejected(reason=reason))
        for connection, reason in self._inbox.refused:
            self._reply(connection, wire.RequestRejected(reason=reason))
        self._inbox.requests.clear()
        self._inbox.refused.clear()

    def _reply(self, connection: bytes, reply: wire.Reply | wire.Rejoin) -> None:
        for body in wire.encode_reply(reply):
            self._router.send_nowait([connection, wire.encode_header(self.state.epoch, 0, self.state.seq), body])

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _closed(address: str) -> BusClosed:
    return BusClosed(f"the bus at {address} is not open; nothing was sent")
