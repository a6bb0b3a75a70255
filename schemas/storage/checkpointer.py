"""WAL checkpoints of a record file, in a thread: SQLite copies its write-ahead log (WAL) into the file.

Theory of operation.

- Within a commit, SQLite would run a checkpoint now and then: some milliseconds, most of them waiting for the disk, in
  the middle of an event loop. So the writer's connection runs none. It says how much it wrote, and a thread runs them
  on a connection of its own.
- The checkpoints are passive: they wait for nothing, and nothing waits for them. One that meets no commit and no
  reader copies the whole log, and the next commit begins the log anew. One that meets some copies what it can.
- Under a load without pauses, each of them meets a commit. So when the log has become too long, the thread keeps
  commits out for the last bit: once in some ten thousand of them, for a few milliseconds.
- A checkpoint flushes the log before it changes the file, and the file before the log may begin anew, whatever the
  durability of commits is. So a power cut finds each record in one of them.
"""

import sqlite3
import threading
from collections.abc import Callable
from typing import Final

PAGE_BYTES: Final = 4096
"""SQLite's page, which it writes whole."""
CHECKPOINT_BYTES: Final = 32 * 1024 * 1024
"""A checkpoint is due after so much was written. While it flushes, a commit may have to wait for the file system, so
this is some thousand commits."""
WAL_BYTES_MAX: Final = 128 * 1024 * 1024
"""When the log is longer, commits are kept out while its rest is copied."""


class Checkpointer:
    """Runs the checkpoints of one record file."""

    def __init__(
        self, connection: sqlite3.Connection, committing: threading.Lock, on_error: Callable[[sqlite3.Error], None]
    ) -> None:
        self._connection, self._committing, self._on_error = connection, committing, on_error
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("SELECT 1 FROM meta").fetchone()  # opens the log now: later, another one may have its name
        self._thread: threading.Thread | None = None
        self._written = 0

    @property
    def due(self) -> bool:
        """Whether the next commit should be one that a checkpoint may follow."""
        return self._written >= CHECKPOINT_BYTES

    def note(self, nbytes: int) -> None:
        """Say that bodies of so many bytes were committed."""
        self._written += nbytes + PAGE_BYTES

    def start(self) -> None:
        """Begin a checkpoint, without waiting for it."""
        self._written = 0
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._checkpoint, name="rolloutctl-checkpoints", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for a checkpoint that has begun, and close the connection."""
        if self._thread is not None:
            self._thread.join()
        self._connection.close()

    def _checkpoint(self) -> None:
        try:
            written = self._written
            pages, copied = self._copy()
            if pages * PAGE_BYTES > WAL_BYTES_MAX and (copied < pages or self._written != written):
                with self._committing:
                    self._copy()
        except sqlite3.Error as error:
            self._on_error(error)

    def _copy(self) -> tuple[int, int]:
        """Copy pages of the log into the file. Returns how many the log has, and how many of them are copied."""
        _, pages, copied = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return pages, copied
