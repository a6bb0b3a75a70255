"""File descriptors of the trainer's process. An agent takes two of them: one connection to each socket of the bus.

Nothing else limits connections: libzmq's `ZMQ_MAX_SOCKETS` counts the sockets of a context, of which the bus has two.
"""

import os
import resource
from contextlib import suppress
from typing import Final

from schemas.logs import logger_of

logger = logger_of("bus")

PER_AGENT: Final = 2
SPARE: Final = 256
"""Descriptors for whatever else the process opens after its bus."""
NEAR: Final = 0.2
"""There is a warning when less than this share of the limit is left."""
CHECK_US: Final = 10_000_000
"""Time between two checks. Where they have to be listed, that takes a millisecond for some thousand."""


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


class Descriptors:
    """Checks now and then how many are left."""

    def __init__(self) -> None:
        self.warning = ""
        self._next_us = 0

    def check(self, at_us: int, agents: int) -> None:
        """Check if it is time to, and log it when few are left. `agents` are connected."""
        if at_us < self._next_us:
            return
        self._next_us = at_us + CHECK_US
        soft, left = limit_and_left()
        if soft == resource.RLIM_INFINITY or left >= soft * NEAR:
            self.warning = ""
            return
        known, self.warning = (
            self.warning,
            (
                f"{max(0, left)} of {soft} file descriptors are left in the trainer's process: room for "
                f"{agents + max(0, left) // PER_AGENT} agents, two descriptors each, and no more. Raise its hard limit "
                "(`ulimit -Hn`, LimitNOFILE of systemd)"
            ),
        )
        if not known:
            logger.warning("%s", self.warning)


def _open_now() -> int:
    with suppress(OSError):  # macOS has no /proc
        if known := os.stat("/proc/self/fd").st_size:  # since Linux 6.2
            return known
    return len(os.listdir("/dev/fd")) - 1  # one is that of the listing
