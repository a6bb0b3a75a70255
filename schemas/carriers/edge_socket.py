"""Sends and receives messages on a ZeroMQ socket under any event loop, without losing any.

Theory of operation. ZeroMQ has one file descriptor per socket, and it signals *edges*: it becomes readable when
something may have happened since the socket was last touched, and any touch (a send, a receive, reading EVENTS) clears
the signal. A loop that waits on the descriptor after somebody else touched the socket sleeps although a message is
there. These rules make waiting safe:

Rule 1  Try first. On "would block" read EVENTS; wait for the descriptor only if the flag is not set.
Rule 2  One waits for the descriptors of all sockets of a loop: asyncio itself, which calls back for every edge, or
        under trio a task, the leader. The others follow, each waiting for an event of its own. Whoever touches a socket
        that has waiters reads EVENTS afterwards and wakes those whose flag is set, including the leader. A leader that
        stops waiting, for any reason, resumes another.
Rule 3  After BURST messages without a pause the task yields, so that a flood can't starve the loop.
Rule 4  One thread and one event loop per socket, checked. Waiters are woken before the descriptor is closed.
Rule 5  While waiting, read EVENTS every SAFETY_POLL_S. What is found without an edge is counted in `safety_polls`. That
        number must stay 0; a fault then costs latency instead of a hang.

Two ways to receive. `recv` suits a task that waits for one message now and then. `serve` passes every message to a
function, and under asyncio no task wakes up for it: the loop calls it (0.6 µs instead of 25).

Cancellation. A message is received or sent after the last `await` of a call, so a cancelled call has done neither.
"""

import asyncio
import contextlib
import errno
import os
import select
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from types import TracebackType
from typing import Final, Self

import anyio
import zmq
from anyio.lowlevel import RunVar, checkpoint
from zmq.backend import Socket as PlainSocket

from schemas.carriers.forks import forks, used_after_fork
from schemas.carriers.wakeup import callback_context, under_asyncio
from schemas.errors import BusError

BURST: Final = 64  # messages that a task sends and receives before it yields to the loop
SAFETY_POLL_S: Final = 0.25  # between two readings of EVENTS while waiting for an edge

# Plain integers: `|` and `&` of an enum are calls into Python.
_POLLIN, _POLLOUT, _EVENTS = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.EVENTS)
_NOW, _NOW_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT) | int(zmq.SNDMORE)
# The base class of zmq.Socket: the same calls at half the cost.
_send, _recv, _get = PlainSocket.send, PlainSocket.recv, PlainSocket.get


class Sent(Enum):
    """Result of sending without waiting. Only OK is true."""

    OK = "ok"  # queued for its peers
    FULL = "full"  # not sent: the queue is full, or nobody is connected. Trying again may help
    GONE = "gone"  # not sent: the ROUTER has no peer with this routing id. Trying again does not help

    def __bool__(self) -> bool:
        return self is Sent.OK


