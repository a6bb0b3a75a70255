"""Binds the sockets of a bus, and frees its publish socket of every subscriber while the bus runs."""

from collections.abc import Callable
from typing import Final

import anyio
from anyio import to_thread

from schemas.carriers.edge_socket import EdgeSocket
from schemas.carriers.sockets import LINGER_MS, Context
from schemas.errors import AddressInUse

BIND_TIMEOUT_S: Final = 0.5
"""How long an address may still be in use by a socket of this process that was just closed."""


async def bound(bind: Callable[[], EdgeSocket]) -> EdgeSocket:
    """Bind, again and again for a moment while the address is in use. Raises what `bind` raises."""
    deadline = anyio.current_time() + BIND_TIMEOUT_S
    while True:
        try:
            return bind()
        except AddressInUse:
            if anyio.current_time() > deadline:
                raise
            await anyio.sleep(BIND_TIMEOUT_S / 50)


async def bound_anew(old: EdgeSocket, bind: Callable[[], EdgeSocket]) -> EdgeSocket:
    """Return a socket in the place of `old`, which loses all its connections. If the address is taken, `old` stays.

    libzmq can't close one connection of a publisher. Whoever may come in connects again by itself.

    Raises:
        AddressInUse: Another process took the address just now. Nobody can connect until it is bound again.
    """
    old.unbind()
    new = await bound(bind)
    old.close(0)
    return new


async def end_context(context: Context) -> None:
    """Wait, outside the loop, until what the sockets have queued is delivered or its time is over."""
    with anyio.move_on_after(2 * LINGER_MS / 1000, shield=True):
        await to_thread.run_sync(context.term, abandon_on_cancel=True)
