"""The socket that publishes, and what keeps its subscribers from holding up the process.

libzmq takes in subscriptions within whatever call touches an XPUB, and returns from it when none is left. Topics that
come as fast as it stores them keep it in there. No option changes that: XPUB_MANUAL stores them too, and a full queue
is refilled while one of it is stored (and breaks rule 1 of `sockets`).

Rule 1  No such call holds the GIL, as reading EVENTS by `get` would. So other threads go on.
Rule 2  One of them looks now and then, and breaks the connections whose peers have sent more than a subscriber does.
"""

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final

import zmq

from schemas.transport.async_socket import AsyncZmqSocket, Sent, address_of

TOUCH_S: Final = 0.02
"""A call that takes longer does not keep up with what it takes in."""
SUBSCRIBER_BYTES_MAX: Final = 4096
"""What a peer may have sent by then: a handshake with its key, and two topics, are less than a fifth."""
_RECEIVED_OFFSET: Final = 128  # of the bytes received, in Linux's struct tcp_info


class PublisherSocket(AsyncZmqSocket):
    """An XPUB. See the rules above."""

    _since: float | None = None  # since when a call touches the socket
    _cut_off: frozenset[int] = frozenset()  # descriptors of connections whose ends have not been read

    @property
    def held_s(self) -> float:
        """How long the call that touches the socket has taken so far; 0 if none does. For another thread."""
        since = self._since
        return time.monotonic() - since if since is not None else 0.0

    def cut_off_floods(self) -> int:
        """Break the connections that keep such a call from returning, and return how many. For another thread."""
        count = 0
        for name in os.listdir("/dev/fd") if self.held_s > TOUCH_S else ():
            with contextlib.suppress(OSError):  # it has just been closed, or it is no connection
                count += stat.S_ISSOCK(os.fstat(int(name)).st_mode) and self._cut_off_flood(int(name))
        return count

    def _cut_off_flood(self, descriptor: int) -> bool:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            at_ours = address_of(connection) == self.address.rpartition(":")[2]
            if not at_ours or _sent_by_peer(connection) <= SUBSCRIBER_BYTES_MAX:
                return False
            self._cut_off |= {descriptor}
            connection.shutdown(socket.SHUT_RDWR)
            return True

    def cut_off_sender(self) -> None:
        """Break the connection on which the last message came, once: its descriptor may soon be an honest peer's."""
        try:
            descriptor = int(self._received.get(zmq.SRCFD)) if self._received is not None else None
        except zmq.ZMQError:  # a topic of a connection that has ended
            self._cut_off = frozenset()
            return
        if descriptor is not None and descriptor not in self._cut_off:
            self._cut_off |= {descriptor}
            super().cut_off_sender()

    @contextlib.contextmanager
    def _touch(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def _next(self) -> list[bytes] | None:
        with self._touch():
            return super()._next()

    def _send_now(self, frames: Sequence[bytes]) -> Sent:
        with self._touch():
            return super()._send_now(frames)

    def _get_events(self) -> int:
        if self._closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        with self._touch():
            return sum(flags for _, flags in zmq.zmq_poll([(self._sock, zmq.POLLIN | zmq.POLLOUT)], 0))


def _sent_by_peer(connection: socket.socket) -> int:
    """How many bytes; where the system does not count them, how many of them are unread."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int(struct.unpack_from("=Q", info, _RECEIVED_OFFSET)[0])
    return len(connection.recv(SUBSCRIBER_BYTES_MAX + 1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
