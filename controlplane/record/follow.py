"""The records of a log as a bus writes them, or of a journal as its agent does."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from controlplane.record.archive import open_records
from controlplane.record.bodies import EntryReader
from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from schemas.errors import LogError

_CLOSED: Final = "closed"


def follow(path: Path, start: int, wait: Callable[[], object]) -> Iterator[LogEntry]:
    """Yield the records from position `start` on, and those written later, until the bus has closed the log.

    No journal says that it ended.

    Args:
        path: A run's log, an archive of one, or an agent's journal.
        start: Position of the first record.
        wait: Called whenever all records were read; returns when it is time to look again.

    Raises:
        LogError: The file can't be read, is no log of a run and no journal, or was replaced by another file. What it
            still had was yielded.
        LogCorrupt: At the first damaged record, after all those before it.
    """
    with open_records(path) as reader:
        if "journal" not in reader.header:
            RunLog.header(path)
        file, decoder, closed = _identity(path), EntryReader(reader), False
        while not closed:
            now = _identity(path)  # before reading: what was written until then is in this file
            for record in reader.records(start):
                start = record.position + 1
                entries = decoder.read(record)
                closed = entries[-1].kind == _CLOSED if not record.agent else closed
                yield from entries
            if not closed and now not in (file, None):
                raise LogError(f"{path} was replaced by another file: follow that one")
            if not closed:
                wait()


def _identity(path: Path) -> tuple[int, int] | None:
    """None while there is no such file: it may be about to be replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
