"""A lock on a file for one writer, and a watch for programs that don't ask for it.

The lock is on a file beside it, `<file>-lock`, which goes with the writer. So a symbolic link leads to the same lock,
and SQLite's own on the file are left alone. A file with several names (hard links) can't be written. The lock ends with
its descriptor, however its process dies.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from schemas.errors import LogError, LogLocked

# By descriptor, the lock's file. A fork inherits them and would keep them after its parent's death: the data loaders of
# a dead trainer would lock out the next trainer.
_held: dict[int, str] = {}


def acquire(path: Path) -> int:
    """Lock the file for this process, and return what `release` takes. Creates it, with mode 0600, if it is missing.

    Raises:
        LogLocked: It is locked already, under this name or another.
        LogError: The file system has no locks, or the file has several names.
        OSError: It can't be made.
    """
    beside = f"{os.path.realpath(path)}-lock"
    while True:
        lock = os.open(beside, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            _lock(path, lock)
            if _is_at(beside, lock):
                _make(path)
                break
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its writer has just ended, and took it along
    _held[lock] = beside
    return lock


def release(lock: int) -> None:
    """Let another writer in. Without effect in a fork."""
    beside = _held.pop(lock, None)
    if beside is not None:
        with suppress(OSError):  # its folder was taken away
            os.unlink(beside)
        os.close(lock)


class Watch:
    """Notices when another program takes a file away, replaces it or cuts it off. Its path has no symbolic links."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: os.stat_result | None = None

    def note(self) -> None:
        """Remember the file as it is now. There need not be one."""
        try:
            self._seen = os.stat(self._path)
        except OSError:
            self._seen = None

    def change(self) -> str | None:
        """Return what happened to the file since the last look, as words that follow its name; None if nothing.

        The file may have grown since; it is remembered as it is now.
        """
        before = self._seen
        if before is None:
            return None
        try:
            now = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return "was deleted or moved"
        except OSError:  # out of reach for the moment, which writing would show
            return None
        if _id(now) != _id(before):
            return "was replaced by another file"
        if now.st_size < before.st_size:
            return f"was cut from {before.st_size} to {now.st_size} bytes"
        self._seen = now
        return None


def _id(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _is_at(path: str, lock: int) -> bool:
    """Whether this is still the file of a lock, which its last writer takes along at any moment."""
    try:
        return _id(os.stat(path)) == _id(os.fstat(lock))
    except FileNotFoundError:
        return False


def _lock(path: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LogLocked(
            f"{path}: another writer has this file open, perhaps under another name. Use another file"
        ) from None
    except OSError as error:
        raise LogError(
            f"{path}: this file system has no locks ({error.strerror}), so a second writer can't be kept out. "
            "Use a local disk, or mount it with locks (Lustre: -o flock)"
        ) from error


def _make(path: Path) -> None:
    try:
        # Only a new file is opened: to close any descriptor of another drops the locks that SQLite has on it here.
        os.close(os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if (names := os.stat(path).st_nlink) > 1:
            raise LogError(
                f"{path}: this file has {names} names (hard links), and its newest records are found under only one of "
                f"them. Find them with `find -samefile {path}`, and remove all but the one it was written under; or "
                "copy it"
            ) from None


def _leave_to_parent() -> None:
    for lock in _held:
        os.close(lock)  # which does not unlock: the parent's descriptor holds the lock too
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
