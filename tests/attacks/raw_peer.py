"""A peer that speaks ZMTP 3.1 byte by byte, so that it can do what libzmq never would."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Self

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
PING = b"\x04\x09\x04PING\x00\x00hi"  # no time to live, and a context that the answer repeats


def frame(body: bytes, more: bool = False, command: bool = False) -> bytes:
    flags = more | command << 2
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + struct.pack(">Q", len(body)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + struct.pack(">I", len(value)) + value


class RawPeer:
    """One connection to a socket of the bus, after the handshake.

    Args:
        port: On this host.
        kind: `DEALER` or `SUB`.
        identity: The routing id that it asks for.
    """

    def __init__(self, port: int, kind: str = "DEALER", identity: bytes = b"") -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), 10)
        self._sock.sendall(GREETING)
        self.receive(64)
        ready = b"\x05READY" + _property(b"Socket-Type", kind.encode()) + _property(b"Identity", identity)
        self._sock.sendall(frame(ready, command=True))
        _, size = self.receive(2)
        self.receive(size)

    def receive(self, size: int) -> bytes:
        """Return the next bytes that the bus sends. Raises ConnectionError when it has closed the connection."""
        data = b""
        while len(data) < size:
            data += self._sock.recv(size - len(data)) or self._closed()
        return data

    @staticmethod
    def _closed() -> bytes:
        raise ConnectionError("the bus closed the connection")

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def flood(self, data: bytes, nbytes: int) -> bool:
        """Send data again and again, that many bytes in all. Return whether the bus stopped it."""
        self._sock.settimeout(1)
        try:
            for _ in range(nbytes // len(data)):
                self._sock.sendall(data)
        except OSError:
            return True
        return False

    def send_at_once(self, data: bytes) -> None:
        """Send less than 8 kB, which libzmq reads in one piece, and return when it has read them."""
        self._sock.sendall(PING + data)
        while not self._receive_frame().startswith(b"\x04PONG"):
            pass  # the welcome, if the bus has seen a subscriber by now

    def _receive_frame(self) -> bytes:
        (flags,) = self.receive(1)
        size = struct.unpack(">Q", self.receive(8)) if flags & 2 else self.receive(1)
        return self.receive(size[0])

    def reset(self) -> None:
        """Break the connection without a goodbye."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()


@contextlib.contextmanager
def connected(port: int, count: int, kind: str = "DEALER", identity: bytes = b"") -> Iterator[list[RawPeer]]:
    """That many peers at once."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RawPeer(port, kind, identity)) for _ in range(count)]
