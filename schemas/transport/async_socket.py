"""Sends and receives messages on a ZeroMQ socket in an asyncio loop, without losing any.

Theory of operation. ZeroMQ has one file descriptor per socket, and it signals *edges*: it becomes readable when
something may have happened since the socket was last touched, and any touch (a send, a receive, reading EVENTS) clears
the signal. A loop that waits on the descriptor after another task touched the socket sleeps although a message is
there. These rules make waiting safe:

Rule 1  Try first. On "would block" read EVENTS; wait for the descriptor only if the flag is not set.
Rule 2  The loop itself watches the descriptor. At an edge, and after each touch while tasks wait, EVENTS is read, and
        those whose flag is set are woken. For a handler that the loop calls, EVENTS is read after it, once.
Rule 3  After BURST messages without a pause the task yields, so that a flood can't starve the loop.
Rule 4  One thread and one event loop per socket, checked. Waiters are woken before the descriptor is closed. Another
        thread may touch it while that one is held up outside, by the methods that end in `elsewhere`: the caller has a
        lock that the owner needs before it goes on, and the owner then calls `recheck`.
Rule 5  While waiting, read EVENTS every SAFETY_POLL_S. What is found without an edge is counted in `safety_polls`. That
        number must stay 0; a fault then costs latency instead of a hang.

Two ways to receive. `recv` suits a task that waits for one message now and then. `serve` passes every message to a
function, and no task wakes up for it: the loop calls it (0.6 µs instead of 25).

Cancellation. A message is received or sent after the last `await` of a call, so a cancelled call has done neither.
"""

import asyncio
import contextlib
import errno
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Self, cast

import anyio
import zmq
from anyio.lowlevel import checkpoint
from zmq.backend import Socket as PlainSocket

from schemas.errors import BusError
from schemas.transport.forks import forks, listening, place_of, used_after_fork
from schemas.transport.wakeup import callback_context

BURST: Final = 64  # messages that a task sends and receives before it yields to the loop
SAFETY_POLL_S: Final = 1.0  # time between two readings of EVENTS while waiting for an edge

# Plain integers: `|` and `&` of an enum are calls into Python.
_POLLIN, _POLLOUT, _EVENTS = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.EVENTS)
_NOW, _NOW_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT) | int(zmq.SNDMORE)
# The base class of zmq.Socket: the same calls at half the cost.
_send, _recv = PlainSocket.send, PlainSocket.recv
_get = cast("Callable[[PlainSocket, int], int]", PlainSocket.get)  # asked for a number only


class Sent(Enum):
    """Result of sending without waiting. Only OK is true."""

    OK = "ok"  # queued for its peers
    FULL = "full"  # not sent: the queue is full, or no peer is connected. Trying again may help
    GONE = "gone"  # not sent: the ROUTER has no peer with this routing id. Trying again does not help

    def __bool__(self) -> bool:
        return self is Sent.OK


