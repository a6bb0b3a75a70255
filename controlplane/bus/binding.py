"""Around the sockets of a bus: bind an address that is still in use, end a context, warn of a bus without keys."""

import logging
import sys
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
from anyio import to_thread

from schemas.errors import AddressInUse
from schemas.transport.async_socket import AsyncZmqSocket
from schemas.transport.sockets import LINGER_MS, Context

S = TypeVar("S", bound=AsyncZmqSocket)

BIND_TIMEOUT_S: Final = 0.5
"""How long an address may still be in use by a socket of this process that was just closed."""


async def bound(bind: Callable[[], S]) -> S:
    """Bind; try again for a moment while the address is in use. Raises what `bind` raises."""
    deadline = anyio.current_time() + BIND_TIMEOUT_S
    while True:
        try:
            return bind()
        except AddressInUse:
            if anyio.current_time() > deadline:
                raise
            await anyio.sleep(BIND_TIMEOUT_S / 50)


async def end_context(context: Context) -> None:
    """Wait, outside the loop, until queued messages are delivered, or their linger time is over."""
    with anyio.move_on_after(2 * LINGER_MS / 1000, shield=True):
        await to_thread.run_sync(context.term, abandon_on_cancel=True)


def warn_of_exposure(address: str) -> None:
    """Say that there are no keys where other machines can reach the bus."""
    advice = "`rolloutctl keys new NAME` makes keys; pass them as `keys`, instead of insecure=True"
    warn_in_red(f"INSECURE: every program that can reach {address} can command the engines. {advice}")


def warn_in_red(text: str) -> None:
    """Log a warning, in red on a terminal."""
    # A logger of its own: the others make a terminal's control characters harmless, and these are ours.
    logger = logging.getLogger("rolloutctl.exposure")
    logger.warning("%s", f"\x1b[1;31m{text}\x1b[0m" if sys.stderr.isatty() else text)
