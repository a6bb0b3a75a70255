"""A lock on a file, whatever name leads to it, and a watch for programs that don't ask for it.

Theory of operation. The lock is on one byte of the file itself, far behind its end. SQLite locks other bytes, so its
readers are not kept out. The lock belongs to the open file and not to the process: it ends with its descriptor, however
its process dies.

To close any descriptor of a file drops the locks that SQLite has on it in the same process. So code that opens the file
with SQLite says so before (`connect`) and after (`disconnect`), and descriptors stay open until no connection is left.
"""

import fcntl
import os
import struct
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Final

from schemas.errors import LogError, LogLocked

FileId = tuple[int, int]
"""Device and inode: the same for every name of a file."""

_BYTE: Final = 1 << 62
_MACOS: Final = sys.platform == "darwin"
_SET_LOCK: Final[int] = getattr(fcntl, "F_OFD_SETLK", 90)  # 90: macOS, sys/fcntl.h; some builds of Python lack the name

_guard = threading.RLock()
_connections: Counter[FileId] = Counter()
_unused: dict[FileId, list[int]] = {}  # descriptors to close with the last connection
# Locks held by this process. A fork inherits them and would keep them after its parent's death: the data loaders of a
# dead trainer would lock out the next trainer.
_held: dict[FileId, int] = {}


def connect(path: Path) -> FileId:
    """Say that SQLite is about to open the file, and return its id for `disconnect`. Raises OSError."""
    with _guard:
        file = _file_id(os.stat(path))
        _connections[file] += 1
    return file


def disconnect(file: FileId) -> None:
    """Say that a connection was closed."""
    with _guard:
        _connections[file] -= 1
        if _connections[file] <= 0:
            del _connections[file]
            for descriptor in _unused.pop(file, ()):
                os.close(descriptor)


def acquire(path: Path) -> FileId:
    """Lock the file for this process, and return its id. Creates it, with mode 0600, if it is missing.

    Raises:
        LogLocked: It is locked already, under this name or another.
        LogError: The file system has no locks, or the file has several names.
        OSError: It can't be opened.
    """
    with _guard:
        while True:
            if path.exists() and _file_id(os.stat(path)) in _held:
                raise _locked(path)
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            opened = os.fstat(descriptor)
            file = _file_id(opened)
            try:
                _lock(path, descriptor)
                if path.exists() and _file_id(os.stat(path)) == file:  # else it was replaced meanwhile
                    _check_names(path, opened.st_nlink)
                    break
            except BaseException:
                _close(file, descriptor)
                raise
            _close(file, descriptor)
        _held[file] = descriptor
    return file


def release(file: FileId) -> None:
    """Let another writer in."""
    with _guard:
        descriptor = _held.pop(file, None)
        if descriptor is not None:
            fcntl.fcntl(descriptor, _SET_LOCK, _request(fcntl.F_UNLCK))
            _close(file, descriptor)


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
        if _file_id(now) != _file_id(before):
            return "was replaced by another file"
        if now.st_size < before.st_size:
            return f"was cut from {before.st_size} to {now.st_size} bytes"
        self._seen = now
        return None


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.fcntl(descriptor, _SET_LOCK, _request(fcntl.F_WRLCK))
    except OSError as error:
        if isinstance(error, BlockingIOError | PermissionError):
            raise _locked(path) from None
        raise LogError(
            f"{path}: this file system has no locks ({error.strerror}), so a second writer can't be kept out. "
            "Use a local disk, or mount it with locks (Lustre: -o flock)"
        ) from error


def _check_names(path: Path, names: int) -> None:
    if names > 1:
        raise LogError(
            f"{path}: this file has {names} names (hard links), and its newest records are found under only one of "
            f"them. Find them with `find -samefile {path}`, and remove all but the one it was written under; or copy it"
        )


def _locked(path: Path) -> LogLocked:
    return LogLocked(f"{path}: another writer has this file open, perhaps under another name. Use another file")


def _request(kind: int) -> bytes:
    """Return a `struct flock` (sys/fcntl.h) for our byte."""
    if _MACOS:  # start, length, pid, type, whence
        return struct.pack("qqihh", _BYTE, 1, 0, kind, os.SEEK_SET)
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, _BYTE, 1, 0)


def _file_id(found: os.stat_result) -> FileId:
    return found.st_dev, found.st_ino


def _close(file: FileId, descriptor: int) -> None:
    if _connections[file] > 0:
        _unused.setdefault(file, []).append(descriptor)
    else:
        os.close(descriptor)


def _leave_to_parent() -> None:
    # Closing does not unlock: the parent's descriptor holds the lock too.
    global _guard
    _guard = threading.RLock()
    for descriptor in (*_held.values(), *(unused for several in _unused.values() for unused in several)):
        os.close(descriptor)
    _held.clear()
    _unused.clear()
    _connections.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
