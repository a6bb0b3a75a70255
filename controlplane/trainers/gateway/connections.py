"""The gateway's connections: how many there are at once, and how long one may take to send a request.

The gateway shares its process with the bus, and so its file descriptors. Connections past the limit wait in the kernel
until another one ends, so that agents can join whatever clients do. While it is full, no connection stays open idle.
"""

import asyncio
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from controlplane.bus.descriptors import PER_AGENT, SPARE, limit_and_left, raise_limit
from schemas.logs import RateLimit, logger_of

logger = logger_of("gateway")
logger.addFilter(RateLimit())

CONNECTIONS_MAX: Final = 16_384
HEAD_S: Final = 10.0
"""Time for the head of a request, from its first byte or from the beginning of the connection."""
BODY_S: Final = 60.0
"""Time for its body."""
KEEP_ALIVE_S: Final = 60
"""Time for which an idle connection stays open: longer than a client keeps one before it uses it again."""
AGAIN_S: Final = 1.0
"""Between two attempts to accept a connection, if the first one failed."""
REASON: Final = b"x-rolloutctl-reason"
"""Header of an answer, with what becomes the reason of its status line."""
TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def connections_within_limit(agents_max: int) -> int:
    """Return how many connections there may be at once, beside the agents of a bus. Raises the limit of descriptors.

    A connection takes two descriptors, as an agent does: that of the client, and one to the engine. Where there are too
    few for all, half of what is left is the bus's.
    """
    raise_limit(agents_max + CONNECTIONS_MAX)
    limit, left = limit_and_left()
    if limit == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    of_the_bus = min(agents_max * PER_AGENT + SPARE, left // 2)
    allowed = max(1, min(CONNECTIONS_MAX, (left - of_the_bus) // PER_AGENT))
    logger.info("up to %d connections at once, and further ones wait (%d file descriptors)", allowed, limit)
    return allowed


class BoundedServer(uvicorn.Server):
    """A server with so many connections at most. Its signals are the command line's."""

    def __init__(self, app: Any, connections: int) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http="h11",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
        )
        super().__init__(config)
        self._limit, self._room = connections, asyncio.Event()
        self._accepting: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        self._note_room()
        self._accepting = [asyncio.create_task(self._accept(listening)) for listening in sockets or ()]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            await self._room.wait()
            try:
                connection, _ = await loop.sock_accept(listening)
                await loop.connect_accepted_socket(self._connection, connection)
            except OSError as error:
                logger.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(AGAIN_S)
            self._note_room()

    def _connection(self) -> "_TimedConnection":
        state = self.server_state
        return _TimedConnection(self._note_room, self._room, config=self.config, server_state=state, app_state={})

    def _note_room(self) -> None:
        connections = self.server_state.connections
        if len(connections) < self._limit:
            self._room.set()
        elif self._room.is_set():
            self._room.clear()
            for connection in [*connections]:
                if isinstance(connection, H11Protocol) and connection.timeout_keep_alive_task is not None:  # idle
                    connection.transport.close()


class _Answers(h11.Connection):
    """Puts the reason of a refusal into the status line, and ends connections while the gateway is full."""

    def __init__(self, room: asyncio.Event) -> None:
        super().__init__(h11.SERVER)
        self._room = room

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if isinstance(event, h11.Response):
            # prime-rl, AReaL, slime and miles show nothing else of a refusal.
            reason = dict(event.headers).get(REASON, event.reason)
            headers = [header for header in event.headers if header[0] != REASON]
            # Said, since a client may send its next request before it sees the connection close.
            headers += [] if self._room.is_set() else [(b"connection", b"close")]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=reason)
        return super().send(event)


class _TimedConnection(H11Protocol):
    """A connection whose client must send each request in time, and whose errors are the gateway's log lines."""

    def __init__(self, ended: Callable[[], None], room: asyncio.Event, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Answers(room)
        self.logger, self._ended, self._room = logger, ended, room
        self._timer: asyncio.TimerHandle | None = None
        self._timed: object = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_request()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except UnicodeDecodeError:  # of the path, which must be ASCII
            self.send_400_response("Invalid HTTP request received.")
        self._time_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        self._ended()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._room.is_set():
            self.transport.close()

    def _time_request(self) -> None:
        """Start the time of a head, or of a body, when it begins, and stop it when it is there."""
        part = self.conn.their_state
        if part is self._timed:
            return
        self._timed = part
        if self._timer is not None:
            self._timer.cancel()
        if (limit_s := {h11.IDLE: HEAD_S, h11.SEND_BODY: BODY_S}.get(part)) is not None:
            self._timer = self.loop.call_later(limit_s, self._give_up)

    def _give_up(self) -> None:
        logger.warning("a client was too slow to send its request, and its connection is closed")
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:  # a part of a head
            self.transport.write(TOO_SLOW)
        self.transport.close()