class EdgeSocket:
    """One ZeroMQ socket under any event loop that anyio supports. Made by the functions in `sockets`.

    It belongs to the thread that made it. Any number of tasks may send and receive; each message goes to one of them.
    Every call after `close`, and every call that waits while it closes, raises `anyio.ClosedResourceError`.

    Args:
        sock: The socket; it is closed with this.
        address: Where it is bound, with the port that the system chose, or what it dials.
        with_key: Put the public key of the sender before the frames of each message.

    Attributes:
        address: As given.
        safety_polls: How often the safety poll found something that no edge had announced. Must stay 0.
    """

    def __init__(self, sock: zmq.Socket[bytes], address: str, *, with_key: bool = False) -> None:
        self.address = address
        self.safety_polls = 0
        self._sock = sock
        self._fd = int(sock.FD)
        self._is_router = sock.type == zmq.ROUTER
        self._with_key = with_key
        self._thread = threading.get_ident()
        self._process, self._generation = os.getpid(), len(forks)
        self._watch: _Watch | None = None
        self._waiters: list[_Waiter] = []
        self._burst = 0
        self._closed = False
        self._received: zmq.Frame | None = None  # the last frame
        self._edge = select.poll()
        self._edge.register(self._fd, select.POLLIN)

    async def recv(self) -> list[bytes]:
        """Return the frames of the next message; wait until there is one."""
        if self._burst >= BURST:
            self._burst = 0
            await checkpoint()
        while (frames := self.recv_nowait()) is None:
            await self._wait(_POLLIN)
        return frames

    async def serve(self, receive: Callable[[list[bytes]], None]) -> None:
        """Pass the frames of each message to `receive`, in order, until cancelled. No `recv` beside it.

        Raises:
            ClosedResourceError: The socket was closed.
            Exception: Whatever `receive` raises.
        """
        self._check()
        if isinstance(watch := self._join_watch(), _LoopWatch):
            receiver = _Receiver(self, receive, watch)
            try:
                await receiver.ended
            finally:
                receiver.end()
        while True:
            receive(await self.recv())

    def recv_nowait(self) -> list[bytes] | None:
        """Return the frames of the next message, or None if there is none now.

        Meant for the messages behind one that `recv` returned. It can't yield to the loop: after BURST messages, call
        `recv` again.
        """
        self._check()
        sock = self._sock
        try:
            # A Frame knows whether more follow; with plain bytes that takes a second call of the same cost.
            frame = _recv(sock, _NOW, copy=False)
            frames = [_sender_key(frame), frame.bytes] if self._with_key else [frame.bytes]
            # A message arrives whole or not at all, so the rest of its frames are there.
            while frame.more:
                frame = _recv(sock, _NOW, copy=False)
                frames.append(frame.bytes)
        except zmq.Again:
            frames = []
        except zmq.ZMQError as error:
            raise self._translate(error) from error
        else:
            self._received = frame
        self._burst += 1
        if self._waiters:
            self._read_events()
        return frames or None

    def cut_off_sender(self) -> None:
        """Break the connection on which the last message came. libzmq can't, so this shuts it down underneath."""
        if self._received is None:
            return
        # The connection may have closed, and its descriptor may be another one's by now. One at our address is at worst
        # an honest peer's, which dials again.
        with (
            contextlib.suppress(OSError, zmq.ZMQError),
            socket.socket(fileno=os.dup(int(self._received.get(zmq.SRCFD)))) as connection,
        ):
            if _address_of(connection) == self.address.rpartition(":")[2]:
                connection.shutdown(socket.SHUT_RDWR)

    async def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message; wait while the queue is full or nobody is connected.

        Raises:
            BusError: This is a ROUTER, where one slow peer would block all others. Use `send_nowait`.
        """
        if self._is_router:
            raise BusError("a router does not wait for one slow peer: use send_nowait and check its result")
        if self._burst >= BURST:
            self._burst = 0
            await checkpoint()
        while not self.send_nowait(frames):
            await self._wait(_POLLOUT)

    def send_nowait(self, frames: Sequence[bytes]) -> Sent:
        """Queue one message if that is possible now, and return what happened to it.

        Args:
            frames: At least one frame, or ValueError. On a ROUTER the first is the routing id.
        """
        self._check()
        if not frames:
            raise ValueError("a message has at least one frame")
        last, sent = len(frames) - 1, Sent.OK
        for index, frame in enumerate(frames):
            try:
                _send(self._sock, frame, _NOW if index == last else _NOW_MORE)
            except zmq.Again:
                # After the first frame this means that the peer disconnected in between. libzmq then drops the rest of
                # the message, so all of it has to be sent; otherwise the next message would be dropped in its place.
                sent = Sent.FULL
                if index == 0:
                    break
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise self._translate(error) from error
                sent = Sent.GONE
                break
        self._burst += 1
        if self._waiters:
            self._read_events()
        return sent

    def set_welcome(self, frame: bytes) -> None:
        """Set the first message for every new subscriber. Publisher only. b"" removes it.

        libzmq sends it as one frame and applies the subscriber's filter: a message of several frames must be joined
        into one, and it must start with a topic that agents subscribe to.
        """
        self._check()
        try:
            self._sock.set(zmq.XPUB_WELCOME_MSG, frame)
        except zmq.ZMQError as error:
            raise self._translate(error) from error

    def unbind(self) -> None:
        """Accept no more connections; those that exist stay."""
        self._check()
        try:
            self._sock.unbind(self.address)
        except zmq.ZMQError as error:
            raise self._translate(error) from error

    def close(self, linger_ms: int | None = None) -> None:
        """Close, and wake all waiters. May be called twice.

        libzmq's thread frees a bound address a moment later; until then binding it again raises AddressInUse.

        Args:
            linger_ms: Time to deliver what is queued; None for that of the socket.
        """
        if self._closed:
            return
        self._check()
        self._closed = True
        for waiter in self._waiters:
            waiter.wake()
        if self._watch is not None:
            self._watch.remove(self._fd)
        self._sock.close(linger_ms)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _check(self) -> None:
        if self._generation != len(forks):
            raise used_after_fork("socket", self._process)
        if self._thread != threading.get_ident():
            raise BusError(f"the socket at {self.address} belongs to another thread: use a queue and a Wakeup")

    def _translate(self, error: zmq.ZMQError) -> Exception:
        if self._closed or error.errno in (zmq.ENOTSOCK, zmq.ETERM):
            return anyio.ClosedResourceError()
        return BusError(f"the socket at {self.address} refused: {error}")

    async def _wait(self, flag: int) -> None:
        """Return when trying again may succeed. May return too early, never too late."""
        self._burst = 0
        if self._read_events() & flag:
            return
        watch = self._join_watch()
        waiter = _Waiter(self, flag)
        self._waiters.append(waiter)
        try:
            await watch.wait(waiter)
        finally:
            self._waiters.remove(waiter)

    def _join_watch(self) -> "_Watch":
        if self._watch is None:
            self._watch = _watch_of_loop()
            self._watch.add(self._fd, self._waiters)
        return self._watch

    def _safety_poll(self, waiter: "_Waiter") -> None:
        try:
            # An edge that came at the same time as the timer was not missed: the descriptor still shows it.
            if not self._edge.poll(0) and self._read_events() & waiter.flag:
                self.safety_polls += 1
        except (anyio.ClosedResourceError, BusError):
            waiter.wake()  # the error is for the waiting task, and this is another one

    def _read_events(self) -> int:
        """Read EVENTS, which clears the edge; wake all waiters whose flag is set; return EVENTS."""
        try:
            events = _get(self._sock, _EVENTS)
        except zmq.ZMQError as error:
            raise self._translate(error) from error
        assert isinstance(events, int)
        for waiter in self._waiters:
            if events & waiter.flag:
                waiter.wake()
        return events


def _address_of(connection: socket.socket) -> str:
    """The port on this side, or the path; as an address ends with it."""
    name = connection.getsockname()
    return str(name[1]) if isinstance(name, tuple) else f"//{name}"


def _sender_key(frame: zmq.Frame) -> bytes:
    """The key that the ZAP handler let in; empty for an inproc peer, which has none."""
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""


class _Waiter:
    """A task that waits for `flag` in a socket's EVENTS: on an event or, while it leads, in a cancel scope."""

    __slots__ = ("event", "flag", "scope", "sock", "woken")

    def __init__(self, sock: EdgeSocket, flag: int) -> None:
        self.sock = sock
        self.flag = flag
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


