"""Why a dialled connection does not open, as libzmq's monitor of the socket tells it.

libzmq dials again when the port is closed or the other side hangs up. It does not when the other side refuses a key, or
has none itself: then the socket stays silent for ever, and its owner must redial.
"""

import contextlib
import itertools
from typing import Final, NamedTuple

import anyio
import zmq
from anyio.abc import ByteStream
from zmq.utils.monitor import parse_monitor_message

from schemas.transport.async_socket import AsyncZmqSocket
from schemas.transport.keys import Credentials

_OPEN: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_KEY_REFUSED: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_NOT_UNDERSTOOD: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_HUNG_UP: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_NOT_REACHED: Final = int(zmq.EVENT_CONNECT_RETRIED)
_WATCHED: Final = _OPEN | _KEY_REFUSED | _NOT_UNDERSTOOD | _HUNG_UP
_numbers = itertools.count()

# ZMTP 3.1 (RFC 37): each side begins with a signature and its version. Then a listener names its mechanism.
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03"
_MECHANISM: Final = slice(12, 32)  # bytes of a greeting
_GREETING_S: Final = 2.0

_WITHOUT_KEY: Final = "the bus admits no peer without a key, and none was given (ROLLOUTCTL_KEY_FILE)"


class HandshakeFailure(NamedTuple):
    """A connection that failed.

    Attributes:
        reached: A socket listens there.
    """

    reason: str
    reached: bool = True


class DialledSocket(AsyncZmqSocket):
    """A socket that dials one address, and knows why it gets no connection.

    Its handshakes are watched until one succeeds, and again after each `redial`. Meanwhile it takes three sockets of
    its context instead of one.

    Args:
        sock: Not connected yet.
        address: What to dial.
        keys: What to dial with; None without keys.
        watched: Whether to watch it; else `refusal` knows of none.
        wait_for_listener: Keep dialling while nothing listens; else `refusal` also returns then.
    """

    def __init__(
        self,
        sock: "zmq.Socket[bytes]",
        address: str,
        keys: Credentials | None,
        *,
        watched: bool = True,
        wait_for_listener: bool = True,
    ) -> None:
        super().__init__(sock, address)
        self._events = _WATCHED if wait_for_listener else _WATCHED | _NOT_REACHED
        self._keys = keys
        self.watched = watched and not address.startswith("inproc://")  # which has no handshakes
        self._monitor: AsyncZmqSocket | None = None
        try:
            self._dial()
        except zmq.ZMQError:  # not an address
            self._stop_watching()
            raise

    async def refusal(self) -> HandshakeFailure | None:
        """Return None when the connection is open, or why it is not, as soon as either is known.

        An unwatched socket returns None at once. Raises ClosedResourceError.
        """
        while self._monitor is not None:
            event = int(parse_monitor_message(await self._monitor.recv())["event"])
            if event == _OPEN:
                self._stop_watching()
            elif event == _HUNG_UP and self._keys is None:
                # It may be ending, or have keys: libzmq hangs up on the other mechanism, often before it names its own.
                if await _requires_keys(self.address):
                    return HandshakeFailure(_WITHOUT_KEY)
            elif failure := _refused(event, self._keys):
                return failure
        return None

    def redial(self, keys: Credentials | None) -> None:
        """Give up the connection, and dial again with these keys. What was queued for it is lost.

        Raises ClosedResourceError.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        with contextlib.suppress(zmq.ZMQError):  # libzmq has given it up already
            self._sock.disconnect(self.address)
        self._keys = keys
        self._dial()

    def close(self, linger_ms: int | None = None) -> None:
        """Close, and wake all waiters. May be called twice."""
        if not self._closed:
            self._stop_watching()
        super().close(linger_ms)

    def _dial(self) -> None:
        if self._monitor is None and self.watched:
            place = f"inproc://rolloutctl.handshakes.{next(_numbers)}"  # the last may be in use for some time yet
            self._sock.monitor(place, self._events)
            monitor = self._sock.context.socket(zmq.PAIR)
            monitor.set(zmq.LINGER, 0)
            monitor.connect(place)
            self._monitor = AsyncZmqSocket(monitor, place)
        if self._keys is not None:
            use_keys(self._sock, self._keys)
        self._sock.connect(self.address)

    def _stop_watching(self) -> None:
        if self._monitor is not None:
            monitor, self._monitor = self._monitor, None
            self._sock.disable_monitor()
            monitor.close(0)


def use_keys(sock: "zmq.Socket[bytes]", keys: Credentials) -> None:
    """Set the keys with which the next connection is dialled."""
    sock.set(zmq.CURVE_PUBLICKEY, keys.pair.public.encode())
    sock.set(zmq.CURVE_SECRETKEY, keys.pair.secret.encode())
    sock.set(zmq.CURVE_SERVERKEY, keys.server.encode())


def _refused(event: int, keys: Credentials | None) -> HandshakeFailure | None:
    if event == _NOT_REACHED:
        return HandshakeFailure("nothing answers there", reached=False)
    if event == _KEY_REFUSED:
        return HandshakeFailure("the bus refused this key: it does not know it, or it was revoked")
    if event == _NOT_UNDERSTOOD and keys is None:
        return HandshakeFailure(_WITHOUT_KEY)
    if event == _NOT_UNDERSTOOD:
        return HandshakeFailure("the bus has no keys, and this side was given one")
    if event == _HUNG_UP and keys is not None:
        return HandshakeFailure("the bus has another key than this side was given for it, or none")
    return None


async def connect(address: str) -> ByteStream:
    """Open a connection of bytes to a tcp or ipc address. Raises OSError, or ValueError for another one."""
    transport, _, place = address.partition("://")
    if transport == "ipc":
        return await anyio.connect_unix(place)
    host, _, port = place.rpartition(":")
    return await anyio.connect_tcp(host.strip("[]"), int(port))


async def _requires_keys(address: str) -> bool:
    """Whether what listens there names CURVE as its mechanism. This side names none, so it has no reason to hang up."""
    greeting = b""
    with contextlib.suppress(OSError, ValueError, anyio.EndOfStream, anyio.BrokenResourceError):
        with anyio.move_on_after(_GREETING_S):
            async with await connect(address) as stream:
                await stream.send(_GREETING)
                while len(greeting) < _MECHANISM.stop:
                    greeting += await stream.receive()
    return greeting[_MECHANISM].rstrip(b"\0") == b"CURVE"
