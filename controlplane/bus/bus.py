"""The trainer's end of the bus: a shell around `controlplane.machine.coordinator`. It owns the sockets, the log and the
keys, and decides nothing. What it does when something wakes it is `controlplane.bus.turns`, with its rules.

Every ticket ends: concluded, refused, or failed when the bus closes, however it ends.
"""

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, Self

import anyio
import msgspec
import zmq
from anyio import CancelScope
from msgspec.structs import replace

from controlplane.bus.access import Access
from controlplane.bus.binding import bound, end_context, warn_of_exposure
from controlplane.bus.callers import Order, checked_order
from controlplane.bus.descriptors import raise_limit
from controlplane.bus.inbox import Inbox
from controlplane.bus.key_folder import KeyFolder
from controlplane.bus.turns import Turns
from controlplane.machine import events
from controlplane.machine.coordinator import LOGIC, CoordinatorState
from controlplane.machine.serving import oldest_version, proven_replicas
from controlplane.record.log import RunLog
from controlplane.tickets import Ticket
from schemas import wire
from schemas.carriers.edge_socket import EdgeSocket
from schemas.carriers.sockets import Context, bus_publisher, bus_router, is_local
from schemas.carriers.wakeup import Wakeup
from schemas.commands import Command, Manifest, Source, Target
from schemas.config import BusConfig
from schemas.errors import AddressInUse, BusClosed, BusFaulted, LogError
from schemas.identity import InFlight
from schemas.listeners import Listeners
from schemas.logs import logger_of
from schemas.reports import FleetStatus, Report, SyncReport

logger = logger_of("bus")


