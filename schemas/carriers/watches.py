"""Waits for the edges of ZeroMQ descriptors: one watch for all sockets of an event loop. See `edge_socket`, rule 2."""

import asyncio
import contextlib
import select
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import anyio
from anyio.lowlevel import RunVar

from schemas.carriers.wakeup import under_asyncio

SAFETY_POLL_S: Final = 1.0
"""Time between two readings of EVENTS while waiting for an edge."""


if sys.platform == "darwin":

    class Edges:
        """What `Edges` is under Linux, by kqueue: EV_CLEAR reports each edge once, as EPOLLET does."""

        def __init__(self) -> None:
            self._queue = select.kqueue()
            self.fileno, self.close = self._queue.fileno, self._queue.close

        def register(self, fd: int, _: int) -> None:
            self._control(fd, select.KQ_EV_ADD | select.KQ_EV_CLEAR)

        def unregister(self, fd: int) -> None:
            self._control(fd, select.KQ_EV_DELETE)

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            return [(event.ident, EDGE) for event in self._queue.control(None, 1024, timeout)]

        def _control(self, fd: int, flags: int) -> None:
            self._queue.control([select.kevent(fd, select.KQ_FILTER_READ, flags)], 0, 0)

    EDGE: Final = 1
else:
    Edges = select.epoll
    EDGE: Final = select.EPOLLIN | select.EPOLLET


class Waiter:
    """A task that waits for `flag` in a socket's EVENTS: on an event or, while it leads, in a cancel scope.

    `poll` reads EVENTS without an edge, and wakes the waiter if the flag is set.
    """

    __slots__ = ("event", "flag", "poll", "scope", "woken")

    def __init__(self, flag: int, poll: Callable[["Waiter"], None]) -> None:
        self.flag = flag
        self.poll = poll
        self.woken = False
        self.event: anyio.Event | None = None
        self.scope: anyio.CancelScope | None = None

    def wake(self) -> None:
        if not self.woken:
            self.woken = True
            self.resume()

    def resume(self) -> None:
        """Let the task run: it was woken, or there is no leader."""
        if self.scope is not None:
            self.scope.cancel()
        elif self.event is not None:
            self.event.set()


class EdgeWatch(ABC):
    """All sockets of one event loop behind one descriptor (epoll; kqueue on macOS), and all tasks that wait for them.

    Waiting for a descriptor costs a loop far more than waking a task does. One therefore waits for all sockets, and one
    wake-up serves many of them, such as a command to 256 agents in one process.

    It is edge-triggered, so each edge is reported once, read or not. That is enough, since every waiter reads EVENTS
    before it waits; level-triggered, it would keep the loop awake for a socket that nobody wants to read.
    """

    def __init__(self) -> None:
        self.closed = False
        self._edges = Edges()
        self._sockets: dict[int, list[Waiter]] = {}
        self._waiting: dict[Waiter, None] = {}

    def add(self, fd: int, waiters: list[Waiter]) -> None:
        self._sockets[fd] = waiters
        self._edges.register(fd, EDGE)

    def remove(self, fd: int) -> None:
        """Remove a socket that is about to close and whose waiters have been woken."""
        self._sockets.pop(fd, None)
        with contextlib.suppress(OSError):  # the context was destroyed, which closed the descriptor
            self._edges.unregister(fd)
        if not self._sockets:
            self.closed = True
            self._stop_waiting()
            self._edges.close()

    @abstractmethod
    async def wait(self, waiter: Waiter) -> None:
        """Return when the waiter has been woken."""

    @abstractmethod
    def _stop_waiting(self) -> None:
        """Let go of the descriptor, which is about to close."""

    def _wake_at_edges(self) -> None:
        for fd, _ in self._edges.poll(0):
            for waiter in self._sockets[fd]:
                waiter.wake()

    def _safety_poll(self) -> None:
        for waiting in self._waiting:
            if not waiting.woken:
                waiting.poll(waiting)


