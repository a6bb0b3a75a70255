"""An append-only table of records in one SQLite file: under the bus's log of a run and under the agent's journal.

    meta     key TEXT, value TEXT        `format`, `first`, `last`, `checksum` and the header that the maker gave
    records  position INTEGER            1, 2, 3 ... without holes; `first` moves up when old records are dropped
             at_ns    INTEGER            wall clock, for people
             kind, agent  TEXT           agent is '' for the bus
             checksum INTEGER            CRC-32 of "position at_ns kind NUL agent NUL" in UTF-8, followed by the body
             body     BLOB               MessagePack; this module never looks inside

Theory of operation.

- `append` buffers, `commit` writes the buffer as one transaction. A group is there whole or not at all, whatever kills
  the process. SQLite has no checksums of its own, so each record carries one, and `first` and `last` say what has to be
  there: damage is found when it is read, and everything before it has been handed out by then.
- One writer: a lock on `<path>.lock`, which dies with its process. Any number of readers, also while it writes.
- Readers take a page of records at a time and hold no lock in between, so a slow one neither stops the writer (rollback
  journal) nor makes the write-ahead log grow (WAL).
- WAL needs memory shared by all who have the file open, which no network file system offers. There the file has a
  rollback journal: slower, and the writer waits while a reader takes a page.
- Durability "disk" (synchronous=FULL): a committed group is on the disk. "os" (NORMAL): it survives the process, but a
  power cut may take the last groups. Not OFF: hardly faster in WAL mode, where NORMAL flushes only at checkpoints, and
  a power cut may then take the whole file.
"""

import contextlib
import errno
import os
import sqlite3
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self
from urllib.parse import quote

from msgspec import Struct

from schemas.carriers import writer_lock
from schemas.carriers.filesystems import filesystem_type, is_network, read_mounts
from schemas.errors import ConfigError, LogCorrupt, LogError, LogFull

FORMAT: Final = 1  # of the tables above; a reader refuses what is newer
PAGE_RECORDS: Final = 256  # that a reader takes at a time
PROBLEMS_MAX: Final = 100  # after which `verify` stops looking
BUSY_S: Final = 5.0  # that a statement waits for another process before it is an error

Durability = Literal["disk", "os"]

_OWN_KEYS: Final = frozenset({"format", "first", "last", "checksum"})
_INSERT: Final = "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)"
_PAGE: Final = (
    "SELECT position, at_ns, kind, agent, checksum, body FROM records WHERE position >= ? ORDER BY position LIMIT ?"
)
_Row = tuple[int, int, str, str, int, bytes]


class Record(Struct, frozen=True, gc=False):
    """One line of the table.

    position: >= 1, given by `append`.   at_ns: wall clock, nanoseconds since 1970.   agent: '' for the bus.
    """

    position: int
    at_ns: int
    kind: str
    agent: str
    body: bytes


class Problem(Struct, frozen=True):
    """One thing that `verify` found. position: of the record concerned, 0 for the header."""

    position: int
    what: str


def checksum(position: int, at_ns: int, kind: str, agent: str, body: bytes) -> int:
    """CRC-32 over everything in a record, so that nothing in it changes unnoticed, its place included."""
    return zlib.crc32(body, zlib.crc32(f"{position} {at_ns} {kind}\0{agent}\0".encode()))


# Reading


