"""Who waits for the bus: callers in this process, who hold a ticket, and operators, who get one message.

Every ticket ends: concluded or refused by the coordinator, or failed when the bus closes.
"""

import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
from anyio import to_thread
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from controlplane.machine.events import (
    Conclude,
    CoordinatorEvent,
    Issued,
    PhaseRequested,
    Refuse,
    RetireRequested,
    SendFailed,
    SendReturned,
    SyncRequested,
)
from controlplane.tickets import Ticket
from schemas.commands import Checkpoint, EngineCommand, Manifest, ProfileCommand, Target
from schemas.config import complaint
from schemas.errors import BusClosed, BusOverloaded, CheckpointError, CommandError, SyncInProgress
from schemas.reports import FleetStatus, Report, SyncReport
from schemas.safetensors.manifest import build_manifest
from schemas.safetensors.paths import resolve_below
from schemas.wire import DECODE_ERRORS, Reply, RequestRejected, Retire, Submit, SyncRequest, encode

OPERATORS_MAX: Final = 64
"""Commands of operators that may be open at once."""
ORDERS_MAX: Final = 64
"""Orders that one turn takes."""
SENDS_MAX: Final = 4096
"""Agents times orders in one turn, about: libzmq takes 0.6 µs to queue a command for one agent."""
REASON_MAX: Final = 2000
"""Characters of what a sender of weights raised that are recorded."""
PUBLISHABLE: Final = (ProfileCommand, EngineCommand)
"""Commands that a caller or an operator can publish by themselves."""
NOT_PUBLISHABLE: Final = (
    "only a profile command or an engine command can be published by itself: a weight sync is a sequence of commands, "
    "so call `sync_weights`; an epoch begins when a bus is opened"
)
_REFUSALS: Final = {
    "command": CommandError,
    "sync_in_progress": SyncInProgress,
    "closed": BusClosed,
    "retire": CommandError,
}

Order = Issued | SyncRequested | PhaseRequested | RetireRequested | SendFailed | SendReturned
_order_decoder: Decoder[Order] = Decoder(Order)


def checked_order(order: Order) -> Order:
    """Return the order as decoded from its own encoding. Raises CommandError.

    msgspec does not check a Struct that Python code builds, and a log with a wrong value in it can't be read any more.
    The check costs the caller a few microseconds and gives the right traceback. In the decoded order, a list given for
    a set is a set, and nobody else can change it.
    """
    if isinstance(order, Issued) and not isinstance(order.command, PUBLISHABLE):
        raise CommandError(f"{type(order.command).__name__}: {NOT_PUBLISHABLE}. Nothing was sent")
    try:
        return _order_decoder.decode(encode(order))
    except (*DECODE_ERRORS, TypeError) as error:
        raise CommandError(
            f"not a command that can be published: {complaint(error, order)}. Nothing was sent"
        ) from None


class _OperatorTicket(NamedTuple):
    """Stands for an operator, who waits in another process."""

    connection: bytes
    reply: Callable[[bytes, Reply], None]

    def resolve(self, result: Report | SyncReport | FleetStatus) -> None:
        self.reply(self.connection, result)

    def fail(self, error: BaseException) -> None:
        self.reply(self.connection, RequestRejected(reason=str(error)))


def _order_of(request: Submit | SyncRequest | Retire, number: int, manifest: Manifest | None = None) -> Order:
    if isinstance(request, SyncRequest):
        return SyncRequested(
            at_us=0,
            at_ns=0,
            ticket=number,
            version=request.version,
            source=Checkpoint(request.path),
            manifest=manifest,
            in_flight="abort",
            quorum=None,
            target=Target(),
            timeout_ms=request.timeout_ms,
            operator=True,
        )
    if isinstance(request, Retire):
        return RetireRequested(at_us=0, at_ns=0, ticket=number, places=request.places)
    return Issued(
        at_us=0,
        at_ns=0,
        ticket=number,
        command=request.command,
        target=request.target,
        timeout_ms=request.timeout_ms,
        operator=True,
        force=request.force,
    )


def _manifest(root: Path, path: str) -> Manifest:
    return build_manifest(resolve_below(root, path), content=False)


