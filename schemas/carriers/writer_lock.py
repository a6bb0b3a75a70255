"""A lock that keeps a second writer from a record file. It is released when its process dies."""

import fcntl
import os
from pathlib import Path

from schemas.errors import LogError, LogLocked

# Locks held by this process. A fork inherits them and would keep them after its parent's death: the data loaders of a
# dead trainer would lock out the next trainer.
_held: set[int] = set()


def acquire(path: Path) -> int:
    """Lock `<path>.lock` and return its descriptor. The lock file stays: removing it would race with the next writer.

    Raises:
        LogLocked: Another process holds the lock.
        LogError: The file system has no locks.
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
            f"{path}: this file system has no locks ({error.strerror}), so a second writer can't be kept out. "
            "Use a local disk, or mount it with locks (Lustre: -o flock)"
        ) from error
    _held.add(descriptor)
    return descriptor


def release(descriptor: int) -> None:
    """Let another writer in."""
    _held.discard(descriptor)
    os.close(descriptor)


def _close_in_fork() -> None:
    # Closing does not unlock: the parent's descriptor holds the lock too.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_fork)
