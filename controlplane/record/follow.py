"""The records of a log as a bus writes them."""

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final

from controlplane.record.archive import open_records
from controlplane.record.bodies import BodyReader
from controlplane.record.entries import LogEntry
from controlplane.record.log import STATE, RunLog
from schemas.carriers.records import RecordReader
from schemas.errors import LogCorrupt, LogError

OPENING_WAITS: Final = 50
"""How often a file that is new in this place is waited for until it is a log."""
_CLOSED: Final = "closed"


def follow(
    path: Path, start: int, wait: Callable[[], object], on_replaced: Callable[[str], object]
) -> Iterator[LogEntry]:
    """Yield the records from position `start` on, and those written later, until the bus has closed the log.

    If another file takes this one's place, the rest of the old one is read, and then the new one from its beginning.

    Args:
        wait: Called whenever all records were read; returns when it is time to look again.
        on_replaced: Called with the id of the run in the new file.

    Raises:
        LogError: The file can't be read, or is no log of a run.
        LogCorrupt: At the first damaged record, after all those before it.
    """
    RunLog.header(path)
    while True:
        file = _identity(path)
        with open_records(path) as reader:
            if _identity(path) != file:  # replaced in between
                continue
            if (yield from _rest(path, file, reader, start, wait)):
                return
        on_replaced(_new_run(path, wait))
        start = 1


def _rest(
    path: Path, file: tuple[int, int] | None, reader: RecordReader, start: int, wait: Callable[[], object]
) -> Generator[LogEntry, None, bool]:
    """Yield the records until the bus has closed the log (True), or another file is in its place (False)."""
    bodies = BodyReader(reader.records)
    closed = False
    while True:
        now = _identity(path)  # before reading: what was written until then is in the old file
        for record in reader.records(start):
            start = record.position + 1
            if record.kind == STATE:
                continue
            try:
                entries = bodies.entries(record)
            except LogCorrupt as error:
                raise LogCorrupt(f"{path}: {error}", record.position) from error
            closed = entries[-1].kind == _CLOSED if not record.agent else closed
            yield from entries
        if closed or now not in (file, None):
            return closed
        wait()


def _new_run(path: Path, wait: Callable[[], object]) -> str:
    """The run in a file that a bus is creating. Raises LogError or LogCorrupt if it does not become a log."""
    for _ in range(OPENING_WAITS):
        try:
            return RunLog.header(path).run
        except LogError:
            wait()
    return RunLog.header(path).run


def _identity(path: Path) -> tuple[int, int] | None:
    """None while there is no such file: it may be about to be replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
