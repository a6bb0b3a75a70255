"""Who waits for the bus: callers in this process, who hold a ticket, and operators, who get one message.

Every ticket ends: concluded or refused by the coordinator, or failed when the bus closes.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import anyio
from anyio import to_thread
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from controlplane.machine.events import (
    CallerEvent,
    CoordinatorEvent,
    Issued,
    Refuse,
    RetireRequested,
    SendFailed,
    SendReturned,
    SyncRequested,
)
from controlplane.tickets import FOREVER_US, Ticket
from schemas.commands import AdapterDrop, Checkpoint, Drain, EngineCommand, ProfileCommand
from schemas.config import complaint
from schemas.errors import BusClosed, BusError, BusOverloaded, CheckpointError, CommandError, SyncInProgress
from schemas.reports import FleetStatus, Report, SyncReport
from schemas.safetensors.manifest import CheckpointFiles, read_checkpoint
from schemas.safetensors.paths import resolve_below
from schemas.wire import DECODE_ERRORS, Reply, RequestRejected, Retire, Submit, SyncRequest, encode

OPERATORS_MAX: Final = 64
"""Commands of operators that may be open at once."""
ORDERS_MAX: Final = 64
"""Orders that one turn takes."""
SENDS_MAX: Final = 4096
"""Agents times orders in one turn, about: libzmq takes 0.6 µs to queue a command for one agent."""
PHASES: Final = 3
"""Of a weight sync: prepare, load, then commit or abort. Each has the sync's timeout."""
REASON_MAX: Final = 2000
"""Characters of what a sender of weights raised that are recorded."""
PUBLISHABLE: Final = (ProfileCommand, EngineCommand, AdapterDrop, Drain)
"""Commands that a caller or an operator can publish by themselves."""
NOT_PUBLISHABLE: Final = (
    "only a profile or engine command, a drain or the drop of an adapter can be published by itself: a sync is a "
    "sequence of commands, so call `sync_weights` or `sync_adapter`; an epoch begins when a bus is opened"
)
NOTHING_SENT: Final = "Nothing was sent"
PERHAPS_SENT: Final = "Agents may have it, or may still get it: the run's log says what became of it"
_REFUSALS: Final = {
    "command": CommandError,
    "sync_in_progress": SyncInProgress,
    "closed": BusClosed,
    "retire": CommandError,
}

_order_decoder: Decoder[CallerEvent] = Decoder(CallerEvent)


def checked_order(order: CallerEvent) -> CallerEvent:
    """Return the order as decoded from its own encoding. Raises CommandError.

    msgspec does not check a Struct that Python code builds, and a log with a wrong value in it can't be read any more.
    The check costs the caller a few microseconds and gives the right traceback. In the decoded order, a list given for
    a set is a set, and nothing else can change it.
    """
    if isinstance(order, Issued) and not isinstance(order.command, PUBLISHABLE):
        raise CommandError(f"{type(order.command).__name__}: {NOT_PUBLISHABLE}. Nothing was sent")
    try:
        return _order_decoder.decode(encode(order))
    except (*DECODE_ERRORS, TypeError) as error:
        raise CommandError(
            f"not a command that can be published: {complaint(error, order)}. Nothing was sent"
        ) from None


def _with_fate(error: BusError, number: int, queued: bool) -> BusError:
    """The same error, which also says what became of one request."""
    told = type(error)(str(error) if number < 0 else f"{error}. {NOTHING_SENT if queued else PERHAPS_SENT}")
    told.__cause__ = error.__cause__
    return told


class _OperatorTicket(NamedTuple):
    """Stands for an operator, who waits in another process."""

    connection: bytes
    reply: Callable[[bytes, Reply], None]
    deadline_us: int

    def resolve(self, result: Report | SyncReport | FleetStatus) -> None:
        self.reply(self.connection, result)

    def fail(self, error: BaseException) -> None:
        self.reply(self.connection, RequestRejected(reason=str(error)))


