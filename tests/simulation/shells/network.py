"""A simulated network, with sockets of the same interface as those of `schemas.transport`.

    Network      who listens where, and which ways are blocked
    Host         one machine, or process: what the shells get as their ZeroMQ context
    Router, Publisher, Dealer, Subscriber    the four sockets

A connection keeps order, and each has delays of its own, so two connections of one agent do not. What breaks a
connection, and when each side notices, is drawn by the network's luck. What libzmq does by itself is done here as well:
it dials again, gives a new connection a new routing id, drops what a slow subscriber does not take, and holds what was
sent over a way that is blocked for a moment.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Final, Literal, Self
from unittest.mock import patch

import anyio

import controlplane.bus.bus
import workers.link.connection
import workers.link.link
from schemas.errors import AddressInUse
from schemas.transport.async_socket import BURST, Sent
from schemas.transport.sockets import DEAD_HOST_MS, FRAME_BYTES_MAX, REDIAL_MS, REDIAL_MS_MAX
from schemas.transport.wakeup import callback_context

Way = Literal["up", "down", "pub"]
Frames = list[bytes]

DIAL_MS: Final = (1, 5, 60)
"""How long it may take to open a connection."""
NOTICED_MS: Final = (0, 2, 40, 300)
"""How long it may take until one side notices that a connection was broken."""


class Network:
    """All hosts and connections.

    Attributes:
        late_ms: Longest time that a message is on its way.
        drops: Share of publications that a subscriber does not get, because its queue is full.
        conns: Those that at least one side takes for open.
    """

    def __init__(self, luck: Random, say: Callable[[str], None]) -> None:
        self.luck, self.say = luck, say
        self.late_ms, self.drops = 5, 0.0
        self.listeners: dict[str, _Listener] = {}
        self.conns: list[_Conn] = []
        self._ports = 5600
        self._ids = 0

    def new_port(self) -> int:
        """Return a port that nothing has had."""
        self._ports += 1
        return self._ports

    def new_id(self) -> bytes:
        """Return a routing id, as libzmq makes them."""
        self._ids += 1
        return b"\0" + self._ids.to_bytes(4, "big")

    def after(self, delay_ms: float, act: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Do something later."""
        return asyncio.get_running_loop().call_later(delay_ms / 1000, act, *args, context=callback_context())

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the shells make their sockets here. The one seam: the functions of `schemas.transport.sockets`."""
        with (
            patch.object(controlplane.bus.bus, "bus_router", Router),
            patch.object(controlplane.bus.bus, "bus_publisher", Publisher),
            patch.object(workers.link.link, "agent_subscriber", Subscriber),
            patch.object(workers.link.connection, "agent_dealer", Dealer),
        ):
            yield


class Host:
    """One process and its place in the network: what its shells get as their ZeroMQ context.

    Args:
        network: The network.
        blocked_ms: Returns how long nothing will pass on a way.

    Attributes:
        dead: The process was killed: its sockets do nothing any more.
        published_s: When it last got a publication.
    """

    def __init__(self, network: Network, blocked_ms: Callable[[Way], float] = lambda _: 0.0) -> None:
        self.network, self.blocked_ms = network, blocked_ms
        self.dead = False
        self.published_s = asyncio.get_running_loop().time()
        self.sockets: list[_Socket] = []

    def die(self) -> None:
        """Be killed. What was sent may still arrive; the other side notices sooner or later."""
        self.dead = True
        for socket in self.sockets:
            if isinstance(socket, _Listener):
                socket.stop_listening()
            for conn in list(socket.conns):
                conn.end(socket, delivers=self.network.luck.random() < 0.5)

    def conns(self) -> list["_Conn"]:
        """Its open connections."""
        return [conn for socket in self.sockets for conn in socket.conns]


def _now_ms() -> float:
    return asyncio.get_running_loop().time() * 1000


class _Conn:
    """One connection of a dialler to a listener.

    Attributes:
        id: The routing id that the listener gave it.
        silent: It is half open: it looks alive to both sides, and carries nothing.
    """

    def __init__(self, dialler: "_Dialled", listener: "_Listener") -> None:
        self.dialler, self.listener, self.publishes = dialler, listener, dialler.publishes
        self.network = dialler.host.network
        self.id = self.network.new_id()
        self.luck = Random(self.network.luck.random())  # of its own: a bus may send to two in any order
        self.silent = False
        self._arrival_ms = {True: 0.0, False: 0.0}  # of the newest message, by direction
        self._under_way: dict[bool, deque[tuple[Frames, _Deliver]]] = {True: deque(), False: deque()}
        self._ended: set[_Socket] = set()  # the sides that know of its end
        self._cut_ms: dict[bool, float] = {}  # by direction: what arrives later is lost

    def carry(self, frames: Frames, *, up: bool, deliver: "_Deliver") -> None:
        """Bring a message to the other side, in order."""
        if self.silent:
            return
        network = self.network
        delay_ms = 0.05 + self.luck.random() * network.late_ms
        blocked_ms = self._blocked_ms(up)
        if blocked_ms >= DEAD_HOST_MS:
            network.after(DEAD_HOST_MS, self.cut)
            return
        arrival_ms = max(self._arrival_ms[up], _now_ms() + blocked_ms + delay_ms)
        self._arrival_ms[up] = arrival_ms
        self._under_way[up].append((frames, deliver))
        network.after(arrival_ms - _now_ms(), self._arrive, up)

    def _arrive(self, up: bool) -> None:
        """Deliver the oldest message: timers of the same moment ring in any order."""
        if blocked_ms := self._blocked_ms(up):  # since it was sent
            self.network.after(blocked_ms, self._arrive, up)
            return
        frames, deliver = self._under_way[up].popleft()
        receiver = self.listener if up else self.dialler
        lost = self.silent or _now_ms() >= self._cut_ms.get(up, float("inf"))
        if not (lost or receiver.closed or receiver.host.dead or receiver in self._ended):
            deliver(self, frames)

    def _blocked_ms(self, up: bool) -> float:
        return self.dialler.host.blocked_ms("pub" if self.publishes else "up" if up else "down")

    def cut(self) -> None:
        """Break. Each side notices by itself; what is under way is lost, or the bus reads it all the same."""
        luck = self.luck
        for side in (self.dialler, self.listener):
            self.network.after(luck.choice(NOTICED_MS), self._notice, side)
        self._cut_ms.setdefault(False, _now_ms())
        if luck.random() < 0.7:
            self._cut_ms.setdefault(True, _now_ms())

    def end(self, by: "_Socket", *, delivers: bool = True) -> None:
        """Be closed by one side. What it had sent still arrives, unless it was killed."""
        self._notice(by)
        if not delivers:
            self._cut_ms.setdefault(by is self.dialler, _now_ms())
        if not self.silent:
            other = self.listener if by is self.dialler else self.dialler
            arrival_ms = max(0.0, self._arrival_ms[by is self.dialler] - _now_ms())
            self.network.after(arrival_ms + self.luck.choice(NOTICED_MS), self._notice, other)

    def _notice(self, side: "_Socket") -> None:
        if side not in self._ended:
            self._ended.add(side)
            side.lose(self)


_Deliver = Callable[[_Conn, Frames], None]


class _Socket:
    """What all of them have: a queue of received messages, and tasks that wait."""

    publishes = False

    def __init__(self, host: Host, address: str) -> None:
        self.host, self.address = host, address
        self.closed = False
        self.conns: list[_Conn] = []
        self._inbox: deque[Frames] = deque()
        self._changed: asyncio.Future[None] | None = None
        self._receive: Callable[[Frames], None] | None = None
        self._ended: asyncio.Future[None] | None = None  # of `serve`
        self._planned = False
        host.sockets.append(self)

    # --- receiving ----------------------------------------------------------------------------------------------------

    async def recv(self) -> Frames:
        while (frames := self.recv_nowait()) is None:
            await self._wait()
        return frames

    def recv_nowait(self) -> Frames | None:
        self._check()
        return self._inbox.popleft() if self._inbox else None

    def recv_many(self, limit: int) -> list[Frames]:
        self._check()
        return [self._inbox.popleft() for _ in range(min(limit, len(self._inbox)))]

    async def serve(self, receive: Callable[[Frames], None]) -> None:
        self._check()
        assert self._receive is None, "two tasks serve one socket"
        self._receive, self._context = receive, callback_context()
        self._ended = asyncio.get_running_loop().create_future()
        self._plan()
        try:
            await self._ended
        finally:
            self._receive = None

    def _deliver(self, conn: _Conn, frames: Frames) -> None:
        self._inbox.append(frames)
        self._wake()

    def _plan(self) -> None:
        if self._receive is not None and self._inbox and not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._take, context=self._context)

    def _take(self) -> None:
        self._planned = False
        ended = self._ended
        try:
            for _ in range(BURST):
                if ended is None or ended.done() or self._receive is None or not self._inbox:
                    return
                self._receive(self._inbox.popleft())
            self._plan()
        except Exception as error:
            if ended is not None and not ended.done():
                ended.set_exception(error)

    # --- sending ------------------------------------------------------------------------------------------------------

    async def send(self, frames: Sequence[bytes]) -> None:
        while not self.send_nowait(frames):
            await self._wait()

    def send_nowait(self, frames: Sequence[bytes]) -> Sent:
        raise NotImplementedError

    # --- the end ------------------------------------------------------------------------------------------------------

    def lose(self, conn: _Conn) -> None:
        if conn in self.conns:
            self.conns.remove(conn)

    def close(self, linger_ms: int | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        for conn in list(self.conns):
            conn.end(self, delivers=linger_ms != 0)
        self._wake()
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(anyio.ClosedResourceError())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self.closed:
            raise anyio.ClosedResourceError

    async def _wait(self) -> None:
        self._check()
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _wake(self) -> None:
        self._plan()
        if self._changed is not None:
            changed, self._changed = self._changed, None
            changed.set_result(None)


class _Listener(_Socket):
    def __init__(self, host: Host, address: str) -> None:
        if address.endswith(":0"):
            address = f"{address[:-1]}{host.network.new_port()}"
        if address in host.network.listeners:
            raise AddressInUse(f"{address} is in use")
        super().__init__(host, address)
        host.network.listeners[address] = self

    def stop_listening(self) -> None:
        if self.host.network.listeners.get(self.address) is self:
            del self.host.network.listeners[self.address]

    def accept(self, conn: _Conn) -> None:
        self.conns.append(conn)

    def close(self, linger_ms: int | None = None) -> None:
        self.stop_listening()
        super().close(linger_ms)


class Router(_Listener):
    """As `bus_router`."""

    def __init__(self, context: Host, address: str, **_: object) -> None:
        super().__init__(context, address)

    def send_nowait(self, frames: Sequence[bytes]) -> Sent:
        self._check()
        conn = next((conn for conn in self.conns if conn.id == frames[0]), None)
        if conn is None:
            return Sent.GONE
        conn.carry(list(frames[1:]), up=False, deliver=conn.dialler._deliver)
        return Sent.OK

    def _deliver(self, conn: _Conn, frames: Frames) -> None:
        super()._deliver(conn, [conn.id, *frames])


class Publisher(_Listener):
    """As `bus_publisher`. No peer in this network floods it."""

    publishes = True
    held_s = 0.0

    def __init__(self, context: Host, address: str, **_: object) -> None:
        super().__init__(context, address)
        self._welcome = b""

    def cut_off_floods(self) -> int:
        return 0

    def set_welcome(self, frame: bytes) -> None:
        self._check()
        self._welcome = frame

    def send_nowait(self, frames: Sequence[bytes]) -> Sent:
        self._check()
        for conn in self.conns:
            if conn.luck.random() >= self.host.network.drops:
                self._send(conn, list(frames))
        return Sent.OK

    def accept(self, conn: _Conn) -> None:
        super().accept(conn)
        assert isinstance(conn.dialler, Subscriber)
        for topic in conn.dialler.topics:
            self._deliver(conn, [b"\x01" + topic])
        if self._welcome:
            self._send(conn, [self._welcome])

    def _send(self, conn: _Conn, frames: Frames) -> None:
        assert isinstance(conn.dialler, Subscriber)
        if frames[0].startswith(tuple(conn.dialler.topics)):
            conn.carry(frames, up=False, deliver=conn.dialler._deliver)


class _Dialled(_Socket):
    def __init__(self, host: Host, address: str) -> None:
        super().__init__(host, address)
        self._redial_ms = REDIAL_MS
        self._dial()

    @property
    def conn(self) -> _Conn | None:
        """The open connection."""
        return self.conns[0] if self.conns else None

    def opened(self, conn: _Conn) -> None:
        pass

    def lose(self, conn: _Conn) -> None:
        open_before = conn in self.conns
        super().lose(conn)
        if open_before and not (self.closed or self.host.dead):
            self._dial()

    def _dial(self, delay_ms: float | None = None) -> None:
        luck = self.host.network.luck
        self._dialling = self.host.network.after(
            luck.choice(DIAL_MS) if delay_ms is None else delay_ms, self._try, luck.random()
        )

    def _try(self, jitter: float) -> None:
        if self.closed or self.host.dead or self.conns:
            return
        listener = self.host.network.listeners.get(self.address)
        ways: tuple[Way, ...] = ("pub",) if self.publishes else ("up", "down")
        if listener is None or any(map(self.host.blocked_ms, ways)):
            self._redial_ms = min(2 * self._redial_ms, REDIAL_MS_MAX)
            self._dial(self._redial_ms * (1 + jitter))
            return
        self._redial_ms = REDIAL_MS
        conn = _Conn(self, listener)
        self.conns.append(conn)
        listener.accept(conn)
        self.opened(conn)
        self._wake()


class Dealer(_Dialled):
    """As `agent_dealer`, without keys."""

    def __init__(self, context: Host, address: str, keys: None = None, *, watched: bool = True, probe: bool = False):
        self.watched, self._probe = watched, probe
        super().__init__(context, address)

    def opened(self, conn: _Conn) -> None:
        if self._probe:
            conn.carry([b""], up=True, deliver=conn.listener._deliver)

    def send_nowait(self, frames: Sequence[bytes]) -> Sent:
        self._check()
        if self.host.dead:
            return Sent.FULL
        conn = self.conn
        if conn is None:
            return Sent.FULL
        if max(map(len, frames)) > FRAME_BYTES_MAX:
            conn.cut()
            return Sent.OK
        conn.carry(list(frames), up=True, deliver=conn.listener._deliver)
        return Sent.OK

    async def refusal(self) -> None:
        """Return when the connection is open."""
        self._check()
        while self.watched and self.conn is None:
            await self._wait()
            self._check()


class Subscriber(_Dialled):
    """As `agent_subscriber`, without keys."""

    publishes = True

    def __init__(self, context: Host, address: str, topics: Sequence[bytes], keys: None = None) -> None:
        self.topics = topics
        super().__init__(context, address)

    def _deliver(self, conn: _Conn, frames: Frames) -> None:
        self.host.published_s = asyncio.get_running_loop().time()
        super()._deliver(conn, frames)
