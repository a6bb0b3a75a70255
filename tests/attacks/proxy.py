"""A TCP proxy between agents and a bus that can go silent: it accepts, reads, and passes nothing on."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import SocketAttribute, SocketStream, TaskStatus

HOST = "127.0.0.2"


class Proxy:
    """Listens on another address of this machine, at the ports of the bus, because an agent is only told a port.

    Attributes:
        silent: Ports whose connections, old and new, carry nothing. One that has been silent stays so: it lost bytes.
        accepted: Connections per port.
        carried: Messages from the bus per port, on connections that were never silent.
    """

    def __init__(self) -> None:
        self.silent: set[int] = set()
        self.accepted = Counter[int]()
        self.carried = Counter[int]()
        self._scopes: dict[anyio.CancelScope, int] = {}

    def cut(self, port: int) -> None:
        """Break the connections to a port; those that are dialled afterwards work."""
        for scope, of in self._scopes.items():
            if of == port:
                scope.cancel()

    async def serve(self, port: int, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        listener = await anyio.create_tcp_listener(local_host=HOST, local_port=port)
        task_status.started()
        async with listener:
            await listener.serve(self._pass_on)

    async def _pass_on(self, agent: SocketStream) -> None:
        port = agent.extra(SocketAttribute.local_port)
        self.accepted[port] += 1
        lost = port in self.silent
        try:
            async with agent, await anyio.connect_tcp("127.0.0.1", port) as bus, anyio.create_task_group() as tasks:

                async def pump(source: SocketStream, sink: SocketStream) -> None:
                    nonlocal lost
                    async for data in source:
                        lost = lost or port in self.silent
                        if not lost:
                            await sink.send(data)
                            self.carried[port] += sink is agent
                    tasks.cancel_scope.cancel()

                self._scopes[tasks.cancel_scope] = port
                tasks.start_soon(pump, agent, bus)
                tasks.start_soon(pump, bus, agent)
        except (OSError, anyio.BrokenResourceError, ExceptionGroup):
            pass  # either side has closed


@asynccontextmanager
async def proxied(*ports: int) -> AsyncIterator[Proxy]:
    """Run a proxy for these ports."""
    proxy = Proxy()
    async with anyio.create_task_group() as tasks:
        for port in ports:
            await tasks.start(proxy.serve, port)
        yield proxy
        tasks.cancel_scope.cancel()
