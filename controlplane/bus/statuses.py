"""The status of the fleet for those who ask, made in steps between the turns of the bus.

That of 4,096 agents takes some 10 ms. Who asks while one is made gets the next, which is one for all who wait.
"""

from collections.abc import Callable, Generator

from anyio.lowlevel import checkpoint
from msgspec.structs import replace

from schemas.carriers.wakeup import Signal
from schemas.reports import FleetStatus
from schemas.wire import encode_reply

Steps = Generator[None, None, FleetStatus]


class Statuses:
    """Answers operators who ask for the status.

    Args:
        steps: Begins a status.
        send: Sends one body to an operator's connection.
    """

    def __init__(self, steps: Callable[[], Steps], send: Callable[[bytes, bytes], object]) -> None:
        self._steps, self._send = steps, send
        self._asked: list[tuple[bytes, bool]] = []
        self._signal = Signal()

    def ask(self, connection: bytes, is_observer: bool) -> None:
        """Answer this connection soon."""
        self._asked.append((connection, is_observer))
        self._signal.set()

    async def made(self) -> FleetStatus:
        """Return a status as of this call, with a pause for the loop after each step."""
        steps = self._steps()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                fleet: FleetStatus = end.value
                return fleet
            await checkpoint()

    async def serve(self) -> None:
        """Answer those who ask, until cancelled."""
        while True:
            await self._signal.wait()
            asked, self._asked = self._asked, []
            fleet = await self.made()
            for read_only in (False, True):
                connections = [connection for connection, is_observer in asked if is_observer is read_only]
                if connections:
                    await checkpoint()
                    bodies = encode_reply(replace(fleet, read_only=read_only))
                    for connection in connections:
                        for body in bodies:
                            self._send(connection, body)
