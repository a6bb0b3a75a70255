"""The records of a log as a bus writes them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from controlplane.record.bodies import read_entries
from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from schemas.errors import LogError
from schemas.storage.records import RecordReader

_CLOSED: Final = "closed"


def follow(path: Path, start: int, wait: Callable[[], object]) -> Iterator[LogEntry]:
    """Yield the records from position `start` on, and those written later, until the bus has closed the log.

    Whenever all were read, `wait` is called, and returns when it is time to look again.

    Raises:
        LogError: The file can't be read, is no log of a run, or was replaced by another file. What it still had was
            yielded.
        LogCorrupt: At the first damaged record, after all those before it.
    """
    with RecordReader.open(path) as reader:
        RunLog.header(path)
        file, closed = _identity(path), False
        while not closed:
            now = _identity(path)  # before reading: what was written until then is in this file
            for record in reader.records(start):
                start = record.position + 1
                entries = read_entries(record, path)
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
