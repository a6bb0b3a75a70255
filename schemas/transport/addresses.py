"""The address of a bus that moves, in a file that its agents read.

`--bus` is an address, or the path of such a file, with a slash in it.
"""

import os
import socket
from pathlib import Path
from typing import Final

from schemas.errors import BusAddressError

NOWHERE: Final = "inproc://rolloutctl.nowhere"
"""Stands for the address of a bus that has not said it yet: nothing listens there."""
ADDRESS_MAX: Final = 1024
"""Characters of the file that are read."""


def write_address(path: Path, address: str) -> None:
    """Write where a bus listens. One that listens on all interfaces is found by the name of its host.

    Raises BusAddressError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(f"{as_dialled(address)}\n", "utf-8")
        draft.replace(path)
    except OSError as error:
        raise BusAddressError(f"the file {path} for the address of the bus: {error.strerror}") from error


def as_dialled(address: str) -> str:
    """Return the address as agents name it: a bus that listens everywhere is reached at this machine's name."""
    host, _, port = address.rpartition(":")
    everywhere = host in ("tcp://0.0.0.0", "tcp://*", "tcp://[::]")
    return f"tcp://{socket.gethostname()}:{port}" if everywhere else address


def is_file(bus: str) -> bool:
    """Whether it is the path of a file."""
    return "/" in bus and "://" not in bus


def read_address(bus: str) -> str:
    """Return an address as it is, or the one that a file names now; NOWHERE if it names none."""
    if not is_file(bus):
        return bus
    try:
        with open(bus, encoding="utf-8") as file:
            return file.read(ADDRESS_MAX).strip() or NOWHERE
    except (OSError, ValueError):
        return NOWHERE