def _order_of(request: Submit | SyncRequest | Retire, number: int, found: CheckpointFiles | None = None) -> CallerEvent:
    if isinstance(request, SyncRequest):
        adapter = request.adapter
        return SyncRequested(
            ticket=number,
            version=request.version,
            source=Checkpoint(request.path if adapter is None else PurePosixPath(request.path).as_posix()),
            manifest=found.manifest if found is not None else None,
            adapter=replace(adapter, config=found.config) if adapter is not None and found is not None else None,
            timeout_ms=request.timeout_ms,
            operator=True,
        )
    if isinstance(request, Retire):
        return RetireRequested(ticket=number, places=request.places)
    issued = Issued(ticket=number, command=request.command, target=request.target, timeout_ms=request.timeout_ms)
    return replace(issued, operator=True, force=request.force)


def _read(root: Path, request: SyncRequest) -> CheckpointFiles:
    return read_checkpoint(resolve_below(root, request.path), request.adapter is not None)


class Callers:
    """Orders handed over, and the tickets of those that have not ended.

    An operator's sync becomes an order once a thread has looked at its checkpoint: the bus does not wait for it.

    `new_ticket`, `add`, `queue`, `withdraw` and `expire` may be called from any thread, everything else in the loop of
    the bus. An order is taken by a turn or withdrawn by another thread, never both: so a caller that gets an error
    knows whether anything was sent.
    """

    def __init__(self, limit: int, reply: Callable[[bytes, Reply], None]) -> None:
        self._limit, self._reply = limit, reply
        self._numbers = itertools.count(1)
        self._tickets: dict[int, Ticket[Any] | _OperatorTicket] = {}
        self._orders: deque[CallerEvent] = deque()
        self._taking = threading.Lock()  # around each change of the orders
        self._pending_syncs: deque[tuple[int, SyncRequest]] = deque()  # whose checkpoints have not been read yet
        self._asked: anyio.Event | None = None  # while nothing is left to look at

    def new_ticket(self, timeout_us: int = FOREVER_US, *, ordered: bool = True) -> Ticket[Any]:
        """Return a ticket with a number of its own: negative, and not in the log, unless it is for an order."""
        number = next(self._numbers)
        ticket: Ticket[Any] = Ticket(number if ordered else -number)
        ticket.timeout_us = timeout_us
        return ticket

    def add(self, now_us: int, order: CallerEvent | None, ticket: Ticket[Any]) -> None:
        """Queue an order for the next turn; None for a ticket that is resolved without one. Raises BusOverloaded."""
        if len(self._tickets) >= self._limit:
            raise BusOverloaded(
                f"{self._limit} commands are open (`queue` in BusConfig): wait for their tickets before publishing "
                "more. Nothing was sent"
            )
        ticket.deadline_us = now_us + ticket.timeout_us
        self._tickets[ticket.number] = ticket
        if order is not None:
            self.queue(order)

    def newest_version(self, adapter: str) -> int:
        """Return the largest version of a sync that has not ended, of an adapter or of the weights (""); else 0."""
        tickets = (ticket for ticket in tuple(self._tickets.values()) if isinstance(ticket, Ticket))
        return max((ticket.version for ticket in tickets if ticket.adapter == adapter), default=0)

    def queue(self, order: CallerEvent) -> None:
        """Queue an order, or something to take note of, for the next turn."""
        with self._taking:
            self._orders.append(order)

    def withdraw(self, error: BusError, ticket: Ticket[Any]) -> None:
        """Fail a ticket that was added when the bus had already closed, unless a turn has its order all the same."""
        if self._unqueue(ticket.number):
            self._tickets.pop(ticket.number, None)
            ticket.fail(_with_fate(error, ticket.number, queued=True))

    def _unqueue(self, number: int) -> bool:
        """Take an order back. Returns False if it is not in the queue."""
        with self._taking:
            for index, order in enumerate(self._orders):
                if order.ticket == number and not isinstance(order, SendFailed | SendReturned):
                    del self._orders[index]
                    return True
        return False

    def expire(self, now_us: int, error: BusError, reply: Callable[[bytes, Reply], None] | None = None) -> None:
        """Fail the tickets whose deadlines have passed while no turn could conclude them.

        Args:
            now_us: This moment on the clock of the bus.
            error: What each of them raises.
            reply: Sends a message to an operator: only theirs are failed. None for those of this process.
        """
        for number, ticket in list(self._tickets.items()):
            if now_us > ticket.deadline_us and isinstance(ticket, _OperatorTicket) is (reply is not None):
                told = _with_fate(error, number, queued=self._unqueue(number))
                self._tickets.pop(number, None)
                if isinstance(ticket, _OperatorTicket) and reply is not None:
                    ticket = ticket._replace(reply=reply)
                ticket.fail(told)

    def add_operator(self, now_us: int, connection: bytes, request: Submit | SyncRequest | Retire) -> str | None:
        """Queue what an operator asks for at this moment, or return the reason why not."""
        if isinstance(request, Submit) and not isinstance(request.command, PUBLISHABLE):
            return NOT_PUBLISHABLE
        if sum(isinstance(ticket, _OperatorTicket) for ticket in tuple(self._tickets.values())) >= OPERATORS_MAX:
            return f"{OPERATORS_MAX} commands of operators are open already: wait for one of them to end"
        number = next(self._numbers)
        timeout_us = 0 if isinstance(request, Retire) else request.timeout_ms * 1000
        if isinstance(request, SyncRequest):
            timeout_us *= PHASES
        self._tickets[number] = _OperatorTicket(connection, self._reply, now_us + timeout_us)
        if isinstance(request, SyncRequest):
            self._pending_syncs.append((number, request))
            if self._asked is not None:
                self._asked.set()
        else:
            self.queue(_order_of(request, number))
        return None

    async def build_manifests(self, root: Path, begin: Callable[[], None]) -> None:
        """Look at each checkpoint that an operator asks for, until cancelled."""
        while True:
            self._asked = anyio.Event()
            while self._pending_syncs:
                number, request = self._pending_syncs.popleft()
                try:
                    found = await to_thread.run_sync(_read, root, request, abandon_on_cancel=True)
                except (CheckpointError, OSError, ValueError) as error:
                    if (ticket := self._tickets.pop(number, None)) is not None:
                        ticket.fail(error)
                    continue
                if number in self._tickets:
                    self.queue(_order_of(request, number, found))
                    begin()
            await self._asked.wait()

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def take_orders(self, agents: int) -> list[CoordinatorEvent]:
        """Return the oldest orders: a few for many agents, since others wait for a turn."""
        if not self._orders:
            return []
        with self._taking:
            count = min(len(self._orders), ORDERS_MAX, max(1, SENDS_MAX // max(1, agents)))
            return [self._orders.popleft() for _ in range(count)]

    def resolve(self, number: int, result: Report | SyncReport | FleetStatus) -> None:
        """Resolve a ticket, if it is of this life of the bus."""
        ticket = self._tickets.pop(number, None)
        if isinstance(ticket, Ticket) and isinstance(result, SyncReport) and result.status == "stale":
            result = replace(result, reason=ticket.advice or result.reason)
        if ticket is not None:
            ticket.resolve(result)

    def refuse(self, effect: Refuse) -> None:
        """Fail the ticket of a command or sync that was refused."""
        ticket = self._tickets.pop(effect.ticket, None)
        advice = ticket.advice if isinstance(ticket, Ticket) else ""
        reason = f"{effect.reason} ({advice})" if advice and effect.kind == "command" else effect.reason
        if ticket is not None:
            ticket.fail(_REFUSALS[effect.kind](reason))

    def fail(self, number: int, error: BaseException) -> None:
        """Fail a ticket, if it has not ended."""
        if (ticket := self._tickets.pop(number, None)) is not None:
            ticket.fail(error)

    def fail_all(self, error: BusError, *, operators: bool = True) -> None:
        """Drop the queued orders and fail every ticket. Without `operators`, it may be called from any thread."""
        with self._taking:
            queued = {order.ticket for order in self._orders if not isinstance(order, SendFailed | SendReturned)}
            self._orders.clear()
        self._pending_syncs.clear()
        for number, ticket in list(self._tickets.items()):
            if operators or isinstance(ticket, Ticket):
                self._tickets.pop(number, None)
                ticket.fail(_with_fate(error, number, number in queued))
