"""Wakes a task from another thread, in any event loop."""

import asyncio
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable

import anyio

from schemas.transport.forks import forks, used_after_fork


def callback_context() -> contextvars.Context:
    """Return a context for asyncio's callbacks. With sniffio, anyio finds no loop without it where no task runs."""
    context = contextvars.copy_context()
    with contextlib.suppress(ImportError):
        from sniffio import current_async_library_cvar

        context.run(current_async_library_cvar.set, "asyncio")
    return context


class Wakeup:
    """Wakes one task of the loop from any thread, in about 2 us and without a call into the loop.

    A thread puts its work where the task will look, then calls `notify`. The task returns from `wait` and takes all
    work that is there: several notifications before it looks count as one. `serve` calls a function instead, and under
    asyncio wakes no task for it. In a fork, which would wake its parent, all of them raise BusError.
    """

    def __init__(self) -> None:
        # At most one notification is unread at any time, so no write blocks and one read empties the pipe.
        self._fd, self._writing = os.pipe()  # 0.1 us slower than an eventfd, which only Linux has
        os.set_blocking(self._fd, False)
        os.set_blocking(self._writing, False)
        self._lock = threading.Lock()
        self._notified = False
        self._waiting = False
        self._closed = False
        self._ended: asyncio.Future[None] | None = None  # of `serve`
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
                os.write(self._writing, b"\0")

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
        self._take()

    async def serve(self, notified: Callable[[], None]) -> None:
        """Call `notified` after every notification, until cancelled or closed. Raises what it raises, or as `wait`."""
        if self._generation != len(forks):
            raise used_after_fork("wakeup", self._process)
        if self._closed:
            raise anyio.ClosedResourceError
        loop = asyncio.get_running_loop()
        self._ended = ended = loop.create_future()
        context = callback_context()

        def on_readable() -> None:
            self._take()
            try:
                context.run(notified)
            except Exception as error:
                loop.remove_reader(self._fd)
                ended.set_exception(error)

        loop.add_reader(self._fd, on_readable)
        try:
            await ended
        finally:
            self._ended = None
            if not self._closed:
                loop.remove_reader(self._fd)

    def _take(self) -> None:
        # Empty the pipe first and clear the flag second. In the other order, a notification in between would be
        # read away and leave the flag set over an empty pipe for ever.
        os.read(self._fd, 1)
        self._notified = False

    def close(self) -> None:
        """Close, and wake the task. Call it in the loop's thread; others may still notify. May be called twice."""
        if self._closed or self._generation != len(forks):
            return
        with self._lock:
            self._closed = True
            if self._waiting:
                anyio.notify_closing(self._fd)
            if self._ended is not None:
                self._ended.get_loop().remove_reader(self._fd)
                if not self._ended.done():
                    self._ended.set_exception(anyio.ClosedResourceError())
            os.close(self._fd)
            os.close(self._writing)