class AsyncZmqSocket:
    """One ZeroMQ socket in an asyncio loop. Made by the functions in `sockets`.

    It belongs to the thread that made it. Any number of tasks may send and receive; each message goes to one of them.
    Every call after `close`, and every call that waits while it closes, raises `anyio.ClosedResourceError`.

    Args:
        sock: The socket; it is closed with this.
        address: Where it is bound, with the port that the system chose, or what it dials.
        with_key: Put the public key of the sender before the frames of each message.
        listens: It is bound, and a fork of this process must not keep its address in use.

    Attributes:
        safety_polls: How often the safety poll found something that no edge had announced. Must stay 0.
    """

    def __init__(self, sock: zmq.Socket[bytes], address: str, *, with_key: bool = False, listens: bool = False) -> None:
        self.address = address
        self.safety_polls = 0
        self._sock = sock
        self._fd = int(sock.FD)
        self._is_router = sock.type == zmq.ROUTER
        self._with_key = with_key
        self._place = place_of(address) if listens else None
        if self._place is not None:
            listening.add(self._place)
        self._thread = threading.get_ident()
        self._process, self._generation = os.getpid(), len(forks)
        self._loop: asyncio.AbstractEventLoop | None = None  # once something has waited
        self._poll_timer: asyncio.TimerHandle | None = None
        self._waiters: list[_Waiter] = []
        self._burst = 0
        self._closed = False
        self._received: zmq.Frame | None = None  # the last frame
        self._serving = False  # a handler runs, and EVENTS is read after it
        self._receiver: _Receiver | None = None  # while the loop serves it
        self._empty = False  # EVENTS showed no message, and nothing has touched the socket since
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
        receiver = _Receiver(self, receive, self._watched_loop())
        self._receiver = receiver
        self._waiters.append(receiver)
        receiver.wake()
        try:
            await receiver.ended
        finally:
            receiver.ended.cancel()
            self._receiver = None
            self._waiters.remove(receiver)

    def recv_nowait(self) -> list[bytes] | None:
        """Return the frames of the next message, or None if there is none now.

        Meant for the messages behind one that `recv` returned. It can't yield to the loop: after BURST messages, call
        `recv` again.
        """
        self._check()
        frames = self._next()
        self._burst += 1
        self._touched()
        return frames

    def recv_many(self, limit: int) -> list[list[bytes]]:
        """Return the messages that are there now, in order. As many as `limit` means that there may be more."""
        self._check()
        messages: list[list[bytes]] = []
        if self._read_events() & _POLLIN:
            while len(messages) < limit and (frames := self._next()) is not None:
                messages.append(frames)
            self._burst += len(messages)
            self._touched()
        return messages

    def take_elsewhere(self) -> list[bytes] | None:
        """Return the frames of the next message, or None, in another thread than the socket's (rule 4)."""
        return self._next()

    def send_elsewhere(self, frames: Sequence[bytes]) -> None:
        """Queue one message if that is possible, in another thread than the socket's (rule 4)."""
        self._send_now(frames)

    def recheck(self) -> None:
        """Wake the waiters for what another thread has left on the socket."""
        self._check()
        self._read_events()

    def _next(self) -> list[bytes] | None:
        """The next message. The caller reads EVENTS afterwards."""
        sock = self._sock
        self._empty = False
        try:
            # A Frame knows whether more follow. Plain bytes cost half as much, but it takes a second call to ask. They
            # do where a frame always follows: behind the routing id.
            frames = [_recv(sock, _NOW)] if self._is_router else []
            frame = _recv(sock, _NOW, False)
            frames.append(frame.bytes)
            # A message arrives whole or not at all, so the rest of its frames are there.
            while frame.more:
                frame = _recv(sock, _NOW, False)
                frames.append(frame.bytes)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise self._translate(error) from error
        self._received = frame
        return [_sender_key(frame), *frames] if self._with_key else frames

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
            if address_of(connection) == self.address.rpartition(":")[2]:
                connection.shutdown(socket.SHUT_RDWR)

    async def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message; wait while the queue is full or no peer is connected.

        Raises BusError on a ROUTER, where one slow peer would block all others.
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
        sent = self._send_now(frames)
        self._burst += 1
        self._touched()
        return sent

    def _send_now(self, frames: Sequence[bytes]) -> Sent:
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
        self._empty = False
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
        """
        if self._closed:
            return
        self._check()
        self._closed = True
        self._wake_all()
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._sock.close(linger_ms)
        if self._place is not None:
            listening.discard(self._place)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _get_events(self) -> int:
        return _get(self._sock, _EVENTS)

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
        waiter = _Waiter(flag, self._watched_loop())
        self._waiters.append(waiter)
        try:
            await waiter.ended
        finally:
            self._waiters.remove(waiter)

    def _watched_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop, which calls back for every edge from now on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._on_edge)
        if self._poll_timer is None:
            self._poll_timer = self._loop.call_later(SAFETY_POLL_S, self._safety_poll, self._loop)
        return self._loop

    def _on_edge(self) -> None:
        if self._receiver is not None and not self._receiver.woken:
            self._receiver.take()
            return
        try:
            self._read_events()
        except (anyio.ClosedResourceError, BusError):
            self._wake_all()

    def _safety_poll(self, loop: asyncio.AbstractEventLoop) -> None:
        self._poll_timer = None
        if self._closed or not self._waiters:
            return
        self._poll_timer = loop.call_later(SAFETY_POLL_S, self._safety_poll, loop)
        waiting = [waiter.flag for waiter in self._waiters if not waiter.woken]
        try:
            # An edge that came at the same time as the timer was not missed: the descriptor still shows it.
            if waiting and not self._edge.poll(0):
                events = self._read_events()
                self.safety_polls += any(events & flag for flag in waiting)
        except (anyio.ClosedResourceError, BusError):
            self._wake_all()  # the error is for the waiting tasks

    def _wake_all(self) -> None:
        for waiter in self._waiters:
            waiter.wake()

    def _touched(self) -> None:
        """Rule 2, after a touch."""
        if self._waiters and not self._serving:
            self._read_events()

    def _read_events(self) -> int:
        """Read EVENTS, which clears the edge; wake all waiters whose flag is set; return EVENTS."""
        try:
            events = self._get_events()
        except zmq.ZMQError as error:
            raise self._translate(error) from error
        self._empty = not events & _POLLIN
        for waiter in self._waiters:
            if events & waiter.flag:
                waiter.wake()
        return events


def address_of(connection: socket.socket) -> str:
    """Return the port on this side, or the path; as an address ends with it."""
    name = connection.getsockname()
    return str(name[1]) if isinstance(name, tuple) else f"//{name}"


def _sender_key(frame: zmq.Frame) -> bytes:
    """The key that the ZAP handler let in; empty for an inproc peer, which has none."""
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""


class _Waiter:
    """A task that waits for `flag` in a socket's EVENTS."""

    __slots__ = ("ended", "flag", "woken")

    def __init__(self, flag: int, loop: asyncio.AbstractEventLoop) -> None:
        self.flag = flag
        self.ended: asyncio.Future[None] = loop.create_future()
        self.woken = False

    def wake(self) -> None:
        self.woken = True
        if not self.ended.done():
            self.ended.set_result(None)


class _Receiver(_Waiter):
    """Takes the place of a task that waits for messages: the loop itself takes them."""

    __slots__ = ("_context", "_loop", "_receive", "_sock")

    def __init__(
        self, sock: AsyncZmqSocket, receive: Callable[[list[bytes]], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(_POLLIN, loop)
        self._sock, self._receive, self._loop = sock, receive, loop
        self._context = callback_context()

    def wake(self) -> None:
        if not self.woken:
            self.woken = True
            self._loop.call_soon(self._take, context=self._context)

    def take(self) -> None:
        """Take messages now, in an edge's callback."""
        self.woken = True
        self._context.run(self._take)

    def _take(self) -> None:
        """Take messages until there are none, or BURST of them."""
        if self.ended.done():
            return
        sock = self._sock
        sock._serving, sock._burst = True, 0
        try:
            while sock._burst < BURST:
                if (frames := sock._next()) is None:
                    break
                sock._burst += 1
                self._receive(frames)
                # Mostly there was one. To ask costs less than the exception of a vain attempt.
                if self.ended.done() or sock._empty or not sock._read_events() & _POLLIN:
                    break
            self.woken = False
            if not sock._empty:
                sock._read_events()  # wakes this one again, if need be
        except Exception as error:
            if not self.ended.done():
                self.ended.set_exception(error)
        finally:
            sock._serving = False
