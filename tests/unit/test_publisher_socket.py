"""The socket that publishes: which peers are cut off, and which are not."""

import anyio
import pytest

from schemas.transport.sockets import Context, bus_publisher
from tests.attacks.raw_peer import connected, frame


@pytest.mark.anyio
async def test_a_connection_with_the_descriptor_of_one_that_was_cut_off_stays(context: Context) -> None:
    async with bus_publisher(context, "tcp://127.0.0.1:0") as publisher:
        port = int(publisher.address.rpartition(":")[2])
        with connected(port, 1, "SUB") as (stranger,):
            stranger.send(frame(b"\1one") + frame(b"\1two"))
            assert await publisher.recv() == [b"\1one"]
            publisher.cut_off_sender()
            with pytest.raises(ConnectionError):
                stranger.receive(1)
        with connected(port, 1, "SUB") as (honest,):
            honest.send(frame(b"\1topic"))
            awaited = [b"\1topic", b"\1two", b"\0one", b"\0two"]  # the others are what the first one left, in any order
            with anyio.fail_after(20):
                while awaited:
                    (message,) = await publisher.recv()
                    awaited.remove(message)
                    if message != b"\1topic":
                        publisher.cut_off_sender()
            publisher.send_nowait([b"topic"])
            assert honest.receive(7) == frame(b"topic")
            honest.send(frame(b"\1another"))
            assert await publisher.recv() == [b"\1another"]
            publisher.cut_off_sender()
            with pytest.raises(ConnectionError):
                honest.receive(1)
