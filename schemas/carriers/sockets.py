"""One message on and off a ZeroMQ socket, without losing one; every socket option is set here and nowhere else.

Theory of operation. ZeroMQ signals through one descriptor per socket, and it signals *edges*: the descriptor becomes
readable when something may have happened since the socket was last touched, and any touch (a send, a receive, a look
at EVENTS) takes the signal away. A loop that waits on the descriptor after somebody else touched the socket sleeps on
a message that is already there. The rules that make waiting right:

Rule 1  Try first. On "would block" read EVENTS; wait for the descriptor only if the flag is absent.
Rule 2  One task of the loop, the leader, waits for the descriptors of all its sockets; the others follow, each on an
        event of its own. Whoever touches a socket for which somebody waits reads EVENTS afterwards and wakes those
        whose flag is set, the leader included. Who stops waiting, for whatever reason, sees to it that somebody leads.
Rule 3  After BURST messages without a pause the task yields: a flood must not starve the loop.
Rule 4  One thread and one event loop per socket, checked. Waiters are told before the descriptor is closed.
Rule 5  While waiting, look again every SAFETY_POLL_S. A look that finds what no edge announced is counted in
        `safety_polls`: that number must stay 0, and a fault then costs latency where it would cost a hang.

Cancellation. A message is taken, or handed over, after the last `await` of a call. A cancelled call has moved nothing.
"""

import contextlib
import errno
import ipaddress
import os
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from enum import Enum
from types import TracebackType
from typing import Final, Self

import anyio
import zmq
from anyio.lowlevel import RunVar, checkpoint
from zmq.backend import Socket as PlainSocket

from schemas.carriers.forks import forks, used_after_fork
from schemas.errors import AddressInUse, BusAddressError, BusError, ConfigError

Context = zmq.Context[zmq.Socket[bytes]]

BURST: Final = 64  # messages moved by one task before it yields to the loop
SAFETY_POLL_S: Final = 0.25  # between two looks at EVENTS while waiting for an edge

# Above a frame's limit libzmq cuts the peer off. How many frames a message has is for the decoder to check.
SUBSCRIPTION_BYTES_MAX: Final = 4096  # a frame from a subscriber to the publisher: a topic, nothing else
FRAME_BYTES_MAX: Final = 256 * 1024  # a frame on every other socket
EVENTS_QUEUED_MAX: Final = 1000  # messages per subscriber before the publisher drops; replay repairs the hole
CONTROL_QUEUED_MAX: Final = 256  # messages per agent, each way, between it and the router
LINGER_MS: Final = 2000  # that a closed socket may still deliver

# Plain numbers, since an enum's `|` and `&` are calls into Python.
_POLLIN, _POLLOUT, _EVENTS = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.EVENTS)
_NOW, _NOW_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT) | int(zmq.SNDMORE)
# The class under zmq.Socket: the same calls, without the sugar that doubles their cost.
_send, _recv, _get = PlainSocket.send, PlainSocket.recv, PlainSocket.get


class Sent(Enum):
    """What became of a message that was to leave at once. Only OK is true."""

    OK = "ok"  # it is queued for its peers
    FULL = "full"  # nothing was sent: the queue is full, or nobody is connected. The same message may be tried again
    GONE = "gone"  # nothing was sent: the ROUTER knows no peer of this routing id. Trying again does not help

    def __bool__(self) -> bool:
        return self is Sent.OK


