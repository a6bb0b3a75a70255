"""Wakes a task of an event loop from another thread."""

import os
import threading

import anyio

from schemas.carriers.forks import forks, used_after_fork


class Wakeup:
    """Wakes one task of the loop from any thread, in about 2 us and without a call into the loop.

    A thread puts its work where the task will look, then calls `notify`. The task returns from `wait` and takes all
    work that is there: several notifications before it looks count as one. In a fork, which would wake its parent,
    `notify` and `wait` raise BusError.
    """

    def __init__(self) -> None:
        # At most one notification is unread at any time, so no write blocks and one read empties the descriptor.
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._notified = False
        self._waiting = False
        self._closed = False
        self._process, self._generation = os.getpid(), len(forks)

    def notify(self) -> None:
        """Wake the task. May be called from any thread. Never blocks, and does nothing after `close`."""
        if self._generation != len(forks):
            raise used_after_fork("wakeup", self._process)
        if self._notified:  # the task clears this flag before it looks for work
            return
        # Without the lock, `close` could give the descriptor's number to another file just before the write.
        with self._lock:
            if not self._closed:
                self._notified = True
                os.write(self._fd, b"\1" * 8)

    async def wait(self) -> None:
        """Return once notified since the last return. One task at a time. Raises anyio.ClosedResourceError."""
        if self._generation != len(forks):
            raise used_after_fork("wakeup", self._process)
        if self._closed:
            raise anyio.ClosedResourceError
        self._waiting = True
        try:
            await anyio.wait_readable(self._fd)
        finally:
            self._waiting = False
        if self._closed:
            raise anyio.ClosedResourceError
        # Empty the descriptor first and clear the flag second. In the other order, a notification in between would be
        # read away and leave the flag set over an empty descriptor for ever.
        os.read(self._fd, 8)
        self._notified = False

    def close(self) -> None:
        """Close, and wake the task. Call it in the loop's thread; others may still notify. May be called twice."""
        if self._closed or self._generation != len(forks):
            return
        with self._lock:
            self._closed = True
            if self._waiting:
                anyio.notify_closing(self._fd)
            os.close(self._fd)
