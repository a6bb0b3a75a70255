"""What a thread rings so that a task of an event loop looks for what was handed over."""

import os
import socket
import threading

import anyio

from schemas.carriers.forks import forks, used_after_fork


class Wakeup:
    """Wakes a task of the loop from any thread, in about 2 us and without taking part in the loop.

    Whoever has something to hand over puts it where the loop will look, then rings. Whoever waits returns from `wait`
    and looks for all there is: rings that come before it looks are one. In a fork, where a ring would wake the parent,
    `ring` and `wait` raise BusError.
    """

    def __init__(self) -> None:
        self._ends = _ends()
        self._lock = threading.Lock()
        self._notified = False
        self._waiting = False
        self._closed = False
        self._process, self._generation = os.getpid(), len(forks)

    def notify(self) -> None:
        """Wake the waiter. Never blocks; from any thread. After `close` it does nothing."""
        if self._generation != len(forks):
            raise used_after_fork("wakeup", self._process)
        if self._notified:  # the waiter lowers it before it looks for what was handed over
            return
        # The lock keeps `close` from giving the descriptor's number to somebody else's file under our write.
        with self._lock:
            if not self._closed:
                self._notified = True
                os.write(self._ends[1], b"\1" * 8)

    async def wait(self) -> None:
        """Return when rung since the last return. One task at a time. Raises anyio.ClosedResourceError once closed."""
        if self._generation != len(forks):
            raise used_after_fork("wakeup", self._process)
        if self._closed:
            raise anyio.ClosedResourceError
        self._waiting = True
        try:
            await anyio.wait_readable(self._ends[0])
        finally:
            self._waiting = False
        if self._closed:
            raise anyio.ClosedResourceError
        # Empty it first and lower the flag second: the other way round a ring between the two would be read away and
        # leave the flag raised over an empty descriptor, for ever.
        os.read(self._ends[0], 8)
        self._notified = False

    def close(self) -> None:
        """Close, and wake the waiter. In the loop's thread; rings may go on meanwhile. May be called twice."""
        if self._closed or self._generation != len(forks):
            return
        with self._lock:
            self._closed = True
            if self._waiting:
                anyio.notify_closing(self._ends[0])
            for end in set(self._ends):
                os.close(end)


def _ends() -> tuple[int, int]:
    """What to read and what to write: one descriptor that counts, or a pair where the system has none.

    At most one ring is in it unread, so no write can block and one read empties it.
    """
    if hasattr(os, "eventfd"):
        end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return end, end
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    return reader.detach(), writer.detach()
