"""A framed file on a disk: one process appends groups of records, any number may read. Its bytes are in `framing`.

Theory of operation.

- `append` writes a group with one call. It returns when the system has it; with `flush`, when the disk has it. If it
  raises, nothing of the group counts, and what was written of it is cut off again.
- There is one writer: it locks the file itself, until it closes or dies (`writer_lock`).
- Before each group the writer looks whether its file was deleted, or is not as long as it left it; and whether it was
  moved, unless it has just looked. If another program changed it, no group is written any more: nobody would find it.
- `drop_before` gives up old groups. A thread copies what is kept into a file beside, since that waits for the disk. A
  later `append` adds what was written meanwhile, and renames the copy over the file. By then the copy is on the disk,
  so a power cut leaves the one or the other; and it is locked, so the file is never without its lock. A reader that
  has the old file open reads on in it.
- A new file is made in the same way, so no file has a header in part.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Final, NoReturn, Self

from schemas.carriers import writer_lock
from schemas.carriers.drafts import Copy, Draft, beside, create_empty, flush_file, flush_folder, write_all
from schemas.carriers.filesystems import check_regular
from schemas.carriers.forks import forks
from schemas.carriers.framing import (
    FileHeader,
    Frame,
    FramePlace,
    encode_frame,
    encode_start,
    read_start,
    whole_frames,
)
from schemas.errors import LogError, LogFull
from schemas.logs import logger_of

logger = logger_of("journal")

LOOK_S: Final = 0.1
"""Longest time for which a file that was moved is still written: to look its name up costs as much as a group."""
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FrameReader:
    """Reads a framed file, also while another process writes it. Made by `open`; a context manager.

    Attributes:
        path: Of the file.
        header: Given when the file was created.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._dropped = 0  # bytes of the groups that were dropped since the file was opened
        header, self._first = read_start(str(path), self._read)
        self.header = header.values
        self._seed = header.seed

    @classmethod
    def open(cls, path: Path) -> "FrameReader":
        """Open an existing file. Raises LogError if it can't be read, LogCorrupt if it is no framed file."""
        check_regular(path, "journal")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LogError(f"{path}: can't be read: {error.strerror}") from None
        try:
            return FrameReader(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def frames(self, place: FramePlace | None = None) -> Iterator[Frame]:
        """Yield the groups that are kept, from the first one or from a place on.

        Raises:
            LogCorrupt: After all groups before the first one that is damaged or missing.
            LogError: The file can't be read.
        """
        return whole_frames(str(self.path), self._read, place or self._first, self._seed)

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, at: int, count: int) -> bytes:
        try:
            left = os.fstat(self._descriptor).st_size - at + self._dropped
            return os.pread(self._descriptor, max(0, min(count, left)), at - self._dropped)
        except OSError as error:
            raise LogError(f"{self.path}: can't be read: {error.strerror}") from error