class _Receiver(_Waiter):
    """Takes the place of a task that waits for messages: under asyncio, the loop itself takes them."""

    __slots__ = ("_context", "_loop", "_receive", "_watch", "ended")

    def __init__(self, sock: EdgeSocket, receive: Callable[[list[bytes]], None], watch: "_LoopWatch") -> None:
        super().__init__(sock, _POLLIN)
        self._receive, self._watch = receive, watch
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._context = callback_context()
        sock._waiters.append(self)
        watch.enter(self)
        self.wake()

    def end(self) -> None:
        self.ended.cancel()
        self._watch.leave(self)
        self.sock._waiters.remove(self)

    def resume(self) -> None:
        self._loop.call_soon(self._take, context=self._context)

    def _take(self) -> None:
        """Take messages until there are none, or BURST of them."""
        if self.ended.done():
            return
        sock = self.sock
        try:
            for _ in range(BURST):
                if (frames := sock.recv_nowait()) is None:
                    break
                self._receive(frames)
                if self.ended.done():
                    return
            self.woken = False
            sock._read_events()  # wakes this one again, if need be
        except Exception as error:
            self.ended.set_exception(error)


class _Watch(ABC):
    """All sockets of one event loop behind one epoll descriptor, and all tasks that wait for them.

    Waiting for a descriptor costs a loop far more than waking a task does. One therefore waits for all sockets, and one
    wake-up serves many of them, such as a command to 256 agents in one process.

    epoll is edge-triggered, so each edge is reported once, read or not. That is enough, since every waiter reads EVENTS
    before it waits; level-triggered, it would keep the loop awake for a socket that nobody wants to read.
    """

    def __init__(self) -> None:
        self.closed = False
        self._epoll = select.epoll()
        self._sockets: dict[int, list[_Waiter]] = {}
        self._waiting: dict[_Waiter, None] = {}

    def add(self, fd: int, waiters: list[_Waiter]) -> None:
        self._sockets[fd] = waiters
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    def remove(self, fd: int) -> None:
        """Remove a socket that is about to close and whose waiters have been woken."""
        self._sockets.pop(fd, None)
        with contextlib.suppress(OSError):  # the context was destroyed, which closed the descriptor
            self._epoll.unregister(fd)
        if not self._sockets:
            self.closed = True
            self._stop_waiting()
            self._epoll.close()

    @abstractmethod
    async def wait(self, waiter: _Waiter) -> None:
        """Return when the waiter has been woken."""

    @abstractmethod
    def _stop_waiting(self) -> None:
        """Let go of the epoll descriptor, which is about to close."""

    def _wake_at_edges(self) -> None:
        for fd, _ in self._epoll.poll(0):
            for waiter in self._sockets[fd]:
                waiter.wake()

    def _safety_poll(self) -> None:
        for waiting in self._waiting:
            if not waiting.woken:
                waiting.sock._safety_poll(waiting)