class EdgeSocket:
    """One ZeroMQ socket under any event loop that anyio knows. Made by the four constructors below.

    address: where the socket is bound (with the port that the system chose), or what it dials.
    safety_polls: how often the safety poll found what no edge had announced. Must stay 0; export it.

    Belongs to the thread that made it. Any number of tasks may send and receive; each message goes to one of them.
    Raises `anyio.ClosedResourceError` from every call after `close`, and from calls that wait while it closes.
    """

    def __init__(self, sock: zmq.Socket[bytes], address: str) -> None:
        self.address = address
        self.safety_polls = 0
        self._sock = sock
        self._fd = int(sock.FD)
        self._is_router = sock.type == zmq.ROUTER
        self._thread = threading.get_ident()
        self._process, self._generation = os.getpid(), len(forks)
        self._watch: _Watch | None = None
        self._waiters: list[_Waiter] = []
        self._burst = 0
        self._closed = False
        self._edge = select.poll()
        self._edge.register(self._fd, select.POLLIN)

    async def recv(self) -> list[bytes]:
        """Return the next message as its frames, waiting for it as long as it takes."""
        if self._burst >= BURST:
            self._burst = 0
            await checkpoint()
        while (frames := self.recv_nowait()) is None:
            await self._wait(_POLLIN)
        return frames

    def recv_nowait(self) -> list[bytes] | None:
        """Return the next message as its frames, or None when there is none at this moment.

        For the rest of what one wake-up brought. It can't yield to the loop: call `recv` again after BURST of them.
        """
        self._check()
        sock = self._sock
        try:
            # A Frame tells whether more follow; with plain bytes that is another call, as dear as the first.
            frame = _recv(sock, _NOW, copy=False)
            frames = [frame.bytes]
            # A message arrives whole or not at all, so the frames after the first are there.
            while frame.more:
                frame = _recv(sock, _NOW, copy=False)
                frames.append(frame.bytes)
        except zmq.Again:
            frames = []
        except zmq.ZMQError as error:
            raise self._explain(error) from error
        self._burst += 1
        if self._waiters:
            self._settle()
        return frames or None

    async def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message, waiting while the queue is full or nobody is connected.

        Not on a ROUTER, where one slow peer would hold up all others: there `send_nowait` reports, and the peer asks
        again. Raises BusError there.
        """
        if self._is_router:
            raise BusError("a router does not wait for one slow peer: use send_nowait and look at what it returns")
        if self._burst >= BURST:
            self._burst = 0
            await checkpoint()
        while not self.send_nowait(frames):
            await self._wait(_POLLOUT)

    def send_nowait(self, frames: Sequence[bytes]) -> Sent:
        """Queue one message if that is possible at this moment; on a ROUTER the first frame is the routing id.

        Returns Sent.OK, which is true, or what hindered it: Sent.FULL, Sent.GONE. Raises ValueError for no frames.
        """
        self._check()
        if not frames:
            raise ValueError("a message has at least one frame")
        last, sent = len(frames) - 1, Sent.OK
        for index, frame in enumerate(frames):
            try:
                _send(self._sock, frame, _NOW if index == last else _NOW_MORE)
            except zmq.Again:
                # Past the first frame this means that the peer went away in the middle. libzmq then swallows what is
                # left of the message, so we must go on to its end, or the next message would be swallowed instead.
                sent = Sent.FULL
                if index == 0:
                    break
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise self._explain(error) from error
                sent = Sent.GONE
                break
        self._burst += 1
        if self._waiters:
            self._settle()
        return sent

    def set_welcome(self, frame: bytes) -> None:
        """Publisher only: what every subscriber that joins from now on receives first. b"" takes it back.

        libzmq sends the welcome as one frame and through the subscriber's own filter: a message of several frames
        must be packed into one, and it must start with a topic that agents subscribe to.
        """
        self._check()
        try:
            self._sock.set(zmq.XPUB_WELCOME_MSG, frame)
        except zmq.ZMQError as error:
            raise self._explain(error) from error

    def close(self, linger_ms: int | None = None) -> None:
        """Close, and wake whoever waits. May be called twice. linger_ms: None keeps the socket's own, LINGER_MS.

        A bound address is free a moment later, when libzmq's thread has closed it: until then it is AddressInUse.
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
            raise BusError(f"the socket at {self.address} belongs to another thread: use a queue and a Doorbell")

    def _explain(self, error: zmq.ZMQError) -> Exception:
        if self._closed or error.errno in (zmq.ENOTSOCK, zmq.ETERM):
            return anyio.ClosedResourceError()
        return BusError(f"the socket at {self.address} refused: {error}")

    async def _wait(self, flag: int) -> None:
        """Return when it is worth trying again. May return too early, never too late."""
        self._burst = 0
        if self._settle() & flag:
            return
        if self._watch is None:
            self._watch = _watch_for(self._fd)
            self._watch.add(self._fd, self._waiters)
        waiter = _Waiter(self, flag)
        self._waiters.append(waiter)
        try:
            await self._watch.wait(waiter)
        finally:
            self._waiters.remove(waiter)

    def _look(self, waiter: "_Waiter") -> None:
        """The safety poll of one waiter."""
        try:
            # An edge that came together with the timer was not missed: it still stands on the descriptor.
            if not self._edge.poll(0) and self._settle() & waiter.flag:
                self.safety_polls += 1
        except (anyio.ClosedResourceError, BusError):
            waiter.wake()  # to meet the error itself: the one who looks is another task

    def _settle(self) -> int:
        """Read EVENTS, which takes the edge away, and wake everybody it concerns. Returns EVENTS."""
        try:
            events = _get(self._sock, _EVENTS)
        except zmq.ZMQError as error:
            raise self._explain(error) from error
        assert isinstance(events, int)
        for waiter in self._waiters:
            if events & waiter.flag:
                waiter.wake()
        return events


