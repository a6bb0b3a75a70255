"""What operators are told while the log holds up a turn of the bus: the status as of the turn before, or that it hangs.

Theory of operation. A commit keeps the loop of the bus. So another thread, which looks now and then, takes the place of
the loop at its sockets. What agents send is kept for the turns to come.

Rule 1  The lock belongs to the loop at all times but during a commit (`lent`). Only its holder touches the sockets.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from msgspec.structs import replace

from controlplane.bus.callers import NOTHING_SENT, Callers
from controlplane.bus.inbox import Inbox
from controlplane.bus.turn_clock import TurnClock
from schemas import wire
from schemas.errors import BusFaulted
from schemas.reports import FleetStatus
from schemas.transport.async_socket import AsyncZmqSocket

LOOK_S: Final = 0.05
"""How long a look at a loop that is held up waits for another one."""
KEPT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Messages that another thread reads and keeps for the loop."""


class HeldUp:
    """Answers operators while a turn is held up."""

    def __init__(
        self,
        clock: TurnClock,
        arrived: deque[list[bytes]],
        router: Callable[[], AsyncZmqSocket],
        status: Callable[[], FleetStatus],
        framed: Callable[[bytes, bytes], list[bytes]],
        callers: Callers,
    ) -> None:
        self._clock, self._arrived, self._router, self._callers = clock, arrived, router, callers
        self._status, self._framed = status, framed
        self._lock = threading.Lock()
        self._touched = False  # another thread has touched the sockets

    def prepare(self, inbox: Inbox, admit: Callable[[], None] | None) -> None:
        """Make ready for the first turn, in the loop of the bus. The arguments are those of `BusLoop.prepare`."""
        self._inbox, self._admit = inbox, admit
        self._lock.acquire()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let another thread have the sockets during the block, in the loop."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            if self._touched:
                self._touched = False
                self._router().recheck()

    def look(self) -> None:
        """Answer in place of the loop, in another thread."""
        if not self._clock.hold_up or not self._lock.acquire(blocking=False):
            return
        try:
            self._touched, router = True, self._router()
            if self._admit is not None:
                self._admit()
            kept = [frames for frames in self._arrived if not self._is_answered(frames)]
            self._arrived.clear()
            self._arrived.extend(kept)
            self._callers.expire(self._clock.expired_us, BusFaulted(self._clock.hold_up), self._reply)
            nbytes = sum(len(frames[-1]) for frames in kept)
            while nbytes < KEPT_BYTES_MAX and (frames := router.take_elsewhere()) is not None:
                if not self._is_answered(frames):
                    self._arrived.append(frames)
                    nbytes += len(frames[-1])
        finally:
            self._lock.release()

    def status(self) -> FleetStatus | None:
        """Return the fleet as of the last turn while a commit keeps the loop; else None. In any thread."""
        if not self._clock.hold_up or not self._lock.acquire(timeout=LOOK_S):
            return None
        try:
            return self._status()
        finally:
            self._lock.release()

    def _is_answered(self, frames: list[bytes]) -> bool:
        if (asked := self._inbox.operator_request(frames)) is None:
            return False
        connection, request, is_observer = asked
        if isinstance(request, wire.StatusRequest):
            self._reply(connection, replace(self._status(), read_only=is_observer))
        else:
            self._reply(connection, wire.RequestRejected(reason=f"{self._clock.hold_up}. {NOTHING_SENT}"))
        return True

    def _reply(self, connection: bytes, reply: wire.Reply) -> None:
        for body in wire.encode_reply(reply):
            self._router().send_elsewhere(self._framed(connection, body))