class Bus:
    """One life of the bus on one run's log. `async with Bus(...) as bus:`, under asyncio or trio.

    `publish`, `sync`, `retire` and `serving` may be called from any thread, everything else in the loop of the bus.

    Args:
        address: Where agents and operators connect. `tcp://127.0.0.1:0` lets the system choose a port, see `.address`.
        log: Open; the bus closes it.
        insecure: Allow an address that other machines can reach, without keys.
        keys: Let in only who holds one of these keys, and what it may do. Not for `inproc://`, which needs none.
        checkpoints: Directory that the paths of an operator's syncs are relative to.
        context: For `inproc://` addresses, which exist within one context only; else the process's own, or with keys
            one of the bus's own, since a context has one handler for keys.

    Attributes:
        orders: Who hears of each order, in the thread of its caller, before the bus does.
        decisions: Who hears of each event and its effects, in the loop of the bus, once they were performed.

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
        checkpoints: Path = Path(),
        context: Context | None = None,
    ) -> None:
        self.address = address
        self._log, self._config, self._insecure = log, config or BusConfig(), insecure
        self._keys = keys if not address.startswith("inproc://") else None
        self._checkpoints = checkpoints
        self._access: Access | None = None
        self._given_context = context
        self._turns = Turns(log, self._config)
        self._callers = self._turns.callers
        self.orders: Listeners[[Order]] = Listeners()
        self.decisions = self._turns.decisions
        self._open = AsyncExitStack()

    @property
    def state(self) -> CoordinatorState:
        """What the coordinator knows. A state is replaced, never changed, so any thread may read it."""
        return self._turns.state

    @property
    def fault(self) -> BusFaulted | None:
        """Why the bus has stopped, if it has."""
        return self._turns.fault

    @property
    def is_up(self) -> bool:
        """Whether it is open and takes orders."""
        return not self._turns.closed and self.fault is None

    @property
    def log_path(self) -> Path:
        """File of the run's log."""
        return self._log.path

    @property
    def malformed(self) -> int:
        """Messages that could not be read, of all peers."""
        return self._turns.inbox.malformed

    @property
    def _exposed(self) -> bool:
        """Whether anybody on another machine can command this fleet."""
        return self._access is None and not is_local(self.address)

    @property
    def safety_polls(self) -> int:
        """Messages that waited because a socket did not signal them. Must stay 0."""
        return self._turns.router.safety_polls + self._turns.publisher.safety_polls

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
        self._hand_over(order, ticket)
        return ticket

    def sync(
        self,
        version: int | None,
        source: Source,
        manifest: Manifest | None,
        *,
        in_flight: InFlight,
        quorum: int | None,
        target: Target,
        timeout_ms: int,
        absent: events.Absent = "leave",
        prepare: Ticket[Report] | None = None,
    ) -> Ticket[SyncReport]:
        """Hand a weight sync to the bus. Otherwise like `publish`.

        Args:
            timeout_ms: For each phase.
            prepare: Gets the report of the prepare phase; the others are then asked for by `request_phase`. None for
                phases that follow by themselves.
        """
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
            prepare=prepare.number if prepare is not None else None,
        )
        of_earlier_life = version is not None and version <= self._log.state.newest_version
        advice = self._log.continues if of_earlier_life else ""
        self._hand_over(order, *((ticket,) if prepare is None else (ticket, prepare)), advice=advice)
        return ticket

    def new_ticket(self) -> Ticket[Report]:
        """Return a ticket to pass to `sync`."""
        return self._callers.new_ticket()

    def request_phase(self, sync: Ticket[SyncReport], phase: Literal["load", "commit", "abort"]) -> Ticket[Report]:
        """Ask for the next phase of a sync. Otherwise like `publish`."""
        ticket = self.new_ticket()
        order = events.PhaseRequested(at_us=0, at_ns=0, ticket=ticket.number, sync=sync.number, phase=phase)
        self._hand_over(order, ticket)
        return ticket

    def note_sent(self, ticket: Ticket[SyncReport], failure: str | None = None) -> None:
        """Tell the bus that the weights of this sync were sent, or why they will not come: its load phase ends soon."""
        self._callers.note_sent(ticket, failure)
        self._wakeup.notify()

    def retire(self, places: tuple[str, ...]) -> Ticket[FleetStatus]:
        """Take places out of the run for good. Otherwise like `publish`."""
        ticket: Ticket[FleetStatus] = self._callers.new_ticket()
        self._hand_over(events.RetireRequested(at_us=0, at_ns=0, ticket=ticket.number, places=places), ticket)
        return ticket

    def status(self) -> FleetStatus:
        """Return the fleet at this moment. Of thousands of agents, that keeps the loop for some 10 ms."""
        return self._turns.status()

    async def status_in_steps(self) -> FleetStatus:
        """Return the fleet as of this call, without keeping the loop for long."""
        return await self._turns.statuses.made()

    def serving(self) -> dict[int, int]:
        """Return the replicas that are proven to serve, each with its version. May be called from any thread.

        Raises:
            BusFaulted, BusClosed: Nobody knows what the replicas serve.
        """
        self._check()
        return proven_replicas(self.state).serving

    def oldest_version(self) -> int:
        """Return the oldest version that anybody may still have to load. May be called from any thread.

        Raises:
            BusFaulted, BusClosed: Nobody knows.
        """
        self._check()
        return oldest_version(self.state)

    def now_us(self) -> int:
        """Return the moment on the clock that its states and events use. May be called from any thread."""
        return self._turns.now_us()

    def silent_us(self, peer: str) -> int:
        """Return the time since the peer's last message; 0 if it is not connected. May be called from any thread."""
        return self._turns.silent_us(peer)

    async def ask_anew(self) -> int:
        """Let the next heartbeat of every agent count as news. Returns when, after all that had arrived by then."""
        await self._turns.turn()
        self._turns.inbox.forget_statuses()
        return self._turns.now_us()

    async def wait_until(self, holds: Callable[[CoordinatorState], bool]) -> CoordinatorState:
        """Return the first state, from now on, for which `holds` is true. Raises BusFaulted or BusClosed."""
        while not holds(self.state):
            self._check()
            await self._turns.change()
        return self.state

    def _hand_over(self, order: Order, *tickets: Ticket[Any], advice: str = "") -> None:
        order = checked_order(order)
        self._check()
        self.orders.tell(order)
        self._callers.add(order, *tickets, advice=advice)
        self._wakeup.notify()
        if self._turns.closed or self.fault is not None:  # meanwhile, and perhaps after all open tickets were failed
            self._callers.withdraw(self.fault or _closed(self.address), *tickets)

    def _check(self) -> None:
        if self.fault is not None:
            raise BusFaulted(*self.fault.args)
        if self._turns.closed:
            raise _closed(self.address)

    # --- one life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._wakeup = Wakeup()
        turns = self._turns
        raise_limit(self._config.agents_max)
        async with AsyncExitStack() as stack:
            stack.callback(self._wakeup.close)
            stack.push_async_callback(self._close_log)
            self._prepare_access(stack)
            await self._bind(stack)
            stack.callback(self._fail_all)
            await self._begin()
            tasks = await stack.enter_async_context(anyio.create_task_group())
            self._turns.closed = False
            stack.push_async_callback(self._end)
            stack.callback(tasks.cancel_scope.cancel)
            stack.push_async_callback(self._drain)
            for task in (
                turns.read_router,
                turns.keep_time,
                turns.finish_turns,
                turns.statuses.serve,
                self._read_subscriptions,
            ):
                tasks.start_soon(task)
            tasks.start_soon(self._wakeup.serve, turns.begin)
            tasks.start_soon(self._callers.look_at_checkpoints, self._checkpoints, turns.begin)
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
        inbox = Inbox(self._log, self._access.grant_of if self._access is not None else None)
        self._turns.prepare(inbox, keyed=self._access is not None)

    async def _bind(self, stack: AsyncExitStack) -> None:
        pair = self._access.pair if self._access is not None else None
        turns = self._turns
        turns.router = await bound(lambda: bus_router(self._context, self.address, insecure=self._insecure, pair=pair))
        stack.callback(turns.router.close)
        self.address = turns.router.address
        turns.insecure = self._exposed
        publish = f"{self.address}-publish"
        if self.address.startswith("tcp://"):
            publish = f"{self.address.rpartition(':')[0]}:{self._config.publish_port or 0}"
        turns.publisher = await bound(lambda: self._bind_publisher(publish))
        stack.callback(lambda: turns.publisher.close())

    def _bind_publisher(self, address: str) -> EdgeSocket:
        pair = self._access.pair if self._access is not None else None
        return bus_publisher(self._context, address, insecure=self._insecure, pair=pair)

    async def _begin(self) -> None:
        """The first decision of this life."""
        settings = msgspec.convert(self._config, events.CoordinatorSettings, from_attributes=True)
        tcp = self.address.startswith("tcp://")
        settings = replace(
            settings, publish_port=int(self._turns.publisher.address.rpartition(":")[2]) if tcp else None
        )
        at_us, at_ns = self._turns.now_us(), time.time_ns()
        opened = events.Opened(at_us=at_us, at_ns=at_ns, run=self._log.run, settings=settings, logic=LOGIC)
        await self._turns.run([opened], at_us, at_ns)
        if self.fault is not None:  # a bus that can't record its first decision does not open
            raise self.fault
        logger.info("bus of run %s, epoch %d, at %s", self._log.run, self.state.epoch, self.address)
        if self._exposed:
            warn_of_exposure(self.address)

    async def _drain(self) -> None:
        """Agents send their decisions a fraction of a heartbeat after making them: wait for the last ones."""
        self._turns.closed = True
        if self.fault is None and any(member.state == "live" for member in self.state.members.values()):
            await anyio.sleep(self._config.heartbeat_ms * 3 / 8000)

    async def _end(self) -> None:
        """The last decision, after the tasks have ended. Messages still queued leave within the linger time."""
        with CancelScope(shield=True):
            self._turns.closed = True
            at_us, at_ns = self._turns.now_us(), time.time_ns()
            while self.fault is None and (orders := self._callers.take_orders(at_us, at_ns, agents=0)):
                await self._turns.run(orders, at_us, at_ns)
            if self.fault is None:
                await self._turns.run([events.Closed(at_us=at_us, at_ns=at_ns)], at_us, at_ns)

    def _fail_all(self) -> None:
        self._turns.fail_all(self.fault or _closed(self.address))

    async def _close_log(self) -> None:
        try:
            self._log.close()
        except LogError as error:
            if self.fault is None:
                raise BusFaulted(f"the last decisions of the bus could not be recorded: {error}") from error

    # --- tasks --------------------------------------------------------------------------------------------------------

    async def _read_subscriptions(self) -> None:
        """An XPUB sends its welcome only when its subscriptions are read. Who sends anything else is cut off."""
        while True:
            publisher = self._turns.publisher
            try:
                *_, subscription = await publisher.recv()
            except anyio.ClosedResourceError:
                if publisher is self._turns.publisher:
                    raise
                continue
            if subscription[1:] not in (wire.TOPIC_COMMAND, wire.TOPIC_HEAD):
                publisher.cut_off_sender()

    async def _watch_keys(self, access: Access) -> None:
        """Shut out peers whose key was revoked, within a head interval."""
        while True:
            revoked = await access.changed(self._config.head_interval_ms / 1000)
            self._turns.inbox.keys_changed = True
            await self._turns.turn()
            if revoked:
                await self._drop_subscribers()

    async def _drop_subscribers(self) -> None:
        """End every subscription. Peers with a good key subscribe again at once, and ask for what they missed.

        A new publish socket takes the place of the old one: libzmq can't close one connection of it.
        """
        old = self._turns.publisher
        old.unbind()
        while True:
            try:
                self._turns.publisher = await bound(lambda: self._bind_publisher(old.address))
                break
            except AddressInUse as error:
                logger.error("a revoked key still hears what is published, and nobody can join: %s", error)
                await anyio.sleep(self._config.head_interval_ms / 1000)
        self._turns.publisher.set_welcome(wire.TOPIC_HEAD + wire.encode_header(self.state.epoch, 0, self.state.seq))
        old.close(0)


def _closed(address: str) -> BusClosed:
    return BusClosed(f"the bus at {address} is not open; nothing was sent")