class RecordReader:
    """Reads a record file, also while another process writes it. Made by `open`; use as a context manager.

    One thread at a time. Raises LogCorrupt with the position of the damage, LogError where the file can't be read.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open an existing file for reading. Raises LogError if it is missing, LogCorrupt if it is no record file."""
        path = Path(path)
        if not os.path.exists(path):
            raise LogError(f"{path}: there is no such file, or it can't be reached")
        try:
            try:
                return cls(path, _look(path, "mode=ro"))
            except sqlite3.OperationalError as error:
                if _code(error) not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
                    raise
                # A writer that was killed has left work to undo, and that is writing.
                return cls(path, _look(path, "mode=rw"))
        except sqlite3.Error as error:
            raise _explain(path, error, 0) from error

    @property
    def header(self) -> dict[str, str]:
        """What the maker of the file wrote into it. Raises LogCorrupt if that was damaged."""
        header = {str(key): str(value) for key, value in self._rows("SELECT key, value FROM meta")}
        recorded = header.get("checksum")
        header = {key: value for key, value in header.items() if key not in _OWN_KEYS}
        if recorded != _header_checksum(header):
            raise LogCorrupt(f"{self.path}: the header does not match its checksum. The records may still be readable")
        return header

    @property
    def journal_mode(self) -> str:
        """'wal', or the kind of rollback journal where WAL can't be had."""
        return str(self._rows("PRAGMA journal_mode")[0][0])

    @property
    def first_position(self) -> int:
        """Of the oldest record that is kept; last_position + 1 if there is none."""
        return self._bound("first")

    @property
    def last_position(self) -> int:
        """Of the newest record that is committed; first_position - 1, so 0 in a new file, if there is none."""
        return self._bound("last")

    def records(self, start: int = 1, kinds: Collection[str] | None = None) -> Iterator[Record]:
        """Yield committed records in order, from `start` or from the oldest that is kept, each one checked.

        Records that are committed meanwhile come too. kinds: leave out all others; they are checked nevertheless.
        Raises LogCorrupt at the first record that is damaged or missing, after all those before it.
        """
        expected = start
        while True:
            rows, error = self._page(expected)
            if not rows and error is None:
                if self.last_position < expected:
                    return
                # Either they were committed or dropped since we looked, or they are gone.
                rows, error = self._page(expected)
                if not rows and error is None:
                    if (first := self.first_position) <= expected:
                        raise self._corrupt(expected, f"is missing, and so are all up to {self.last_position}")
                    expected = first
                    continue
            if rows and expected < rows[0][0] <= self.first_position:
                expected = rows[0][0]
            for row in rows:
                record = self._checked(row, expected)
                expected += 1
                if kinds is None or record.kind in kinds:
                    yield record
            if error is not None:
                raise _explain(self.path, error, expected, self._readable(expected)) from error

    def verify(self) -> tuple[Problem, ...]:
        """Read everything and return what is wrong, in order; () if nothing is. Stops after PROBLEMS_MAX.

        Goes on past damage for as long as SQLite can. Raises nothing for damage, LogError if the file can't be read.
        """
        problems: list[Problem] = []
        start = 1
        try:
            _ = self.header
        except LogCorrupt as error:
            problems.append(Problem(0, str(error)))
        while len(problems) < PROBLEMS_MAX:
            try:
                for record in self.records(start):
                    start = record.position + 1
                break
            except LogCorrupt as error:
                problems.append(Problem(error.position, str(error)))
                if error.__cause__ is not None or error.position < start:
                    break  # SQLite itself can't read on, or the bounds are wrong
                ((behind,),) = self._rows("SELECT min(position) FROM records WHERE position > ?", error.position)
                if not isinstance(behind, int):
                    break
                start = behind
        return tuple(problems)

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _page(self, start: int) -> tuple[list[_Row], sqlite3.Error | None]:
        """Up to PAGE_RECORDS rows, and what stopped SQLite from reading on: the rows before damage still count."""
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
            sound = checksum(position, at_ns, kind, agent, body) == recorded
        except TypeError:
            # Damage can change a column's type: SQLite keeps it with each value.
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
            raise _explain(self.path, error, 0) from error


# Writing


