"""An append-only table of records in an SQLite file. The run's log and the agent's journal are such files.

    meta     key TEXT, value TEXT        `format`, `first`, `last`, `checksum`, and the header given at creation
    records  position INTEGER            1, 2, 3 ... without holes; `first` moves up when old records are dropped
             at_ns    INTEGER            wall clock, for people
             kind, agent  TEXT           agent is '' for the bus
             checksum INTEGER            CRC-32 of "position at_ns kind NUL agent NUL" in UTF-8, followed by the body
             body     BLOB               MessagePack; this module never looks inside
    marks    position INTEGER            the record before the mark
             at_ns, checksum, body       as above; the checksum covers "position at_ns mark NUL NUL" and the body

Theory of operation.

- `append` buffers, `commit` writes the buffer as one transaction. However the process dies, a group is in the file
  completely or not at all.
- A mark is what a reader would know after all records up to it. It is written in the same transaction as they are, so
  that a reader can begin there, and the records before it may be dropped.
- SQLite has no checksums, so each record carries one, and `first` and `last` say which records must exist. Damage is
  found when it is read, after all records before it.
- There is one writer: it locks the file itself, until it closes or dies. There can be any number of readers, also
  while it writes.
- Before each commit the writer looks whether its file is still there, and whole. If another program deleted, replaced
  or cut it, no record is written any more: nobody would find it.
- Readers take a page of records at a time and hold no lock in between. So a slow reader neither blocks the writer
  (rollback journal) nor lets the write-ahead log grow (WAL).
"""

import contextlib
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from msgspec import Struct

from schemas.carriers import database, writer_lock
from schemas.carriers.database import OWN_KEYS, Durability
from schemas.carriers.writer_lock import FileId
from schemas.errors import ConfigError, LogCorrupt, LogError

MARK: Final = "mark"
PAGE_RECORDS: Final = 256
"""Records that a reader takes at a time."""
REMOVED_AT_ONCE: Final = 1024
"""Dropped records that a commit removes, so that none takes long."""

_INSERT: Final = "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)"
_PAGE: Final = (
    "SELECT position, at_ns, kind, agent, checksum, body FROM records WHERE position >= ? ORDER BY position LIMIT ?"
)
_INSERT_MARK: Final = "INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?)"
_Row = tuple[int, int, str, str, int, bytes]
_MarkRow = tuple[int, int, int, bytes]
_Page = tuple[list[_Row], sqlite3.Error | None]  # rows, and what stopped SQLite from reading more


class Record(Struct, frozen=True, gc=False):
    """One record.

    Attributes:
        position: Counted from 1, given by `append`.
        at_ns: Wall clock, nanoseconds since 1970; negative where a clock was never set.
        kind: What the body holds.
        agent: Agent that the record is about; '' for the bus.
        body: Encoded message.
    """

    position: int
    at_ns: int
    kind: str
    agent: str
    body: bytes


class MarkRecord(Struct, frozen=True, gc=False):
    """One mark.

    Attributes:
        position: Of the record before it; 0 before all records.
        at_ns: Wall clock.
        body: Encoded state.
    """

    position: int
    at_ns: int
    body: bytes


def _checksum(position: int, at_ns: int, kind: str, agent: str, body: bytes) -> int:
    """CRC-32 over all of a record, including its position."""
    return zlib.crc32(body, zlib.crc32(f"{position} {at_ns} {kind}\0{agent}\0".encode()))


def _check_regular(path: Path) -> None:
    """Raise LogError for a pipe, a device or a folder: to open one could block, or change it."""
    if path.exists() and not path.is_file():
        raise LogError(f"{path}: not a regular file, and so no record file of rolloutctl")


# --- reading ----------------------------------------------------------------------------------------------------------


