"""Forks of this process: what they may not use, and what they must not hold.

Sockets and wakeups do not survive a fork. But a child inherits their descriptors, and would keep an address in use
after its parent has closed it, or was killed: the data loaders of a dead trainer would keep the next trainer out.
"""

import contextlib
import os
import socket
import stat
from typing import Final

from schemas.errors import BusError

forks: Final[list[None]] = []
"""One item per fork between the first process and this one. An object remembers the length at its creation; another
length means that a parent process made it. The check runs before every message, and costs a quarter of getpid()."""
listening: Final[set[int | str]] = set()
"""Ports, and paths of Unix sockets, where this process listens. A child closes what it inherits of them."""


def used_after_fork(what: str, made_in: int) -> BusError:
    """Return the error for using an object that process `made_in` made."""
    return BusError(
        f"this {what} was made in process {made_in} and does not survive a fork: process {os.getpid()} needs its own"
    )


def place_of(address: str) -> int | str:
    """Return the port of a bound address, or the path of its Unix socket."""
    place = address.partition("://")[2]
    return int(place.rpartition(":")[2]) if address.startswith("tcp://") else place


def _in_child() -> None:
    forks.append(None)
    if not listening:
        return
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                _let_go(socket.socket(fileno=int(name)))
    listening.clear()


def _let_go(inherited: socket.socket) -> None:
    try:
        bound = inherited.getsockname()
        if (bound[1] if inherited.family in (socket.AF_INET, socket.AF_INET6) else bound) in listening:
            inherited.close()
    finally:
        inherited.detach()


os.register_at_fork(after_in_child=_in_child)