class _Waiter:
    """A task that waits until `flag` may stand in a socket's EVENTS: on an event or, while it leads, in a scope."""

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
            self.stir()

    def stir(self) -> None:
        """Let the task look around: it was woken, or there is nobody to lead."""
        if self.scope is not None:
            self.scope.cancel()
        elif self.event is not None:
            self.event.set()


class _Watch:
    """The sockets of one event loop behind one descriptor, and all tasks that wait for them.

    Waiting for a descriptor costs a loop far more than waking a task does. So one task waits for all sockets, and a
    wake-up that concerns many of them (a command to 256 agents in one process) is paid for once.

    An edge is told once, read or not. That is enough, since nobody waits for a socket without having read its EVENTS
    after it was told; told until read, it would keep the loop awake for a socket that nobody wants to read.

    only: one socket's own descriptor, where the system has no epoll and each socket is watched by itself.
    """

    def __init__(self, only: int | None = None) -> None:
        self.closed = False
        self._epoll = select.epoll() if only is None else None
        self._fd = self._epoll.fileno() if self._epoll is not None else only or 0
        self._sockets: dict[int, list[_Waiter]] = {}
        self._waiting: dict[_Waiter, None] = {}
        self._leader: _Waiter | None = None
        self._look_at = 0.0

    def add(self, fd: int, waiters: list[_Waiter]) -> None:
        self._sockets[fd] = waiters
        if self._epoll is not None:
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    def remove(self, fd: int) -> None:
        """Forget a socket that is about to close, and whose waiters have been woken."""
        self._sockets.pop(fd, None)
        if self._epoll is not None:
            with contextlib.suppress(OSError):  # the context was destroyed under us, and the descriptor is closed
                self._epoll.unregister(fd)
        if not self._sockets:
            self.closed = True
            if self._leader is not None:
                anyio.notify_closing(self._fd)
            if self._epoll is not None:
                self._epoll.close()

    async def wait(self, waiter: _Waiter) -> None:
        """Return when the waiter has been woken."""
        if not self._waiting:
            self._look_at = anyio.current_time() + SAFETY_POLL_S
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
            # Rule 2, its end. If the one that is told leaves too, it tells the next.
            if self._leader is None and self._waiting:
                next(iter(self._waiting)).stir()

    async def _lead(self, waiter: _Waiter) -> None:
        """Wait for the next edge of any socket, and wake all whom it may concern."""
        self._leader = waiter
        waiter.scope = anyio.CancelScope(deadline=self._look_at)
        edge = False
        try:
            with waiter.scope:
                await anyio.wait_readable(self._fd)
                edge = True
        finally:
            self._leader = waiter.scope = None
        if self.closed:
            return
        if edge:
            for fd in self._sockets if self._epoll is None else [fd for fd, _ in self._epoll.poll(0)]:
                for one in self._sockets[fd]:
                    one.wake()
        if anyio.current_time() >= self._look_at:
            self._look_at = anyio.current_time() + SAFETY_POLL_S
            for one in self._waiting:
                if not one.woken:
                    one.sock._look(one)


