"""File descriptors of the trainer's process. An agent takes two of them: one connection to each socket of the bus.

Nothing else limits connections: libzmq's `ZMQ_MAX_SOCKETS` counts the sockets of a context, of which the bus has two.
"""

import os
import resource
from contextlib import suppress
from typing import Final

PER_AGENT: Final = 2
SPARE: Final = 256
"""Descriptors for whatever else the process opens after its bus."""


def raise_limit(agents: int) -> None:
    """Raise the soft limit so that `agents` fit, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _open_now() + agents * PER_AGENT + SPARE
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit_and_left() -> tuple[int, int]:
    """Return how many this process may have, and how many of them are left. May be called from any thread."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft, soft - _open_now()


def _open_now() -> int:
    with suppress(OSError):  # macOS has no /proc
        if known := os.stat("/proc/self/fd").st_size:  # since Linux 6.2
            return known
    return len(os.listdir("/dev/fd")) - 1  # one is that of the listing