class RecordFile(RecordReader):
    """Writes a record file; made by `open`, which creates it or goes on where it ends. Use as a context manager.

    journal_mode: 'wal', or 'truncate' where WAL can't be had.

    `append` from one thread; `commit` may run in another one, so that a loop need not wait for the disk. Reads, here,
    see what is committed; while another thread commits, read through a RecordReader.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int) -> None:
        super().__init__(path, connection)
        self._lock = lock
        self._process = os.getpid()
        self._pending: list[_Row] = []
        self._committing = threading.Lock()
        self._faulted = False
        self._closed = False
        self._last = self.last_position
        self._next = self._last + 1

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], header: Mapping[str, str] | None = None, durability: Durability = "disk"
    ) -> Self:
        """Create the file, or reopen it to append. Its folder is made 0700 if missing, the file 0600.

        header: written when the file is made. Of a file that exists its own stands: see `.header`.
        durability: "disk", a committed group survives a power cut; "os", it survives the process.
        Raises LogLocked if another process writes the file, LogCorrupt if it is damaged at its start or end or is no
        record file, LogFull, LogError, and ConfigError for a header that uses a name of the table's own.
        """
        if header and (taken := _OWN_KEYS & header.keys()):
            raise ConfigError(f"{min(taken)!r} can't be a key of a header: the file uses it itself")
        path = Path(path)
        with contextlib.ExitStack() as undo:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = writer_lock.acquire(path)
                undo.callback(writer_lock.release, lock)
                _create_file(path)
                connection = undo.enter_context(contextlib.closing(_connect(path, "mode=rw")))
                _set_up(path, connection, header or {}, durability)
                opened = cls(path, connection, lock)
            except sqlite3.Error as error:
                raise _explain(path, error, 0) from error
            except OSError as error:
                raise LogError(f"{path}: can't be opened for writing: {error.strerror}") from error
            opened._check_end()
            undo.pop_all()
        return opened

    @property
    def pending(self) -> int:
        """Records appended and not committed."""
        return len(self._pending)

    def append(self, kind: str, agent: str, at_ns: int, body: bytes) -> int:
        """Buffer one record for the next `commit`; return the position that it will have.

        at_ns: 0 to 2**63 - 1. Raises ValueError for another one, TypeError for a body that is not bytes.
        """
        if not 0 <= at_ns < 1 << 63:
            raise ValueError(f"at_ns is nanoseconds since 1970, from 0 to 2**63 - 1: {at_ns}")
        position = self._next
        self._pending.append((position, at_ns, kind, agent, checksum(position, at_ns, kind, agent, body), body))
        self._next = position + 1
        return position

    def commit(self) -> int:
        """Write what is buffered as one group; return the position of the last record that is committed.

        When it returns, the group is as safe as the durability says. When it raises, nothing of the group is in the
        file, all of it is still buffered, and what was committed before is readable. After LogFull it may be tried
        again once there is space; after a failed flush it may not (LogError every time): the system forgets what it
        could not write, so a flush that succeeds later would prove nothing.
        """
        with self._committing:
            self._check()
            group = self._pending[:]  # appends go on meanwhile, behind these
            if not group:
                return self._last
            last = group[-1][0]
            with self._transaction():
                self._connection.executemany(_INSERT, group)
                self._set_bound("last", last)
            del self._pending[: len(group)]
            self._last = last
            return last

    def truncate_before(self, position: int) -> None:
        """Drop all records before a position; their space is used again. Positions never start over.

        position: from 1 to last_position + 1, which drops all. Raises ValueError beyond that, LogFull, LogError.
        """
        with self._committing:
            self._check()
            if not 1 <= position <= self._last + 1:
                raise ValueError(f"can't drop the records before {position}: the last one committed is {self._last}")
            if position <= self.first_position:
                return
            with self._transaction():
                self._connection.execute("DELETE FROM records WHERE position < ?", (position,))
                self._set_bound("first", position)

    def close(self) -> None:
        """Commit what is buffered, close, let others write. May be called twice.

        Raises what `commit` raises, and has closed nevertheless. Without readers the file is left in one piece, which
        also opens where nothing can be written.
        """
        # In a fork the lock was dropped with the fork, and the connection is not ours to touch.
        if self._closed or self._process != os.getpid():
            return
        try:
            if not self._faulted:
                self.commit()
        finally:
            self._closed = True
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA busy_timeout = 0")
                self._connection.execute("PRAGMA journal_mode = DELETE")
            self._connection.close()
            writer_lock.release(self._lock)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
            if not isinstance(error, sqlite3.Error):
                raise
            self._faulted = _code(error, 0xFFFF) in _FLUSH_FAILED
            raise _explain(self.path, error, self._last + 1, f"Records up to {self._last} are readable") from error

    def _set_bound(self, key: str, value: int) -> None:
        self._connection.execute("UPDATE meta SET value = ? WHERE key = ?", (str(value), key))

    def _check(self) -> None:
        if self._closed:
            raise LogError(f"{self.path}: is closed")
        if self._process != os.getpid():
            raise LogError(
                f"{self.path}: opened in process {self._process}, used in its fork. Open it where it is used"
            )
        if self._faulted:
            raise LogError(f"{self.path}: the disk failed to keep what was written; the file takes no more records")

    def _check_end(self) -> None:
        """Raise LogCorrupt unless the last record is there and sound: what is appended must follow it."""
        ((newest,),) = self._rows("SELECT max(position) FROM records")
        if (newest or self.first_position - 1) != self._last:
            raise self._corrupt(self._last, f"should be the last; the table ends with {newest}")
        if newest is not None:
            for _ in self.records(self._last):
                pass


# SQLite and the system

_FLUSH_FAILED: Final = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?{mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)


def _look(path: Path, mode: str) -> sqlite3.Connection:
    """A connection that only reads, as far as the file can be read."""
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(contextlib.closing(_connect(path, mode)))
        connection.execute("PRAGMA query_only = ON")
        try:
            _check_format(path, connection)
        except sqlite3.DatabaseError as error:
            if _code(error) != sqlite3.SQLITE_CORRUPT:
                raise
            # A file that was cut off is refused whole. This makes SQLite read it as far as it goes.
            connection.execute("PRAGMA writable_schema = ON")
            _check_format(path, connection)
        undo.pop_all()
    return connection


def _set_up(path: Path, connection: sqlite3.Connection, header: Mapping[str, str], durability: Durability) -> None:
    """Choose the journal, and make the tables if there are none."""
    mode = ""
    if not is_network(filesystem_type(os.path.realpath(path), read_mounts())):
        # Raises where the system can't share memory, and returns another mode where SQLite was built without it.
        with contextlib.suppress(sqlite3.OperationalError):
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        connection.execute("PRAGMA journal_mode = TRUNCATE").fetchone()
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'disk' else 'NORMAL'}")
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables == 0:
        own = {"format": str(FORMAT), "first": "1", "last": "0", "checksum": _header_checksum(header)}
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
        connection.execute(
            "CREATE TABLE records (position INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL, kind TEXT NOT NULL, "
            "agent TEXT NOT NULL, checksum INTEGER NOT NULL, body BLOB NOT NULL)"
        )
        connection.executemany("INSERT INTO meta VALUES (?, ?)", [*own.items(), *header.items()])
        connection.execute("COMMIT")
    _check_format(path, connection)


def _check_format(path: Path, connection: sqlite3.Connection) -> None:
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        connection.execute("SELECT position FROM records LIMIT 0")
    except sqlite3.OperationalError as error:
        if _code(error) != sqlite3.SQLITE_ERROR:
            raise
        raise LogCorrupt(f"{path}: an SQLite database, but not a record file of rolloutctl ({error})") from error
    if row is None or not str(row[0]).isdecimal():
        raise LogCorrupt(f"{path}: the header does not tell the format")
    if int(row[0]) > FORMAT:
        raise LogError(f"{path}: made by a newer rolloutctl, in format {row[0]}; this one reads up to {FORMAT}. Update")


def _header_checksum(header: Mapping[str, str]) -> str:
    return str(zlib.crc32("\0".join(f"{key}\0{header[key]}" for key in sorted(header)).encode()))


def _code(error: sqlite3.Error, bits: int = 0xFF) -> int:
    """SQLite's code, by default without the detail; SQLITE_ERROR where Python raised without asking SQLite."""
    return error.sqlite_errorcode & bits if hasattr(error, "sqlite_errorcode") else sqlite3.SQLITE_ERROR