_watches = RunVar[_Watch]("rolloutctl.sockets.watch")
_HAS_EPOLL = hasattr(select, "epoll")


def _watch_for(fd: int) -> _Watch:
    """The watch of the running loop; a new one for this descriptor alone where there is no epoll."""
    if not _HAS_EPOLL:
        return _Watch(only=fd)
    watch = _watches.get(None)
    if watch is None or watch.closed:
        watch = _Watch()
        _watches.set(watch)
    return watch


def bus_publisher(context: Context, address: str, *, insecure: bool = False) -> EdgeSocket:
    """Bind the XPUB that carries commands and heads.

    A reader that stalls loses messages and must never slow the others down, so the socket drops at EVENTS_QUEUED_MAX.
    `recv` yields one frame per change of a subscription, b"\\x01topic" or b"\\x00topic"; read them, or they pile up.
    address: `tcp://127.0.0.1:0` lets the system choose; the result is in `.address`.
    insecure: allow an address that other machines reach.
    Raises AddressInUse, BusAddressError.
    """
    sock = context.socket(zmq.XPUB)
    sock.set(zmq.XPUB_VERBOSER, 1)
    sock.set(zmq.XPUB_NODROP, 0)
    sock.set(zmq.ONLY_FIRST_SUBSCRIBE, 1)
    sock.set(zmq.MAXMSGSIZE, SUBSCRIPTION_BYTES_MAX)
    return _bind(sock, address, EVENTS_QUEUED_MAX, insecure)


def bus_router(context: Context, address: str, *, insecure: bool = False) -> EdgeSocket:
    """Bind the ROUTER that talks with each agent. Every message starts with the routing id of its agent.

    MANDATORY, so that a message for a stranger or for a full queue is reported (see Sent), not dropped in silence.
    No HANDOVER: nobody takes over a routing id, so an agent needs a new one for each of its lives.
    address, insecure, errors: as for bus_publisher.
    """
    sock = context.socket(zmq.ROUTER)
    sock.set(zmq.ROUTER_MANDATORY, 1)
    sock.set(zmq.ROUTER_HANDOVER, 0)
    sock.set(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    return _bind(sock, address, CONTROL_QUEUED_MAX, insecure)


def agent_subscriber(context: Context, address: str, topics: Sequence[bytes]) -> EdgeSocket:
    """Dial the publisher. The topics are set before the connection is, so the first thing to arrive is the welcome.

    Nobody has to listen yet: the socket keeps dialling. Raises BusAddressError for what is no address.
    """
    sock = context.socket(zmq.SUB)
    for topic in topics:
        sock.set(zmq.SUBSCRIBE, topic)
    return _connect(sock, address, EVENTS_QUEUED_MAX)


def agent_dealer(context: Context, address: str, routing_id: bytes) -> EdgeSocket:
    """Dial the router. IMMEDIATE, so nothing queues up for a bus that is not there: `send` waits for a connection.

    routing_id: 1 to 255 bytes, the first not zero (libzmq keeps those for itself); never used by another life of an
    agent. Raises ConfigError for it, BusAddressError for what is no address.
    """
    if not 1 <= len(routing_id) <= 255 or routing_id[0] == 0:
        raise ConfigError(f"a routing id has 1 to 255 bytes and does not start with a zero byte: {routing_id!r}")
    sock = context.socket(zmq.DEALER)
    sock.set(zmq.ROUTING_ID, routing_id)
    sock.set(zmq.IMMEDIATE, 1)
    return _connect(sock, address, CONTROL_QUEUED_MAX)


def _bind(sock: zmq.Socket[bytes], address: str, queued_max: int, insecure: bool) -> EdgeSocket:
    # The default of 100 overflows when a fleet of thousands joins at once.
    sock.set(zmq.BACKLOG, 4096)
    # A dead host or a half-open connection is noticed in 15 s, on both ends (TTL tells the agent's side to look too).
    # It proves that the process lives, not that its loop turns.
    sock.set(zmq.HEARTBEAT_IVL, 5_000)
    sock.set(zmq.HEARTBEAT_TIMEOUT, 15_000)
    sock.set(zmq.HEARTBEAT_TTL, 15_000)
    with _closing_on_error(sock, address, "bind"):
        _set_common(sock, address, queued_max)
        if not insecure:
            _require_local(address)
        if address.startswith("ipc://"):
            _require_unused(address)
        sock.bind(address)
        return EdgeSocket(sock, sock.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))


