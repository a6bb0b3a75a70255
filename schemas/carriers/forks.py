"""Detects that an object is used in a fork of the process that made it: sockets and wakeups do not survive one."""

import os
from functools import partial
from typing import Final

from schemas.errors import BusError

forks: Final[list[None]] = []
"""One item per fork between the first process and this one. An object remembers the length at its creation; another
length means that a parent process made it. The check runs before every message, and costs a quarter of getpid()."""

os.register_at_fork(after_in_child=partial(forks.append, None))


def used_after_fork(what: str, made_in: int) -> BusError:
    """Return the error for using an object that process `made_in` made."""
    return BusError(f"this {what} was made in process {made_in} and does not survive a fork: open it in {os.getpid()}")