def _explain(path: Path, error: sqlite3.Error, position: int, readable: str = "Nothing in it is readable") -> LogError:
    """The error of ours for one of SQLite's. position: of the record that could not be read or written, or 0."""
    code = _code(error)
    # SQLite reports a quota and a limit on file sizes as a plain I/O error, without the system's number.
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _refuses_more(path)):
        return LogFull(f"{path}: no space left for record {position}. {readable}; make space, or use another disk")
    if code == sqlite3.SQLITE_NOTADB:
        return LogCorrupt(f"{path}: not a record file of rolloutctl, or its start is damaged ({error})", position)
    if code == sqlite3.SQLITE_CORRUPT or "decode to UTF-8" in str(error):
        return LogCorrupt(f"{path}: damaged from record {position} on ({error}). {readable}", position)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LogError(f"{path}: another program kept the file locked for {BUSY_S:g} s. Close it there, try again")
    return LogError(f"{path}: {error}")


def _refuses_more(path: Path) -> bool:
    """Whether the system refuses to let a file beside this one grow beyond its size, for want of space."""
    near = (path, Path(f"{path}-wal"), Path(f"{path}-journal"))
    probe = f"{path}.probe"
    block = bytes(65536)
    try:
        size = max(one.stat().st_size for one in near if one.exists())
        descriptor = os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            wrote = os.pwrite(descriptor, block, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            os.unlink(probe)
    except OSError as error:
        return error.errno in _NO_SPACE
    return wrote < len(block)


def _create_file(path: Path) -> None:
    """Make the file with its mode, which SQLite then gives to the files it puts beside it."""
    # Only if it is new: closing a second descriptor of a file that SQLite has open in this process drops its locks.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