def _connect(sock: zmq.Socket[bytes], address: str, queued_max: int) -> EdgeSocket:
    sock.set(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    # libzmq adds jitter, and doubles up to the maximum: a fleet does not come back in one moment.
    sock.set(zmq.RECONNECT_IVL, 200)
    sock.set(zmq.RECONNECT_IVL_MAX, 30_000)
    with _closing_on_error(sock, address, "dial"):
        _set_common(sock, address, queued_max)
        sock.connect(address)
        return EdgeSocket(sock, address)


@contextlib.contextmanager
def _closing_on_error(sock: zmq.Socket[bytes], address: str, verb: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        sock.close(0)
        if not isinstance(error, zmq.ZMQError):
            raise
        if error.errno == zmq.EADDRINUSE:
            raise _in_use(address) from error
        raise BusAddressError(f"can't {verb} {address!r}: {zmq.strerror(error.errno or 0)}. {_EXAMPLES}") from error


def _set_common(sock: zmq.Socket[bytes], address: str, queued_max: int) -> None:
    port = address.rpartition(":")[2]
    if address.startswith("tcp://") and port.isdecimal() and int(port) > 65535:
        # libzmq would take it modulo 65536, and listen where nobody looks.
        raise BusAddressError(f"can't use {address!r}: the largest port is 65535. {_EXAMPLES}")
    sock.set(zmq.SNDHWM, queued_max)
    sock.set(zmq.RCVHWM, queued_max)
    sock.set(zmq.HANDSHAKE_IVL, 10_000)
    sock.set(zmq.LINGER, LINGER_MS)
    if address.startswith("tcp://["):
        sock.set(zmq.IPV6, 1)


_EXAMPLES: Final = "An address looks like tcp://127.0.0.1:5555, tcp://127.0.0.1:0 (any free port) or ipc:///run/me/bus"


def _require_local(address: str) -> None:
    """Raise BusAddressError unless only this machine can reach the address."""
    transport, _, place = address.partition("://")
    if transport in ("ipc", "inproc") and place:
        return
    if transport != "tcp" or ":" not in place:
        raise BusAddressError(f"can't bind {address!r}: not an address. {_EXAMPLES}")
    host = place.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return
    local = False
    with contextlib.suppress(ValueError):  # `*`, or a name: what it stands for is not ours to guess
        local = ipaddress.ip_address(host).is_loopback
    if not local:
        raise BusAddressError(
            f"refused to bind {address!r}: other machines can reach it, and without keys anybody there could command "
            "the engines. Bind tcp://127.0.0.1, or pass insecure=True on a network that you trust"
        )


def _require_unused(address: str) -> None:
    """libzmq takes the path of an ipc address from whoever listens there, in silence. Ask first; raise AddressInUse."""
    path = address.removeprefix("ipc://")
    if path in ("", "*") or path.startswith("@"):
        return
    # OSError: the path can't be one, which `bind` will say better.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) in (0, errno.EAGAIN):  # somebody listens, perhaps with a full backlog
            raise _in_use(address)


def _in_use(address: str) -> AddressInUse:
    return AddressInUse(f"{address} is in use, perhaps by a run that has not ended: end it, or bind another address")