class Callers:
    """Orders handed over, and the tickets of those that have not ended.

    An operator's sync becomes an order once a thread has looked at its checkpoint: the bus does not wait for it.

    `new_ticket`, `add` and `withdraw` may be called from any thread, everything else in the loop of the bus.

    Args:
        limit: Tickets that may be open at once.
        reply: Sends a message to an operator.
    """

    def __init__(self, limit: int, reply: Callable[[bytes, Reply], None]) -> None:
        self._limit, self._reply = limit, reply
        self._numbers = itertools.count(1)
        self._tickets: dict[int, Ticket[Any] | _OperatorTicket] = {}
        self._orders: deque[Order] = deque()
        self._unseen: deque[tuple[int, SyncRequest]] = deque()  # whose checkpoints nobody has looked at
        self._asked: anyio.Event | None = None  # while nothing is left to look at
        self._advice: dict[int, str] = {}  # by ticket: what its caller should know if it is refused or stale

    def new_ticket(self) -> Ticket[Any]:
        """Return a ticket with a number of its own."""
        return Ticket(next(self._numbers))

    def add(self, order: Order, *tickets: Ticket[Any], advice: str = "") -> None:
        """Queue an order for the next turn. Raises BusOverloaded.

        Args:
            advice: What its caller is told as well if a sync is refused, or stale.
        """
        if len(self._tickets) + len(tickets) > self._limit:
            raise BusOverloaded(
                f"{self._limit} commands are open (`queue` in BusConfig): wait for their tickets before publishing "
                "more. Nothing was sent"
            )
        self._tickets.update((ticket.number, ticket) for ticket in tickets)
        if advice:
            self._advice.update((ticket.number, advice) for ticket in tickets)
        self._orders.append(order)

    def note_sent(self, ticket: Ticket[Any], failure: str | None) -> None:
        """Queue that the weights of a sync were sent, or why they can't be."""
        if failure is None:
            self._orders.append(SendReturned(at_us=0, at_ns=0, ticket=ticket.number))
        else:
            self._orders.append(SendFailed(at_us=0, at_ns=0, ticket=ticket.number, reason=failure[:REASON_MAX]))

    def withdraw(self, error: BaseException, *tickets: Ticket[Any]) -> None:
        """Fail tickets that were added when the bus had already closed."""
        for ticket in tickets:
            self._tickets.pop(ticket.number, None)
            ticket.fail(error)

    def add_operator(self, connection: bytes, request: Submit | SyncRequest | Retire) -> str | None:
        """Queue what an operator asks for, or return the reason why not."""
        if isinstance(request, Submit) and not isinstance(request.command, PUBLISHABLE):
            return NOT_PUBLISHABLE
        if sum(isinstance(ticket, _OperatorTicket) for ticket in tuple(self._tickets.values())) >= OPERATORS_MAX:
            return f"{OPERATORS_MAX} commands of operators are open already: wait for one of them to end"
        number = next(self._numbers)
        self._tickets[number] = _OperatorTicket(connection, self._reply)
        if isinstance(request, SyncRequest):
            self._unseen.append((number, request))
            if self._asked is not None:
                self._asked.set()
        else:
            self._orders.append(_order_of(request, number))
        return None

    async def look_at_checkpoints(self, root: Path, begin: Callable[[], None]) -> None:
        """Look at each checkpoint that an operator asks for, until cancelled.

        Args:
            root: What their paths are relative to.
            begin: Begins a turn, with the order for the sync.
        """
        while True:
            self._asked = anyio.Event()
            while self._unseen:
                number, request = self._unseen.popleft()
                try:
                    manifest = await to_thread.run_sync(_manifest, root, request.path, abandon_on_cancel=True)
                except (CheckpointError, OSError, ValueError) as error:
                    if (ticket := self._tickets.pop(number, None)) is not None:
                        ticket.fail(error)
                    continue
                if number in self._tickets:
                    self._orders.append(_order_of(request, number, manifest))
                    begin()
            await self._asked.wait()

    @property
    def has_orders(self) -> bool:
        """Whether orders wait to be taken."""
        return bool(self._orders)

    def take_orders(self, at_us: int, at_ns: int, agents: int) -> list[CoordinatorEvent]:
        """Return the oldest orders as events of this moment.

        Args:
            agents: In the fleet. For many of them only a few orders are taken: the others get turns of their own, and
                what arrives comes in between.
        """
        count = min(len(self._orders), ORDERS_MAX, max(1, SENDS_MAX // max(1, agents)))
        return [replace(self._orders.popleft(), at_us=at_us, at_ns=at_ns) for _ in range(count)]

    def conclude(self, effect: Conclude) -> None:
        """Resolve the ticket of a command or sync, if anybody waits for it."""
        if effect.ticket is not None:
            self.resolve(effect.ticket, effect.report)

    def resolve(self, number: int, result: Report | SyncReport | FleetStatus) -> None:
        """Resolve a ticket, if it is of this life of the bus."""
        ticket, advice = self._tickets.pop(number, None), self._advice.pop(number, "")
        if advice and isinstance(result, SyncReport) and result.status == "stale":
            result = replace(result, reason=advice)
        if ticket is not None:
            ticket.resolve(result)

    def refuse(self, effect: Refuse) -> None:
        """Fail the ticket of a command or sync that was refused."""
        ticket, advice = self._tickets.pop(effect.ticket, None), self._advice.pop(effect.ticket, "")
        reason = f"{effect.reason} ({advice})" if advice and effect.kind == "command" else effect.reason
        if ticket is not None:
            ticket.fail(_REFUSALS[effect.kind](reason))

    def fail_all(self, error: BaseException) -> None:
        """Drop the queued orders and fail every ticket."""
        self._orders.clear()
        self._unseen.clear()
        while self._tickets:
            _, ticket = self._tickets.popitem()
            ticket.fail(error)