class RecordReader:
    """Reads a record file, also while another process writes it. Made by `open`; use it as a context manager.

    Use it from one thread at a time. Every method raises LogCorrupt, with the position of the damage, or LogError if
    the file can't be read.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, file: FileId) -> None:
        self.path = path
        self._connection = connection
        self._file = file
        self._closed = False

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open an existing file. Raises LogError if it is missing, LogCorrupt if it is not a record file."""
        path = Path(path)
        _check_regular(path)
        try:
            file = writer_lock.connect(path)
        except OSError:
            raise LogError(f"{path}: no such file, or it can't be reached") from None
        try:
            if path.stat().st_size == 0:
                raise LogCorrupt(f"{path}: is empty, and so no record file of rolloutctl")
            return cls(path, database.open_for_reading(path), file)
        except BaseException as error:
            writer_lock.disconnect(file)
            if isinstance(error, sqlite3.Error):
                raise database.translate(path, error, 0) from error
            raise

    @property
    def header(self) -> dict[str, str]:
        """The header given when the file was created. Raises LogCorrupt if it was damaged."""
        header = {str(key): str(value) for key, value in self._rows("SELECT key, value FROM meta")}
        recorded = header.get("checksum")
        header = {key: value for key, value in header.items() if key not in OWN_KEYS}
        if recorded != database.header_checksum(header):
            raise LogCorrupt(f"{self.path}: the header does not match its checksum. The records may still be readable")
        return header

    @property
    def journal_mode(self) -> str:
        """`wal`, or the kind of rollback journal where WAL is not available."""
        return str(self._rows("PRAGMA journal_mode")[0][0])

    @property
    def first_position(self) -> int:
        """Position of the oldest record that is kept; `last_position` + 1 if there is none."""
        return self._bound("first")

    @property
    def last_position(self) -> int:
        """Position of the newest committed record; `first_position` - 1 if there is none, so 0 in a new file."""
        return self._bound("last")

    @property
    def used_bytes(self) -> int:
        """Size of what is in the file, without space that is free for reuse."""
        pages, free, size = (
            self._rows(f"PRAGMA {what}")[0][0] for what in ("page_count", "freelist_count", "page_size")
        )
        return (int(str(pages)) - int(str(free))) * int(str(size))

    def records(self, start: int = 1) -> Iterator[Record]:
        """Yield committed records from `start` on, including those committed meanwhile. Each one is checked.

        Raises:
            LogCorrupt: After all records before the first one that is damaged or missing.
        """
        expected = max(start, self.first_position)  # rows before that may wait for their removal
        while True:
            rows, error = self._next_page(expected)
            if rows and expected < rows[0][0] <= self.first_position:  # the records before were dropped
                expected = rows[0][0]
            for row in rows:
                yield self._checked(row, expected)
                expected += 1
            if error is not None:
                raise database.translate(self.path, error, expected, self._readable(expected)) from error
            if not rows:
                return

    def mark_positions(self, until_ns: int | None = None) -> list[int]:
        """Return where marks are, in order; only those made until a moment. Files of format 1 have none."""
        if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'marks'"):
            return []
        until_ns = (1 << 63) - 1 if until_ns is None else until_ns
        rows = self._rows("SELECT position FROM marks WHERE at_ns <= ? ORDER BY position", until_ns)
        return [int(str(position)) for (position,) in rows]

    def mark(self, position: int) -> MarkRecord:
        """Return the mark at one of `mark_positions`. Raises LogCorrupt if it is damaged."""
        rows = self._rows("SELECT at_ns, checksum, body FROM marks WHERE position = ?", position)
        try:
            ((at_ns, recorded, body),) = rows
            sound = _checksum(position, at_ns, MARK, "", body) == recorded  # type: ignore[arg-type]
        except (TypeError, ValueError):
            sound = False
        if not sound:
            raise LogCorrupt(f"{self.path}: the mark after record {position} does not match its checksum", position)
        return MarkRecord(position, at_ns, body)  # type: ignore[arg-type]

    def copy_to(self, path: Path) -> None:
        """Copy what is committed into a new file, as of one moment. Raises LogError or OSError."""
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        try:
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as copy:
                self._connection.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.Error as error:
            raise LogError(f"{self.path}: its copy {path} was not written ({error})") from error

    def close(self) -> None:
        """Close the file. May be called twice."""
        if not self._closed:
            self._closed = True
            self._connection.close()
            writer_lock.disconnect(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _next_page(self, start: int) -> _Page:
        """The rows from a position on; none at the end of the file."""
        rows, error = self._page(start)
        if rows or error is not None or self.last_position < start:
            return rows, error
        # Records were committed or dropped after the page was read, or they are missing.
        rows, error = self._page(start)
        if not rows and error is None and self.first_position <= start:
            raise self._corrupt(start, f"is missing, and so are all up to {self.last_position}")
        return rows, error

    def _page(self, start: int) -> _Page:
        rows: list[_Row] = []
        try:
            # Row by row: a list() over the cursor would lose the rows before an error.
            for row in self._connection.execute(_PAGE, (start, PAGE_RECORDS)):
                rows.append(row)  # noqa: PERF402
        except sqlite3.Error as error:
            return rows, error
        return rows, None

    def _checked(self, row: _Row, expected: int) -> Record:
        position, at_ns, kind, agent, recorded, body = row
        if position != expected:
            raise self._corrupt(expected, f"is missing; the next one is {position}")
        try:
            sound = _checksum(position, at_ns, kind, agent, body) == recorded
        except TypeError:  # SQLite keeps a type with each value, so damage can change it
            sound = False
        if not sound:
            raise self._corrupt(position, "does not match its checksum")
        return Record(position, at_ns, kind, agent, body)

    def _corrupt(self, position: int, what: str) -> LogCorrupt:
        return LogCorrupt(f"{self.path}: record {position} {what}. {self._readable(position)}", position)

    def _readable(self, position: int) -> str:
        first = 1
        with contextlib.suppress(LogError):
            first = self.first_position
        return f"Records {first} to {position - 1} are readable" if position > first else "No record before it is kept"

    def _bound(self, key: str) -> int:
        value = self._rows("SELECT value FROM meta WHERE key = ?", key)
        try:
            return int(str(value[0][0]))
        except (IndexError, ValueError):
            raise LogCorrupt(f"{self.path}: {key!r} in the table meta is {value!r}, not a number") from None

    def _rows(self, query: str, *values: str | int) -> list[tuple[object, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise database.translate(self.path, error, 0) from error


# --- writing ----------------------------------------------------------------------------------------------------------


class RecordFile(RecordReader):
    """Writes a record file. Made by `open`, which creates the file or appends to it; use it as a context manager.

    Call `append` from one thread. `commit` may run in another one, so that an event loop need not wait for the disk.
    Its own reading methods return committed records; while another thread commits, read through a RecordReader.

    Attributes:
        removing: Records that were dropped are still to be removed.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, file: FileId, durability: Durability) -> None:
        super().__init__(path, connection, file)
        self._relaxes = durability == "os"  # after the first group: a log must not forget that it was opened
        real = os.path.realpath(path)
        self._watched = [(name, writer_lock.Watch(name)) for name in (real, f"{real}-wal")]
        self._process = os.getpid()
        self._pending: list[_Row] = []
        self._pending_marks: list[_MarkRow] = []
        self._committing = threading.Lock()
        self._faulted = ""  # why no more records are taken
        self._last = self.last_position
        self._dropped_before = 0  # drop at the next commit, and remove bit by bit
        self.removing = self._oldest() < self.first_position
        self._next = self._last + 1

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], header: Mapping[str, str] | None = None, durability: Durability = "disk"
    ) -> Self:
        """Create the file, with mode 0600 in a folder with mode 0700, or open it to append.

        `header` is written at creation; an existing file keeps its own.

        Raises:
            LogLocked: Another process writes the file.
            LogCorrupt: The file is damaged at its start or end, or is not a record file.
            LogError: It can't be opened for writing; LogFull if there is no space.
            ConfigError: `header` has a key that the file uses itself.
        """
        if header and (taken := OWN_KEYS & header.keys()):
            raise ConfigError(f"{min(taken)!r} can't be a key of a header: the file uses it itself")
        path = Path(path)
        _check_regular(path)
        with contextlib.ExitStack() as undo:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = writer_lock.acquire(path)
                undo.callback(writer_lock.release, file)
                undo.callback(writer_lock.disconnect, writer_lock.connect(path))
                connection = database.open_for_writing(path, header or {})
                undo.enter_context(contextlib.closing(connection))
                opened = cls(path, connection, file, durability)
            except sqlite3.Error as error:
                raise database.translate(path, error, 0) from error
            except OSError as error:
                raise LogError(f"{path}: can't be opened for writing: {error.strerror}") from error
            opened._check_end()
            opened._note_files()
            undo.pop_all()
        return opened

    @property
    def pending(self) -> int:
        """Number of records that are appended but not committed."""
        return len(self._pending)

    @property
    def next_position(self) -> int:
        """Position that the next `append` gives."""
        return self._next

    def append(self, kind: str, agent: str, at_ns: int, body: bytes) -> int:
        """Buffer one record for the next `commit`, and return its position.

        Raises:
            ValueError: `at_ns` is not a signed number of 64 bits.
            TypeError: `body` is not bytes.
        """
        if not -(1 << 63) <= at_ns < 1 << 63:
            raise ValueError(f"at_ns is nanoseconds since 1970, a signed number of 64 bits: {at_ns}")
        position = self._next
        self._pending.append((position, at_ns, kind, agent, _checksum(position, at_ns, kind, agent, body), body))
        self._next = position + 1
        return position

    def append_mark(self, at_ns: int, body: bytes) -> None:
        """Buffer a mark that follows the last record appended, for the next `commit`."""
        position = self._next - 1
        self._pending_marks.append((position, at_ns, _checksum(position, at_ns, MARK, "", body), body))

    def commit(self) -> int:
        """Write all buffered records as one group, and return the position of the last committed record.

        If it raises, nothing of the group is in the file, and all of it is still buffered.

        Raises:
            LogFull: Try again once there is space.
            LogError: After a failed flush, every later call raises it too: the system forgets what it could not write,
                so a later flush would succeed and prove nothing. The same once another program has deleted, replaced
                or cut the file.
        """
        with self._committing:
            self._check()
            marks = self._pending_marks[:]  # taken first: `append` may add more meanwhile
            group = self._pending[:]
            if not group and not marks and not self._dropped_before:
                return self._last
            last = group[-1][0] if group else self._last
            with self._transaction():
                self._connection.executemany(_INSERT, group)
                if marks:
                    self._connection.executemany(_INSERT_MARK, marks)
                self._set_bound("last", last)
                if self._dropped_before or self.removing:
                    self._remove_dropped()
            if self._relaxes:
                self._connection.execute("PRAGMA synchronous = NORMAL")
                self._relaxes = False
            del self._pending[: len(group)]
            del self._pending_marks[: len(marks)]
            self._last = last
            return last

    def drop_before(self, position: int) -> None:
        """Drop all records before a position with the next `commit`, and remove them bit by bit with those after it."""
        self._dropped_before = max(self._dropped_before, min(position, self._next))

    def compact(self) -> None:
        """Give free space back to the disk, which needs space for a copy meanwhile. Raises LogFull or LogError."""
        with self._committing:
            self._check()
            self._check_files()
            try:
                self._connection.execute("VACUUM")
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.Error as error:
                raise database.translate(self.path, error, self._last) from error
            self._note_files()

    def truncate_before(self, position: int) -> None:
        """Drop all records before a position, and the marks among them. Their space is reused; later positions stay.

        Args:
            position: From 1 to `last_position` + 1, which drops all.

        Raises:
            ValueError: `position` is outside that range.
            LogError: As from `commit`.
        """
        with self._committing:
            self._check()
            if not 1 <= position <= self._last + 1:
                raise ValueError(f"can't drop the records before {position}: the last one committed is {self._last}")
            if position <= self.first_position:
                return
            with self._transaction():
                self._connection.execute("DELETE FROM records WHERE position < ?", (position,))
                self._connection.execute("DELETE FROM marks WHERE position < ?", (position - 1,))
                self._set_bound("first", position)

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
        finally:
            self._tidy_up()
            super().close()
            writer_lock.release(self._file)

    def _tidy_up(self) -> None:
        """Leave a single file. Not if there is another in its place: what lies beside it belongs to that one."""
        with contextlib.suppress(sqlite3.Error, LogError):
            self._check_files()
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._connection.execute("PRAGMA journal_mode = DELETE")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._check_files()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
            self._note_files()
        except BaseException as error:
            if self._connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
            if not isinstance(error, sqlite3.Error):
                raise
            if database.flush_failed(error):
                self._faulted = "the disk failed to keep what was written"
            readable = f"Records up to {self._last} are readable"
            raise database.translate(self.path, error, self._last + 1, readable) from error

    def _remove_dropped(self) -> None:
        """Within a transaction: move the bound, and remove some of the records before it."""
        if self._dropped_before > self.first_position:
            self._set_bound("first", self._dropped_before)
            self._connection.execute("DELETE FROM marks WHERE position < ?", (self._dropped_before - 1,))
            self.removing = True
        self._dropped_before = 0
        if self.removing:
            first, oldest = self.first_position, self._oldest()
            before = min(first, oldest + REMOVED_AT_ONCE)
            self._connection.execute("DELETE FROM records WHERE position < ?", (before,))
            self.removing = before < first

    def _oldest(self) -> int:
        """Position of the oldest record in the table, dropped or not."""
        ((oldest,),) = self._rows("SELECT min(position) FROM records")
        return self._last + 1 if oldest is None else int(str(oldest))

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
        for name, watch in self._watched:
            if change := watch.change():
                self._faulted = (
                    f"another program interfered while it was written: {name} {change}. Records up to {self._last} "
                    "had been committed, and some may be lost. Keep a copy of what is left, and go on in another file"
                )
                raise LogError(f"{self.path}: {self._faulted}")

    def _note_files(self) -> None:
        for _, watch in self._watched:
            watch.note()

    def _check_end(self) -> None:
        """Raise LogCorrupt unless the last record exists and is sound, since new ones must follow it."""
        ((newest,),) = self._rows("SELECT max(position) FROM records")
        if (newest or self.first_position - 1) != self._last:
            raise self._corrupt(self._last, f"should be the last; the table ends with {newest}")
        if newest is not None:
            for _ in self.records(self._last):
                pass
