"""The lock that keeps a second writer from a file of records; it dies with its process."""

import fcntl
import os
from pathlib import Path

from schemas.errors import LogError, LogLocked

# Locks held by this process. A fork shares them, and would keep them after its parent's death: a trainer's data loaders
# outlive it, and the next trainer would find the log locked.
_held: set[int] = set()


def acquire(path: Path) -> int:
    """The descriptor of the lock beside the file. Raises LogLocked, or LogError where there are no locks.

    What the lock is on is left behind on purpose: removing it would race with the next writer.
    """
    name = f"{path}.lock"
    descriptor = os.open(name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise LogLocked(f"{path}: another process writes this file and holds {name}. Use another file") from None
        raise LogError(
            f"{path}: this file system offers no locks ({error.strerror}), so a second writer could not be kept out. "
            "Use a local disk, or mount it with locks (Lustre: -o flock)"
        ) from error
    _held.add(descriptor)
    return descriptor


def release(descriptor: int) -> None:
    """Let the next writer in."""
    _held.discard(descriptor)
    os.close(descriptor)


def _close_in_fork() -> None:
    # Closing is enough: the lock belongs to the parent's descriptor too and stays with it.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_fork)