class _LoopWatch(_Watch):
    """Under asyncio the loop calls back for every edge."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._wake_at_edges)
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, waiter: _Waiter) -> None:
        self._waiting[waiter] = None
        if self._timer is None:
            self._timer = self._loop.call_later(SAFETY_POLL_S, self._on_timer)

    def leave(self, waiter: _Waiter) -> None:
        del self._waiting[waiter]

    async def wait(self, waiter: _Waiter) -> None:
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
        self._loop.remove_reader(self._epoll.fileno())


class _TaskWatch(_Watch):
    """Under trio, which has no callbacks, one of the waiting tasks leads."""

    def __init__(self) -> None:
        super().__init__()
        self._leader: _Waiter | None = None
        self._next_poll = 0.0

    async def wait(self, waiter: _Waiter) -> None:
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

    async def _lead(self, waiter: _Waiter) -> None:
        """Wait for the next edge of any socket, and wake its waiters."""
        self._leader = waiter
        waiter.scope = anyio.CancelScope(deadline=self._next_poll)
        edge = False
        try:
            with waiter.scope:
                await anyio.wait_readable(self._epoll.fileno())
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
            anyio.notify_closing(self._epoll.fileno())


_watches = RunVar[_Watch]("rolloutctl.sockets.watch")


def _watch_of_loop() -> _Watch:
    """Return the watch of the running loop."""
    watch = _watches.get(None)
    if watch is None or watch.closed:
        watch = _LoopWatch() if under_asyncio() else _TaskWatch()
        _watches.set(watch)
    return watch
