"""The writer of a record file. Its tables, and how they are read, are in `records`.

Theory of operation.

- `append` buffers, `commit` writes the buffer as one transaction. However the process dies, a group is in the file
  completely or not at all.
- `last` is written before a checkpoint may follow and at the end, because it costs as much as a record. The records
  after it are sound as long as they are in the write-ahead log, which has checksums. So the file ends with `last`, or
  with a later record. With a rollback journal, `last` is written with each group.
- There is one writer: it holds a lock until it closes or dies. There can be any number of readers, also
  while it writes.
- Before a commit the writer looks whether its file is still there, and whole. If another program deleted, replaced or
  cut it, no record is written any more: it could not be found. A look costs a fifth of a small commit, so a writer may
  do with less than one for each.
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Final, Self

from schemas.errors import ConfigError, LogError, LogLocked
from schemas.storage import database, writer_lock
from schemas.storage.checkpointer import Checkpointer
from schemas.storage.database import OWN_KEYS, Durability
from schemas.storage.filesystems import check_regular
from schemas.storage.records import MARK, RecordReader, Row, checksum

_INSERT: Final = "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)"
_INSERT_MARK: Final = "INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?)"
MarkRow = tuple[int, int, int, bytes]


class RecordFile(RecordReader):
    """Writes a record file. Made by `open`, which creates the file or appends to it; use it as a context manager.

    Use it from one thread. Its own reading methods return committed records.

    Attributes:
        committed: Position of the last record that this writer has committed, or found.
    """

    def __init__(
        self, path: Path, connection: sqlite3.Connection, lock: int, durability: Durability, look_s: float
    ) -> None:
        super().__init__(path, connection)
        self._lock, self._look_s, self._looked_s = lock, look_s, 0.0
        self._relaxes = durability == "os"  # after the first group: a log must not forget that it was opened
        real = os.path.realpath(path)
        self._watched = [(name, writer_lock.Watch(name)) for name in (real, f"{real}-wal")]
        self._process = os.getpid()
        self._pending: list[Row] = []
        self._pending_marks: list[MarkRow] = []
        self._committing = threading.Lock()
        self._faulted = ""  # why no more records are taken
        self._writing = False  # also after a write that failed or was interrupted
        self._cursor = connection.cursor()
        self._checkpointer: Checkpointer | None = None
        self.committed = self.last_position
        self._dropped_before = 0  # drop at the next commit
        self._next = self.committed + 1

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        header: Mapping[str, str] | None = None,
        durability: Durability = "disk",
        look_s: float = 0.0,
    ) -> Self:
        """Create the file, with mode 0600 in a folder with mode 0700, or open it to append.

        Args:
            path: Of the file.
            header: Written at creation; an existing file keeps its own.
            durability: Of a committed group.
            look_s: Seconds in which one look at the file is enough, however many commits there are.

        Raises:
            LogLocked: Another process writes the file.
            LogCorrupt: The file is damaged at its start or end, or is not a record file.
            LogError: It can't be opened for writing; LogFull if there is no space.
            ConfigError: `header` has a key that the file uses itself.
        """
        if header and (taken := OWN_KEYS & header.keys()):
            raise ConfigError(f"{min(taken)!r} can't be a key of a header: the file uses it itself")
        path = Path(path)
        check_regular(path, "record file")
        with contextlib.ExitStack() as undo:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = writer_lock.acquire(path)
                undo.callback(writer_lock.release, lock)
                connection = database.open_for_writing(path, header or {})
                undo.enter_context(contextlib.closing(connection))
                opened = cls(path, connection, lock, durability, look_s)
                opened._check_end()
                if opened.journal_mode == "wal":  # where a checkpoint fails, the log grows, and nothing is lost
                    beside = database.connect(path)
                    opened._checkpointer = Checkpointer(beside, opened._committing, opened._note_failed_flush)
            except sqlite3.Error as error:
                raise database.translate(path, error, 0) from error
            except OSError as error:
                raise LogError(f"{path}: can't be opened for writing: {error.strerror}") from error
            for _, watch in opened._watched:
                watch.note()
            undo.pop_all()
        return opened

    @property
    def pending(self) -> int:
        """Number of records that are appended but not committed."""
        return len(self._pending)

    def append(self, kind: str, agent: str, at_ns: int, body: bytes) -> int:
        """Buffer one record for the next `commit`, and return its position. Raises ValueError or TypeError."""
        if not -(1 << 63) <= at_ns < 1 << 63:
            raise ValueError(f"at_ns is nanoseconds since 1970, a signed number of 64 bits: {at_ns}")
        position = self._next
        self._pending.append((position, at_ns, kind, agent, checksum(position, at_ns, kind, agent, body), body))
        self._next = position + 1
        return position

    def append_mark(self, at_ns: int, body: bytes) -> None:
        """Buffer a mark that follows the last record appended, for the next `commit`."""
        position = self._next - 1
        self._pending_marks.append((position, at_ns, checksum(position, at_ns, MARK, "", body), body))

    def take_over(self, rows: list[Row], marks: list[MarkRow]) -> None:
        """Buffer records and marks of a copy, just as they are there. An empty file begins with the first of them."""
        if rows and self._next == 1 < rows[0][0]:
            self._dropped_before = rows[0][0]
        self._pending += rows
        self._pending_marks += marks
        self._next = rows[-1][0] + 1 if rows else self._next

    def commit(self) -> int:
        """Write all buffered records as one group, and return the position of the last committed record.

        If it raises, nothing of the group is in the file, and all of it is still buffered.

        Raises:
            LogLocked: Another program has had the file locked for some seconds. Try again.
            LogFull: Try again once there is space.
            LogError: After a failed flush, every later call raises it too: the system forgets what it could not write,
                so a later flush would succeed and prove nothing. The same once another program has deleted, replaced
                or cut the file.
        """
        with self._committing:
            self._check()
            if self._writing:
                self._note_written()
            group, marks = self._pending[:], self._pending_marks[:]
            if group or marks or self._dropped_before:
                self._write(group, marks)
            return self.committed

    def drop_before(self, position: int) -> None:
        """Drop all records before a position with the next `commit`, and the marks among them. Later positions stay."""
        if position > max(self._dropped_before, self.first_position):
            self._dropped_before = min(position, self._next)

    def close(self) -> None:
        """Commit what is buffered, close, and release the lock. May be called twice.

        Raises what `commit` raises, but closes in any case. If no reader has the file open, it is left as a single file
        that can also be read where nothing can be written.
        """
        # The lock is not held in a fork, and the connection belongs to the parent.
        if self._closed or self._process != os.getpid():
            return
        try:
            if not self._faulted:
                self.commit()
                with contextlib.suppress(LogLocked):  # the records are in the file
                    self._note_end()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
            self._tidy_up()
            super().close()
            writer_lock.release(self._lock)

    def _tidy_up(self) -> None:
        """Leave a single file. Not if there is another in its place: what lies beside it belongs to that one."""
        with contextlib.suppress(sqlite3.Error, LogError):
            self._check_files()
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._connection.execute("PRAGMA journal_mode = DELETE")

    def _write(self, group: list[Row], marks: list[MarkRow]) -> None:
        self._writing = True
        checkpointer = self._checkpointer
        drops = self._dropped_before > 0
        ends = checkpointer is None or checkpointer.due
        if len(group) == 1 and not (marks or drops or ends):
            if not self._look_s or monotonic() - self._looked_s >= self._look_s:
                self._check_files()
            try:
                self._cursor.execute(_INSERT, group[0])  # a transaction by itself
            except sqlite3.Error as error:
                raise self._failure(error) from error
            last = group[0][0]
        else:
            last = group[-1][0] if group else self.committed
            with self._transaction():
                self._cursor.executemany(_INSERT, group)
                if marks:
                    self._cursor.executemany(_INSERT_MARK, marks)
                if drops:
                    self._cursor.execute("DELETE FROM records WHERE position < ?", (self._dropped_before,))
                    self._cursor.execute("DELETE FROM marks WHERE position < ?", (self._dropped_before - 1,))
                    self._set_bound("first", self._dropped_before)
                if drops or ends:
                    self._set_bound("last", last)
        if self._relaxes:
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._relaxes = False
        del self._pending[: len(group)]
        del self._pending_marks[: len(marks)]
        self.committed, self._dropped_before = last, 0
        self._writing = False
        if checkpointer is not None:
            checkpointer.note(sum(len(row[5]) for row in group) + sum(len(mark[3]) for mark in marks))
            if ends:
                checkpointer.start()

    def _note_written(self) -> None:
        """Forget what is in the file, though Ctrl-C came before that was noted: it must not be written again."""
        newest = max(self.committed, self._newest() or 0)
        del self._pending[: newest - self.committed]
        self.committed = newest
        self._writing = False

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._check_files()
        try:
            self._cursor.execute("BEGIN IMMEDIATE")
            yield
            self._cursor.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
            if not isinstance(error, sqlite3.Error):
                raise
            raise self._failure(error) from error

    def _failure(self, error: sqlite3.Error) -> LogError:
        """Our error for a transaction that failed."""
        self._note_failed_flush(error)
        return database.translate(self.path, error, self.committed + 1, f"Records up to {self.committed} are readable")

    def _note_failed_flush(self, error: sqlite3.Error) -> None:
        if database.flush_failed(error):
            self._faulted = "the disk failed to keep what was written"

    def _note_end(self) -> None:
        """Write `last` if it is behind."""
        if self._bound("last") != self.committed:
            with self._transaction():
                self._set_bound("last", self.committed)

    def _set_bound(self, key: str, value: int) -> None:
        self._connection.execute("UPDATE meta SET value = ? WHERE key = ?", (str(value), key))

    def _check(self) -> None:
        if self._closed:
            raise LogError(f"{self.path}: is closed")
        if self._process != os.getpid():
            raise LogError(
                f"{self.path}: opened in process {self._process}, used in its fork. Open it in the process that uses it"
            )
        if self._faulted:
            raise LogError(f"{self.path}: {self._faulted}; the file takes no more records")

    def _check_files(self) -> None:
        self._looked_s = monotonic()
        for name, watch in self._watched:
            if change := watch.change():
                self._faulted = (
                    f"another program interfered while it was written: {name} {change}. Records up to {self.committed} "
                    "had been committed, and some may be lost. Keep a copy of what is left, and go on in another file"
                )
                raise LogError(f"{self.path}: {self._faulted}")

    def _check_end(self) -> None:
        """Raise LogCorrupt unless the last record exists and is sound, since new ones must follow it."""
        newest = self._newest()
        if (newest or self.first_position - 1) != self.committed:
            raise self._corrupt(self.committed, f"should be the last; the table ends with {newest}")
        if newest is not None:
            for _ in self.records(self.committed):
                pass