class FramedFile(FrameReader):
    """Writes a framed file. Made by `create_or_open`; a context manager. Use it from one thread.

    Attributes:
        sequence: That of the next group.
    """

    def __init__(self, path: Path, real: Path, draft: Draft, flush: bool) -> None:
        super().__init__(path, draft.descriptor)
        self._real, self._draft, self._flush = real, draft, flush
        self._replaced: Draft | None = None  # the file before, until it is closed
        self._made_in, self._forks = os.getpid(), len(forks)
        self._watch = writer_lock.Watch(str(real))
        self._look_at_s = 0.0  # when the file is looked up again under its name
        self._fault = ""  # why no more groups are taken
        self._worker = ThreadPoolExecutor(1, "rolloutctl-journal")
        self._copy: Copy | None = None
        self._made: Future[None] | None = None
        self._kept = 0  # up to here, groups are not dropped: a copy that began there failed
        self._at, self.sequence = self._first

    @classmethod
    def create_or_open(cls, path: Path, header: Mapping[str, str], flush: bool) -> "FramedFile":
        """Create the file, with mode 0600 in a folder with mode 0700, or open it to append to it.

        The rest of a write that was cut off is removed.

        Args:
            path: Of the file; a symbolic link is followed.
            header: Written at creation. An existing file keeps its own.
            flush: Whether each group is flushed to the disk.

        Raises:
            LogLocked: Another process writes the file.
            LogCorrupt: It is damaged, or no framed file. It was not changed.
            LogError: It can't be opened for writing; LogFull if there is no space.
        """
        check_regular(path, "journal")
        real = Path(os.path.realpath(path))
        with contextlib.ExitStack() as undo:
            try:
                real.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                draft = Draft(real)
                undo.callback(draft.close)
                beside(real).unlink(missing_ok=True)  # left by a writer that was killed
                if os.fstat(draft.descriptor).st_size == 0:
                    created = create_empty(real, header)
                    undo.close()
                    undo.callback(created.close)
                    draft = created
                file = FramedFile(path, real, draft, flush)
                file._recover()
            except OSError as error:
                raise _error(path, error, "can't be opened for writing") from error
            undo.pop_all()
        return file

    @property
    def end(self) -> FramePlace:
        """Where the next group will begin."""
        return FramePlace(self._at, self.sequence)

    @property
    def first(self) -> FramePlace:
        """Where the oldest group begins that is kept."""
        return self._first

    def append(self, kind: int, payload: bytes) -> None:
        """Write a group.

        Raises:
            LogFull: Try again once there is space.
            LogError: After a failed write or flush, every later call raises it too: the system forgets what it could
                not write, so a later flush would succeed and prove nothing. The same once another program has deleted,
                replaced, cut or extended the file.
        """
        if self._fault or self._descriptor < 0 or len(forks) != self._forks:
            self._refuse()
        self._look()
        if self._made is not None and self._made.done():
            self._switch()
        group = encode_frame(kind, self.sequence, self._seed, payload)
        end = self._at + len(group)
        try:
            write_all(self._descriptor, group, self._at - self._dropped)
            if self._flush:
                self._flush_group()
            self._at, self.sequence = end, self.sequence + 1
        except BaseException as error:
            self._undo(error)
            if isinstance(error, OSError):
                raise _error(self.path, error, f"group {self.sequence} was not written") from error
            raise

    def drop_before(self, place: FramePlace) -> None:
        """Begin to drop the groups before a place. They are gone after an `append` later on."""
        if self._copy is not None or place.at <= max(self._first.at, self._kept):
            return
        start = encode_start(FileHeader(self._seed, place.sequence, self.header))
        copy = Copy(self._descriptor, self._dropped, place, self._at, start, self._real, self._replaced)
        try:
            self._made = self._worker.submit(copy.make)
        except RuntimeError as error:  # the system lets this process have no more threads
            self._keep(place, error)
            return
        self._copy, self._replaced = copy, None

    def close(self) -> None:
        """Flush, close, and release the lock. May be called twice. It is closed even if LogError is raised."""
        if self._descriptor < 0 or len(forks) != self._forks:
            return
        try:
            self._worker.shutdown()
            if self._copy is not None:
                self._copy.discard()
            if not self._fault:
                flush_file(self._descriptor)
        except OSError as error:
            raise _error(self.path, error, "its newest groups may not be on the disk") from error
        finally:
            if self._replaced is not None:
                self._replaced.close()
            self._draft.close()
            self._descriptor = -1

    def _recover(self) -> None:
        """Find the end, and remove the rest of a write that was cut off."""
        for frame in self.frames():
            self._at, self.sequence = frame.following
        if os.fstat(self._descriptor).st_size > self._at:
            os.ftruncate(self._descriptor, self._at)
            flush_file(self._descriptor)
        self._watch.note()

    def _flush_group(self) -> None:
        try:
            flush_file(self._descriptor)
        except OSError as error:  # also where it is one of no space: the system has forgotten what it could not write
            self._fault = f"the disk failed to keep what was written ({error.strerror})"
            self._refuse()

    def _undo(self, error: BaseException) -> None:
        """Take back a group that was not written as a whole."""
        try:
            os.ftruncate(self._descriptor, self._at - self._dropped)
        except OSError as failed:
            self._fault = f"a write failed ({error}), and what it left could not be cut off ({failed.strerror})"
        if isinstance(error, OSError) and error.errno not in _NO_SPACE:
            self._fault = f"the disk failed to keep what was written ({error.strerror})"

    def _refuse(self) -> NoReturn:
        if len(forks) != self._forks:
            made = f"opened in process {self._made_in}, used in its fork. Open it in the process that uses it"
            raise LogError(f"{self.path}: {made}")
        if self._fault:
            raise LogError(f"{self.path}: {self._fault}; the file takes no more groups")
        raise LogError(f"{self.path}: is closed")

    def _look(self) -> None:
        """Raise LogError if another program has changed the file."""
        now_s, size = monotonic(), self._at - self._dropped
        found = os.fstat(self._descriptor)
        if found.st_size == size and found.st_nlink and now_s < self._look_at_s:
            return
        if change := self._watch.change(size):
            self._interfered(change)
        self._look_at_s = now_s + LOOK_S

    def _interfered(self, change: str) -> NoReturn:
        self._fault = (
            f"another program interfered while it was written: {self._real} {change}. Groups before number "
            f"{self.sequence} had been written, and some may be lost. Keep a copy of what is left"
        )
        self._refuse()

    def _switch(self) -> None:
        """Put the finished copy in the file's place."""
        copy, self._copy, self._made = self._copy, None, None
        assert copy is not None
        draft = copy.finish(self._at, self._flush)
        if draft is None:
            self._keep(copy.place, copy.failure)
            return
        # To close what has no name any more frees its space, and waits for the disk: the next copy does it.
        self._replaced, self._draft = self._draft, draft
        self._descriptor, self._dropped, self._first = draft.descriptor, copy.dropped, copy.place
        self._watch.note()
        if self._flush:
            flush_folder(self._real)

    def _keep(self, place: FramePlace, failure: Exception | None) -> None:
        logger.warning("%s keeps groups that it could drop, and grows: %s", self._real, failure)
        self._kept = place.at


def _error(path: Path, error: OSError, what: str) -> LogError:
    if error.errno in _NO_SPACE:
        return LogFull(f"{path}: {what}: no space left. Free some space, or use another disk")
    return LogError(f"{path}: {what}: {error.strerror}")
