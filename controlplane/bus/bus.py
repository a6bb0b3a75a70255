"""The trainer's end of the bus: a shell around `controlplane.machine.coordinator`. It owns the sockets, the log and the
keys, and decides nothing. What it does when something wakes it is `controlplane.bus.bus_loop`, with its rules.

Every ticket ends: concluded, refused, or failed when the bus closes, however it ends.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Self, TypeVar

import anyio
import msgspec
import zmq
from anyio.abc import TaskGroup
from msgspec.structs import replace

from controlplane.bus.access import Access
from controlplane.bus.binding import bound, end_context, warn_of_exposure
from controlplane.bus.bus_loop import BusLoop
from controlplane.bus.callers import NOTHING_SENT, PHASES, REASON_MAX, checked_order
from controlplane.bus.descriptors import raise_limit
from controlplane.bus.inbox import Inbox
from controlplane.bus.key_folder import KeyFolder
from controlplane.machine import events
from controlplane.machine.adapters import next_adapter_version
from controlplane.machine.coordinator import LOGIC, CoordinatorState
from controlplane.machine.fleet_view import FleetView
from controlplane.machine.versions import VERSION_MAX, next_version
from controlplane.record.log import RunLog
from controlplane.tickets import Ticket
from schemas import wire
from schemas.commands import Command, Source, Target
from schemas.config import BusConfig
from schemas.errors import AddressInUse, BusClosed, BusFaulted, LogError
from schemas.listeners import Listeners
from schemas.logs import logger_of
from schemas.reports import FleetStatus, Report, SyncReport
from schemas.transport.publisher_socket import PublisherSocket
from schemas.transport.sockets import Context, bus_publisher, bus_router, is_local
from schemas.transport.wakeup import Wakeup

logger = logger_of("bus")

R = TypeVar("R")


class Bus(BusLoop):
    """One life of the bus on one run's log. `async with Bus(...) as bus:`, under asyncio.

    `publish`, `sync`, `retire`, `view`, `run_soon` and `watch` may be called from any thread, everything else in the
    loop of the bus. Entering raises AddressInUse, BusAddressError, KeyFileError or LogError.

    The arguments are those of `ControlPlane`. The log is open, and the bus closes it. Keys are not for `inproc://`. A
    bus with keys has a context of its own unless it is given one, since a context has one handler for keys.

    Attributes:
        orders: Who hears of each order, in the thread of its caller, before the bus does.
        decisions: Who hears of each event and its effects, in the loop of the bus, once they were performed.
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
        super().__init__(log, config or BusConfig())
        self.address = address
        self._allow_exposed = insecure
        self._keys = keys if not address.startswith("inproc://") else None
        self._checkpoints = checkpoints
        self._access: Access | None = None
        self._given_context = context
        self.orders: Listeners[[events.CallerEvent]] = Listeners()
        self._jobs: deque[tuple[Callable[[], Awaitable[Any]], Ticket[Any]]] = deque()
        self._job_added = asyncio.Event()
        self._exited = False
        self._view: FleetView | None = None
        self._numbering = Lock()  # from the choice of a version until it is queued
        self._open = AsyncExitStack()

    @property
    def is_up(self) -> bool:
        """Whether it is open and takes orders."""
        return not self.closed and self.fault is None

    @property
    def log_path(self) -> Path:
        """File of the run's log."""
        return self._log.path

    @property
    def hangs(self) -> str:
        """What keeps the bus from closing, as a sentence without its full stop."""
        return self.clock.hold_up or f"Nothing is known to hold it up but the closing of {self.log_path}"

    @property
    def _exposed(self) -> bool:
        """Whether programs on other machines can command this fleet."""
        return self._access is None and not is_local(self.address)

    # --- for callers --------------------------------------------------------------------------------------------------

    def publish(self, command: Command, target: Target, timeout_ms: int) -> Ticket[Report]:
        """Hand a command to the bus. Waits for nothing; may be called from any thread.

        Raises:
            CommandError: It is not a command that can be published.
            BusOverloaded, BusFaulted, BusClosed: Nothing was sent.
        """
        ticket: Ticket[Report] = self.callers.new_ticket(timeout_ms * 1000)
        order = events.Issued(ticket=ticket.number, command=command, target=target, timeout_ms=timeout_ms)
        self._hand_over(order, ticket)
        return ticket

    def sync(self, request: events.SyncRequested) -> Ticket[SyncReport]:
        """Hand a sync of weights or of an adapter to the bus, like `publish`. Its ticket is set here."""
        ticket: Ticket[SyncReport] = self.callers.new_ticket(PHASES * request.timeout_ms * 1000)
        order, version, adapter = replace(request, ticket=ticket.number), request.version, request.adapter
        of_earlier_life = adapter is None and version is not None and version <= self._log.state.newest_version
        ticket.advice = self._log.continues if of_earlier_life else ""
        with self._numbering:
            ticket.adapter = adapter.name if adapter is not None else ""
            ticket.version = self._next_version(ticket.adapter, request.source) if version is None else version
            if version is None and ticket.version <= VERSION_MAX:  # beyond, only the run itself may count on
                order = replace(order, version=ticket.version)
            self._hand_over(order, ticket)
        return ticket

    def _next_version(self, adapter: str, source: Source) -> int:
        """The version that a sync which counts by itself will have: above those of all that have not ended."""
        newest = self.callers.newest_version(adapter)
        if adapter:
            return next_adapter_version(self.state, adapter, newest)
        return next_version(self.state, source, newest)

    def note_sent(self, ticket: Ticket[SyncReport], failure: str | None = None) -> None:
        """Tell the bus that the weights of this sync were sent, or why they will not come: its load phase ends soon."""
        if failure is None:
            self._note(events.SendReturned(ticket=ticket.number))
        else:
            self._note(events.SendFailed(ticket=ticket.number, reason=failure[:REASON_MAX]))

    def note_samples(self, step: int, counts: tuple[events.SampleCount, ...]) -> None:
        """Record what the trainer has judged. Waits for nothing; may be called from any thread."""
        self._note(checked_order(events.SamplesCounted(step=step, counts=counts)))

    def _note(self, event: events.CallerEvent) -> None:
        self.callers.queue(event)
        self._wakeup.notify()

    def retire(self, places: tuple[str, ...]) -> Ticket[FleetStatus]:
        """Take places out of the run for good. Otherwise like `publish`."""
        ticket: Ticket[FleetStatus] = self.callers.new_ticket()
        self._hand_over(events.RetireRequested(ticket=ticket.number, places=places), ticket)
        return ticket

    def view(self) -> FleetView:
        """Return what is known of the fleet at this moment. May be called from any thread.

        Raises BusFaulted or BusClosed.
        """
        self._check()
        self.clock.require_news()
        state = self.state
        if self._view is None or self._view.state is not state:
            self._view = FleetView(state)
        return self._view

    def refresh_statuses(self) -> int:
        """Let the next heartbeat of every agent count as news. Returns when, after all that had arrived by then."""
        self.begin()
        self.inbox.forget_statuses()
        return self.now_us()

    async def wait_until(self, holds: Callable[[CoordinatorState], bool]) -> CoordinatorState:
        """Return the first state, from now on, for which `holds` is true. Raises BusFaulted or BusClosed."""
        while not holds(self.state):
            self._check()
            await self.change()
        return self.state

    def _hand_over(self, order: events.CallerEvent, ticket: Ticket[Any]) -> None:
        order = checked_order(order)
        self._check()
        self.orders.notify(order)
        self.callers.add(self.now_us(), order, ticket)
        self._wakeup.notify()
        if self.closed or self.fault is not None:  # meanwhile, and perhaps after all open tickets were failed
            self.callers.withdraw(self.fault or _closed(self.address), ticket)

    def run_soon(self, job: Callable[[], Awaitable[R]], timeout_ms: int) -> Ticket[R]:
        """Run a function in the loop of the bus, and return a ticket for its result. May be called from any thread.

        The ticket also ends while the loop itself hangs: by the timeout, or when the bus closes. A bus that has stopped
        for a fault still runs it.
        """
        ticket: Ticket[R] = self.callers.new_ticket(timeout_ms * 1000, ordered=False)
        self.callers.add(self.now_us(), None, ticket)
        self._jobs.append((job, ticket))
        self._wakeup.notify()
        if self._exited:  # perhaps after all open tickets were failed
            self.callers.fail(ticket.number, self.fault or _closed(self.address))
        return ticket

    def _check(self) -> None:
        if self.fault is not None:
            raise BusFaulted(f"{self.fault}. {NOTHING_SENT}") from self.fault.__cause__
        if self.closed:
            raise BusClosed(f"{_closed(self.address)}. {NOTHING_SENT}")

    # --- one life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._wakeup = Wakeup()
        raise_limit(self._config.agents_max)
        async with AsyncExitStack() as stack:
            stack.callback(self._wakeup.close)
            stack.callback(self.close_log)
            self._prepare_access(stack)
            await self._bind(stack)
            stack.callback(self._fail_all)
            self._record_opening()
            tasks = await stack.enter_async_context(anyio.create_task_group())
            self.closed = False
            stack.callback(self._record_end)
            stack.callback(tasks.cancel_scope.cancel)
            stack.push_async_callback(self._drain)
            for task in (
                self.read_router,
                self.keep_time,
                self._read_subscriptions,
                partial(self._run_jobs, tasks),
                partial(self._wakeup.serve, self._on_wakeup),
                partial(self.callers.build_manifests, self._checkpoints, self.begin),
            ):
                tasks.start_soon(self._supervise, task)
            if self._access is not None:
                tasks.start_soon(self._supervise, partial(self._access.serve, self._handler))
                tasks.start_soon(self._supervise, partial(self._watch_keys, self._access))
            self._open = stack.pop_all()
        return self

    async def _supervise(self, task: Callable[[], Awaitable[object]]) -> None:
        """Run a task of the bus. One that raises would take the others with it, and the status that says why."""
        try:
            await task()
        except Exception as error:
            self.stop(error)

    def _on_wakeup(self) -> None:
        if self._jobs:
            self._job_added.set()
        self.begin()

    async def _run_jobs(self, tasks: TaskGroup) -> None:
        while True:
            await self._job_added.wait()
            self._job_added.clear()
            while self._jobs:
                tasks.start_soon(self._run_job, *self._jobs.popleft())

    async def _run_job(self, job: Callable[[], Awaitable[Any]], ticket: Ticket[Any]) -> None:
        try:
            self.callers.resolve(ticket.number, await job())
        except Exception as error:
            self.callers.fail(ticket.number, error)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, anyio.get_cancelled_exc_class()):
            return bool(await self._open.__aexit__(kind, error, trace))
        await self._open.aclose()  # the caller's own error is not wrapped in a group
        return False

    def _prepare_access(self, stack: AsyncExitStack) -> None:
        """Read the keys, and bind the handler before peers can connect. One that does waits until it is served."""
        self._context = self._given_context or zmq.Context.instance()
        if self._keys is not None:
            self._access = Access(self._keys)
            if self._given_context is None:
                self._context = zmq.Context()
                stack.push_async_callback(end_context, self._context)
            self._handler = self._access.bind(self._context)
            stack.callback(self._handler.close, 0)
        inbox = Inbox(self._log, self._access.grant_of if self._access is not None else None)
        admit = partial(self._access.answer_elsewhere, self._handler) if self._access is not None else None
        self.prepare(inbox, admit)

    async def _bind(self, stack: AsyncExitStack) -> None:
        pair = self._access.pair if self._access is not None else None
        self.router = await bound(
            lambda: bus_router(self._context, self.address, insecure=self._allow_exposed, pair=pair)
        )
        stack.callback(self.router.close)
        self.address = self.router.address
        self.insecure = self._exposed
        publish = f"{self.address}-publish"
        if self.address.startswith("tcp://"):
            publish = f"{self.address.rpartition(':')[0]}:{self._config.publish_port or 0}"
        self.publisher = await bound(lambda: self._bind_publisher(publish))
        stack.callback(lambda: self.publisher.close())

    def _bind_publisher(self, address: str) -> PublisherSocket:
        pair = self._access.pair if self._access is not None else None
        return bus_publisher(self._context, address, insecure=self._allow_exposed, pair=pair)

    def _record_opening(self) -> None:
        """The first decision of this life."""
        settings = msgspec.convert(self._config, events.CoordinatorSettings, from_attributes=True)
        tcp = self.address.startswith("tcp://")
        settings = replace(settings, publish_port=int(self.publisher.address.rpartition(":")[2]) if tcp else None)
        self.run([events.Opened(run=self._log.run, settings=settings, logic=LOGIC)])
        if self.fault is not None:  # a bus that can't record its first decision does not open
            raise self.fault
        logger.info("bus of run %s, epoch %d, at %s", self._log.run, self.state.epoch, self.address)
        if self._exposed:
            warn_of_exposure(self.address)

    async def _drain(self) -> None:
        """Agents send their decisions a fraction of a heartbeat after making them: wait for the last ones."""
        self.closed = True
        if self.fault is None and any(member.state == "live" for member in self.state.members.values()):
            await anyio.sleep(self._config.heartbeat_ms * 3 / 8000)

    def _record_end(self) -> None:
        """The last decision, after the tasks have ended. Messages still queued leave within the linger time."""
        self.closed = True
        while self.fault is None and (orders := self.callers.take_orders(agents=0)):
            self.run(orders)
        if self.fault is None:
            self.run([events.Closed()])

    def _fail_all(self) -> None:
        self._exited = True
        self.fail_all(self.fault or _closed(self.address))

    def close_log(self) -> None:
        """Close the log. For a bus that was not entered; one that was closes it itself."""
        try:
            self._log.close()
        except LogError as error:
            if self.fault is None:
                raise BusFaulted(f"the last decisions of the bus could not be recorded: {error}") from error

    # --- tasks --------------------------------------------------------------------------------------------------------

    async def _read_subscriptions(self) -> None:
        """An XPUB sends its welcome only when its subscriptions are read. Who sends anything else is cut off."""
        while True:
            publisher = self.publisher
            try:
                *_, subscription = await publisher.recv()
            except anyio.ClosedResourceError:
                if publisher is self.publisher:
                    raise
                continue
            if subscription[1:] not in (wire.TOPIC_COMMAND, wire.TOPIC_HEAD):
                publisher.cut_off_sender()

    async def _watch_keys(self, access: Access) -> None:
        """Shut out peers whose key was revoked, within a head interval."""
        while True:
            revoked = await access.changed(self._config.head_interval_ms / 1000)
            self.inbox.keys_changed = True
            self.begin()
            if revoked:
                await self._drop_subscribers()

    async def _drop_subscribers(self) -> None:
        """End every subscription. Peers with a good key subscribe again at once, and ask for what they missed.

        A new publish socket takes the place of the old one: libzmq can't close one connection of it.
        """
        old = self.publisher
        old.unbind()
        while True:
            try:
                self.publisher = await bound(lambda: self._bind_publisher(old.address))
                break
            except AddressInUse as error:
                logger.error("a revoked key still hears what is published, and no agent can join: %s", error)
                await anyio.sleep(self._config.head_interval_ms / 1000)
        self.publisher.set_welcome(wire.TOPIC_HEAD + wire.encode_header(self.state.epoch, 0, self.state.seq))
        old.close(0)


def _closed(address: str) -> BusClosed:
    return BusClosed(f"the bus at {address} is not open")
