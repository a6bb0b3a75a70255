"""Why a dialled connection does not open, as libzmq's monitor of the socket tells it.

libzmq dials again when nobody listens or the other side hangs up. It does not when the other side refuses a key, or
has none itself: then the socket stays silent for ever, and its owner must redial.
"""

import contextlib
import itertools
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from schemas.carriers.edge_socket import EdgeSocket
from schemas.carriers.keys import Credentials

_OPEN: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_KEY_REFUSED: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_NOT_UNDERSTOOD: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_HUNG_UP: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_NOT_REACHED: Final = int(zmq.EVENT_CONNECT_RETRIED)
_WATCHED: Final = _OPEN | _KEY_REFUSED | _NOT_UNDERSTOOD | _HUNG_UP
_numbers = itertools.count()


class Refused(NamedTuple):
    """A connection that failed.

    Attributes:
        reason: What it means, and what to do.
        final: libzmq will not dial again.
        reached: Somebody listens there.
    """

    reason: str
    final: bool
    reached: bool = True


class DialledSocket(EdgeSocket):
    """A socket that dials one address, and knows why it gets no connection.

    Its handshakes are watched until one succeeds, and again after each `redial`. Meanwhile it takes three sockets of
    its context instead of one.

    Args:
        sock: Not connected yet.
        address: What to dial.
        keys: What to dial with; None without keys.
        watched: Whether to watch it; else `refusal` knows of none.
        patient: Nobody has to listen yet; else `refusal` also returns when an attempt has reached nobody.
    """

    def __init__(
        self,
        sock: "zmq.Socket[bytes]",
        address: str,
        keys: Credentials | None,
        *,
        watched: bool = True,
        patient: bool = True,
    ) -> None:
        super().__init__(sock, address)
        self._events = _WATCHED if patient else _WATCHED | _NOT_REACHED
        self._keys = keys
        self._watched = watched and not address.startswith("inproc://")  # which has no handshakes
        self._monitor: EdgeSocket | None = None
        try:
            self._dial()
        except zmq.ZMQError:  # not an address
            self._stop_watching()
            raise

    async def refusal(self) -> Refused | None:
        """Return None when the connection is open, or why it is not, as soon as either is known.

        An unwatched socket returns None at once.

        Raises:
            ClosedResourceError: The socket was closed.
        """
        while self._monitor is not None:
            event = int(parse_monitor_message(await self._monitor.recv())["event"])
            if event == _OPEN:
                self._stop_watching()
            elif refused := _refused(event, self._keys):
                return refused
        return None

    def redial(self, keys: Credentials | None) -> None:
        """Give up the connection, and dial again with these keys. What was queued for it is lost."""
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
        if self._monitor is None and self._watched:
            self._monitor = self._watch_handshakes()
        if self._keys is not None:
            use_keys(self._sock, self._keys)
        self._sock.connect(self.address)

    def _watch_handshakes(self) -> EdgeSocket:
        address = f"inproc://rolloutctl.handshakes.{next(_numbers)}"  # an address is free only some time after a close
        self._sock.monitor(address, self._events)
        monitor = self._sock.context.socket(zmq.PAIR)
        monitor.set(zmq.LINGER, 0)
        monitor.connect(address)
        return EdgeSocket(monitor, address)

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


def _refused(event: int, keys: Credentials | None) -> Refused | None:
    if event == _NOT_REACHED:
        return Refused("nobody could be reached there", final=False, reached=False)
    if event == _KEY_REFUSED:
        return Refused("the bus refused this key: it does not know it, or it was revoked", final=True)
    if event == _NOT_UNDERSTOOD and keys is None:
        return Refused("the bus lets nobody in without a key, and none was given (ROLLOUTCTL_KEY_FILE)", final=True)
    if event == _NOT_UNDERSTOOD:
        return Refused("the bus has no keys, and this side was given one", final=True)
    if event == _HUNG_UP and keys is not None:
        return Refused("the bus has another key than this side was given for it, or none", final=False)
    return None  # hung up on a peer without keys: it may just be ending