class LoopWatch(EdgeWatch):
    """Under asyncio the loop calls back for every edge."""

    def __init__(self) -> None:
        super().__init__()
        self._served: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._edges.fileno(), self._wake_at_edges)
        self._timer: asyncio.TimerHandle | None = None

    def serve(self, fd: int, on_edge: Callable[[], None]) -> None:
        """Let the loop itself watch this socket, without a second descriptor in between.

        That is level-triggered, so `on_edge` reads EVENTS to the end, and wakes the other waiters of the socket.
        """
        if fd not in self._served:
            self._edges.unregister(fd)
            self._served.add(fd)
        self._loop.add_reader(fd, on_edge)

    def rest(self, fd: int) -> None:
        """Don't watch this socket until `serve` is called again."""
        self._loop.remove_reader(fd)

    def end_serving(self, fd: int) -> None:
        """Watch this socket as the others again, unless it was closed."""
        if fd in self._served:
            self._served.remove(fd)
            self._loop.remove_reader(fd)
            self._edges.register(fd, EDGE)

    def remove(self, fd: int) -> None:
        """Remove a socket that is about to close and whose waiters have been woken."""
        if fd in self._served:
            self._served.remove(fd)
            self._loop.remove_reader(fd)
        super().remove(fd)

    def enter(self, waiter: Waiter) -> None:
        self._waiting[waiter] = None
        if self._timer is None:
            self._timer = self._loop.call_later(SAFETY_POLL_S, self._on_timer)

    def leave(self, waiter: Waiter) -> None:
        del self._waiting[waiter]

    async def wait(self, waiter: Waiter) -> None:
        self.enter(waiter)
        waiter.event = anyio.Event()
        try:
            await waiter.event.wait()
        finally:
            self.leave(waiter)

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiting and not self.closed:
            self._safety_poll()
            self._timer = self._loop.call_later(SAFETY_POLL_S, self._on_timer)

    def _stop_waiting(self) -> None:
        self._loop.remove_reader(self._edges.fileno())


class _TaskWatch(EdgeWatch):
    """Under trio, which has no callbacks, one of the waiting tasks leads."""

    def __init__(self) -> None:
        super().__init__()
        self._leader: Waiter | None = None
        self._next_poll = 0.0

    async def wait(self, waiter: Waiter) -> None:
        if not self._waiting:
            self._next_poll = anyio.current_time() + SAFETY_POLL_S
        self._waiting[waiter] = None
        try:
            while not waiter.woken:
                if self._leader is None:
                    await self._lead(waiter)
                else:
                    waiter.event = anyio.Event()
                    await waiter.event.wait()
        finally:
            del self._waiting[waiter]
            # The end of rule 2. If that task leaves too, it resumes the next.
            if self._leader is None and self._waiting:
                next(iter(self._waiting)).resume()

    async def _lead(self, waiter: Waiter) -> None:
        """Wait for the next edge of any socket, and wake its waiters."""
        self._leader = waiter
        waiter.scope = anyio.CancelScope(deadline=self._next_poll)
        edge = False
        try:
            with waiter.scope:
                await anyio.wait_readable(self._edges.fileno())
                edge = True
        finally:
            self._leader = waiter.scope = None
        if self.closed:
            return
        if edge:
            self._wake_at_edges()
        if anyio.current_time() >= self._next_poll:
            self._next_poll = anyio.current_time() + SAFETY_POLL_S
            self._safety_poll()

    def _stop_waiting(self) -> None:
        if self._leader is not None:
            anyio.notify_closing(self._edges.fileno())


_watches = RunVar[EdgeWatch]("rolloutctl.sockets.watch")


def watch_of_loop() -> EdgeWatch:
    """Return the watch of the running loop."""
    watch = _watches.get(None)
    if watch is None or watch.closed:
        watch = LoopWatch() if under_asyncio() else _TaskWatch()
        _watches.set(watch)
    return watch
