"""How many forks lie between an object's maker and this process: sockets and doorbells do not survive one."""

import os
from functools import partial
from typing import Final

from schemas.errors import BusError

forks: Final[list[None]] = []
"""One item for each fork on the way to this process. An object that remembers another number was made by a parent; to
compare two numbers costs a quarter of getpid(), and this check stands in front of every message."""

os.register_at_fork(after_in_child=partial(forks.append, None))


def used_after_fork(what: str, made_in: int) -> BusError:
    """What is raised where it is used. made_in: process."""
    return BusError(f"this {what} was made in process {made_in} and does not survive a fork: open it in {os.getpid()}")
