"""An append-only table of records in an SQLite file, and how it is read. The run's log and the agents'
journals are such files.

    meta     key TEXT, value TEXT        `format`, `first`, `last`, `checksum`, and the header given at creation
    records  position INTEGER            1, 2, 3 ... without holes; `first` moves up when old records are dropped
             at_ns    INTEGER            wall clock, for people
             kind, agent  TEXT           agent is '' for the bus
             checksum INTEGER            CRC-32 of "position at_ns kind NUL agent NUL" in UTF-8, followed by the body
             body     BLOB               MessagePack; this module never looks inside
    marks    position INTEGER            the record before the mark
             at_ns, checksum, body       as above; the checksum covers "position at_ns mark NUL NUL" and the body

Theory of operation; `record_file` has that of the writer.

- A mark is what a reader would know after all records up to it. It is written in the same transaction as they are, so
  that a reader can begin there, and the records before it may be dropped.
- SQLite has no checksums, so each record carries one, and `first` and `last` say which records must exist. Damage is
  found when it is read, after all records before it.
- Readers take a page of records at a time and hold no lock in between. So a slow reader neither blocks the writer
  (rollback journal) nor lets the write-ahead log grow (WAL).
"""

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from msgspec import Struct

from schemas.errors import LogCorrupt, LogError
from schemas.storage import database
from schemas.storage.database import OWN_KEYS
from schemas.storage.filesystems import check_regular

MARK: Final = "mark"
PAGE_RECORDS: Final = 256
"""Records that a reader takes at a time."""

_PAGE: Final = (
    "SELECT position, at_ns, kind, agent, checksum, body FROM records WHERE position >= ? ORDER BY position LIMIT ?"
)
Row = tuple[int, int, str, str, int, bytes]
_Page = tuple[list[Row], sqlite3.Error | None]  # rows, and what stopped SQLite from reading more


class Record(Struct, frozen=True, gc=False):
    """One record.

    Attributes:
        at_ns: Wall clock, nanoseconds since 1970; negative where a clock was never set.
        agent: Agent that the record is about; '' for the bus.
    """

    position: int
    at_ns: int
    kind: str
    agent: str
    body: bytes


class MarkRecord(Struct, frozen=True, gc=False):
    """One mark. Its position is that of the record before it, 0 before all records."""

    position: int
    at_ns: int
    body: bytes


def checksum(position: int, at_ns: int, kind: str, agent: str, body: bytes) -> int:
    """CRC-32 over all of a record, including its position."""
    return zlib.crc32(body, zlib.crc32(f"{position} {at_ns} {kind}\0{agent}\0".encode()))


class RecordReader:
    """Reads a record file, also while another process writes it. Made by `open`; use it as a context manager.

    Use it from one thread at a time. Every method raises LogCorrupt, with the position of the damage, or LogError if
    the file can't be read.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._closed = False

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open an existing file. Raises LogError if it is missing, LogCorrupt if it is not a record file."""
        path = Path(path)
        check_regular(path, "record file")
        try:
            if path.stat().st_size == 0:
                raise LogCorrupt(f"{path}: is empty, and so no record file of rolloutctl")
            return cls(path, database.open_for_reading(path))
        except OSError:
            raise LogError(f"{path}: no such file, or it can't be reached") from None
        except sqlite3.Error as error:
            raise database.translate(path, error, 0) from error

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
        return max(self._bound("last"), self._newest() or 0)

    @property
    def used_bytes(self) -> int:
        """Size of what is in the file, without space that is free for reuse."""
        pages, free, size = (
            self._rows(f"PRAGMA {what}")[0][0] for what in ("page_count", "freelist_count", "page_size")
        )
        return (int(str(pages)) - int(str(free))) * int(str(size))

    def records(self, start: int = 1) -> Iterator[Record]:
        """Yield committed records from `start` on, including those committed meanwhile. Each one is checked.

        Raises LogCorrupt at the first that is damaged or missing.
        """
        expected = max(start, self.first_position)
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
        """Return where marks are, in order; only those made until a moment."""
        until_ns = (1 << 63) - 1 if until_ns is None else until_ns
        rows = self._rows("SELECT position FROM marks WHERE at_ns <= ? ORDER BY position", until_ns)
        return [int(str(position)) for (position,) in rows]

    def mark(self, position: int) -> MarkRecord:
        """Return the mark at one of `mark_positions`. Raises LogCorrupt if it is damaged."""
        rows = self._rows("SELECT at_ns, checksum, body FROM marks WHERE position = ?", position)
        try:
            ((at_ns, recorded, body),) = rows
            sound = checksum(position, at_ns, MARK, "", body) == recorded  # type: ignore[arg-type]
        except (TypeError, ValueError):
            sound = False
        if not sound:
            raise LogCorrupt(f"{self.path}: the mark after record {position} does not match its checksum", position)
        return MarkRecord(position, at_ns, body)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the file. May be called twice."""
        if not self._closed:
            self._closed = True
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        rows: list[Row] = []
        try:
            # Row by row: a list() over the cursor would lose the rows before an error.
            for row in self._connection.execute(_PAGE, (start, PAGE_RECORDS)):
                rows.append(row)  # noqa: PERF402
        except sqlite3.Error as error:
            return rows, error
        return rows, None

    def _checked(self, row: Row, expected: int) -> Record:
        position, at_ns, kind, agent, recorded, body = row
        if position != expected:
            raise self._corrupt(expected, f"is missing; the next one is {position}")
        try:
            sound = checksum(position, at_ns, kind, agent, body) == recorded
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

    def _newest(self) -> int | None:
        """Position of the last record in the table; None if there is none."""
        ((newest,),) = self._rows("SELECT max(position) FROM records")
        return None if newest is None else int(str(newest))

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
