"""Two sockets that speak to each other over TCP, for tests."""

import zmq
from anyio.lowlevel import checkpoint

from schemas.transport.async_socket import AsyncZmqSocket
from schemas.transport.sockets import Context


def pair(context: Context, queue: int = 1000) -> tuple[AsyncZmqSocket, AsyncZmqSocket]:
    """Two DEALERs that connect over TCP, with room for `queue` messages each way."""
    bound, dialled = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for sock in (bound, dialled):
        sock.set(zmq.SNDHWM, queue)
        sock.set(zmq.RCVHWM, queue)
        # Small kernel buffers, so that the queues fill up.
        sock.set(zmq.SNDBUF, 65536)
        sock.set(zmq.RCVBUF, 65536)
    bound.bind("tcp://127.0.0.1:*")
    address = bound.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    dialled.connect(address)
    return AsyncZmqSocket(bound, address), AsyncZmqSocket(dialled, address)


async def connected(context: Context, queue: int = 1000) -> tuple[AsyncZmqSocket, AsyncZmqSocket]:
    """The same, once they are connected."""
    left, right = pair(context, queue)
    await left.send([b"connected"])
    await right.recv()
    return left, right


async def turns(count: int) -> None:
    for _ in range(count):
        await checkpoint()
