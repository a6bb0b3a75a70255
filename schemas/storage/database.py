"""Opens the SQLite database of a record file, and turns SQLite's errors into those of `schemas.errors`.

WAL needs memory that all processes with the file share, which no network file system offers. There the file has a
rollback journal: slower, and the writer waits while a reader takes a page.
"""

import contextlib
import errno
import os
import sqlite3
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

from schemas.errors import LogCorrupt, LogError, LogFull, LogLocked
from schemas.storage.filesystems import network_type

FORMAT: Final = 4
"""Version of the tables and of what is in them."""
OWN_KEYS: Final = frozenset({"format", "first", "last", "checksum"})
"""Keys of the table `meta` that are not part of the header."""

BUSY_S: Final = 5
"""Time that a statement waits for another process before it fails."""
_FLUSH_FAILED: Final = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RECORDS: Final = (
    "CREATE TABLE records (position INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL, kind TEXT NOT NULL, "
    "agent TEXT NOT NULL, checksum INTEGER NOT NULL, body BLOB NOT NULL)"
)
_MARKS: Final = (
    "CREATE TABLE marks (position INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL, "
    "checksum INTEGER NOT NULL, body BLOB NOT NULL)"
)

Durability = Literal["disk", "os"]
"""`disk`: a committed group is on the disk (synchronous=FULL). `os`: it survives the process, but a power cut may take
the last groups (NORMAL), though never the first one after opening. OFF is not offered: in WAL mode, where NORMAL
flushes only at checkpoints, it is hardly faster, and a power cut may take the whole file."""


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open an existing record file. Raises sqlite3.Error or LogError."""
    try:
        return _open_read_only(path, "mode=ro")
    except sqlite3.OperationalError as error:
        if error_code(error) not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
            raise
        # A writer that was killed left a transaction to roll back, which means writing.
        return _open_read_only(path, "mode=rw")


def open_for_writing(path: Path, header: Mapping[str, str]) -> sqlite3.Connection:
    """Fill an empty file or open a record file, and choose its journal. Raises sqlite3.Error or LogError.

    The file exists, because it is locked before. Its mode is that of the files that SQLite puts beside it.
    """
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(contextlib.closing(connect(path, "mode=rw")))
        _choose_journal(path, connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # `schemas.storage.checkpointer` runs them
        connection.execute("PRAGMA journal_size_limit = -1")  # a log that is shorter than before was cut by others
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables == 0:
            own = {"format": str(FORMAT), "first": "1", "last": "0", "checksum": header_checksum(header)}
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
            connection.execute(_RECORDS)
            connection.execute(_MARKS)
            connection.executemany("INSERT INTO meta VALUES (?, ?)", [*own.items(), *header.items()])
            connection.execute("COMMIT")
        _check_format(path, connection)
        undo.pop_all()
    return connection


def header_checksum(header: Mapping[str, str]) -> str:
    """Return the CRC-32 of a header, as the table `meta` holds it."""
    return str(zlib.crc32("\0".join(f"{key}\0{header[key]}" for key in sorted(header)).encode()))


def connect(path: Path, mode: str = "mode=rw") -> sqlite3.Connection:
    """Connect to an existing file. Raises sqlite3.Error."""
    uri = f"file:{quote(str(path.absolute()))}?{mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)


def _open_read_only(path: Path, mode: str) -> sqlite3.Connection:
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(contextlib.closing(connect(path, mode)))
        connection.execute("PRAGMA query_only = ON")
        try:
            _check_format(path, connection)
        except sqlite3.DatabaseError as error:
            if error_code(error) != sqlite3.SQLITE_CORRUPT:
                raise
            # SQLite refuses all of a truncated file. With this setting it reads up to the damage.
            connection.execute("PRAGMA writable_schema = ON")
            _check_format(path, connection)
        undo.pop_all()
    return connection


def _choose_journal(path: Path, connection: sqlite3.Connection) -> None:
    mode = ""
    if not network_type(path):
        # Raises where processes can't share memory, and returns another mode where SQLite was built without WAL.
        with contextlib.suppress(sqlite3.OperationalError):
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        connection.execute("PRAGMA journal_mode = TRUNCATE").fetchone()


def _check_format(path: Path, connection: sqlite3.Connection) -> None:
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        connection.execute("SELECT position FROM records LIMIT 0")
    except sqlite3.OperationalError as error:
        if error_code(error) != sqlite3.SQLITE_ERROR:
            raise
        raise LogCorrupt(f"{path}: an SQLite database, but not a record file of rolloutctl ({error})") from error
    if row is None or not str(row[0]).isdecimal():
        raise LogCorrupt(f"{path}: the header does not name the format")
    if int(row[0]) != FORMAT:
        other = f"another version of rolloutctl wrote it, in format {row[0]}; this one reads format {FORMAT}"
        raise LogError(f"{path}: {other}. Use the version that wrote it, or another file")


# --- errors -----------------------------------------------------------------------------------------------------------


def error_code(error: sqlite3.Error) -> int:
    """Return SQLite's primary error code; SQLITE_ERROR for an error that Python raised itself."""
    return _extended_code(error) & 0xFF


def flush_failed(error: sqlite3.Error) -> bool:
    """Whether the system could not write a file to the disk."""
    return _extended_code(error) in _FLUSH_FAILED


def _extended_code(error: sqlite3.Error) -> int:
    return error.sqlite_errorcode if hasattr(error, "sqlite_errorcode") else sqlite3.SQLITE_ERROR


def translate(path: Path, error: sqlite3.Error, position: int, readable: str = "Nothing in it is readable") -> LogError:
    """Return our error for one of SQLite's."""
    code = error_code(error)
    # SQLite reports a quota or a limit on file sizes as a plain I/O error, without the system's error number.
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _out_of_space(path)):
        return LogFull(f"{path}: no space left for record {position}. {readable}; free some space, or use another disk")
    if code == sqlite3.SQLITE_NOTADB:
        return LogCorrupt(f"{path}: not a record file of rolloutctl, or its start is damaged ({error})", position)
    if code == sqlite3.SQLITE_CORRUPT or "decode to UTF-8" in str(error):
        return LogCorrupt(f"{path}: damaged from record {position} on ({error}). {readable}", position)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LogLocked(f"{path}: another program keeps the file locked. Close the file there, then try again")
    return LogError(f"{path}: {error}")


def _out_of_space(path: Path) -> bool:
    """Whether a probe file beside this one can't be made larger than it, for lack of space."""
    files = (path, Path(f"{path}-wal"), Path(f"{path}-journal"))
    probe = f"{path}.probe"
    block = bytes(65536)
    try:
        size = max(file.stat().st_size for file in files if file.exists())
        descriptor = os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            written = os.pwrite(descriptor, block, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            os.unlink(probe)
    except OSError as error:
        return error.errno in _NO_SPACE
    return written < len(block)
