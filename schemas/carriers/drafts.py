"""Files that take the place of another one: a draft is locked before it has the name, and complete before it gets it.

Pieces of `framed_file`: how its file is created, and how old groups are dropped from it.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from schemas.carriers import writer_lock
from schemas.carriers.framing import FileHeader, FramePlace, encode_start
from schemas.errors import LogError

COPY_BYTES: Final = 1 << 20
"""Bytes that are copied at a time."""


class Draft:
    """A file that is locked and open for writing, and not in use yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = writer_lock.acquire(path)
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            found = os.fstat(self.descriptor)
            if (found.st_dev, found.st_ino) != self.lock:
                os.close(self.descriptor)
                raise LogError(f"{path}: another program put another file in its place while it was opened. Try again")
        except BaseException:
            writer_lock.release(self.lock)
            raise

    def close(self) -> None:
        """Close it, and let another writer in."""
        os.close(self.descriptor)
        writer_lock.release(self.lock)


class Copy:
    """A copy of a file from a place on, in a file beside it that is locked already. `make` runs in a thread.

    Attributes:
        place: Where it begins.
        dropped: Bytes of the groups before it, less those of its header.
        failure: Why there is none.
    """

    def __init__(
        self,
        source: int,
        shift: int,
        place: FramePlace,
        end: int,
        start: bytes,
        path: Path,
        replaced: Draft | None,
    ) -> None:
        self.place, self.dropped = place, place.at - len(start)
        self._source, self._shift = source, shift  # of the file, and bytes that were dropped from it
        self._copied, self._end = place.at, end
        self._start, self._path, self._real = start, beside(path), path
        self._replaced = replaced
        self._draft: Draft | None = None
        self.failure: Exception | None = None

    def make(self) -> None:
        """Copy what there was when it was asked for. Never raises; see `failure`."""
        try:
            if self._replaced is not None:
                self._replaced.close()
            self._path.unlink(missing_ok=True)
            self._draft = Draft(self._path)
            write_all(self._draft.descriptor, self._start, 0)
            self._copy_to(self._end)
            flush_file(self._draft.descriptor)
        except (OSError, LogError) as error:
            self.failure = error

    def finish(self, end: int, flush: bool) -> Draft | None:
        """Copy what was written meanwhile, and rename the copy over the file. Returns None if that failed."""
        try:
            if self.failure is None and self._draft is not None:
                self._copy_to(end)
                if flush:
                    flush_file(self._draft.descriptor)
                os.rename(self._path, self._real)
                return self._draft
        except OSError as error:
            self.failure = error
        self.discard()
        return None

    def discard(self) -> None:
        """Remove the copy."""
        if self._draft is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._draft.close()

    def _copy_to(self, end: int) -> None:
        assert self._draft is not None
        while self._copied < end:
            data = os.pread(self._source, min(COPY_BYTES, end - self._copied), self._copied - self._shift)
            if not data:
                raise OSError(errno.EIO, "it was cut while it was copied")
            write_all(self._draft.descriptor, data, self._copied - self.dropped)
            self._copied += len(data)


def create_empty(path: Path, header: Mapping[str, str]) -> Draft:
    """Put a file without groups in the place of an empty one."""
    start = encode_start(FileHeader(secrets.randbits(32), 1, dict(header)))
    draft = Draft(beside(path))
    try:
        write_all(draft.descriptor, start, 0)
        flush_file(draft.descriptor)
        os.rename(draft.path, path)
        flush_folder(path)
    except BaseException:
        draft.path.unlink(missing_ok=True)
        draft.close()
        raise
    return draft


def beside(path: Path) -> Path:
    """Return where the draft lies that is to take the place of a file."""
    return path.with_name(f"{path.name}.new")


def write_all(descriptor: int, data: bytes, at: int) -> None:
    """Write all bytes. A full disk takes some of them, and raises on the next attempt."""
    written = os.pwrite(descriptor, data, at)
    while written < len(data):
        more = os.pwrite(descriptor, data[written:], at + written)
        if more == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += more


def flush_file(descriptor: int) -> None:
    """Return when the disk has what was written."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS lacks it


def flush_folder(path: Path) -> None:
    """Make sure that the file is found under its name after a power cut."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
