"""Record files with known contents."""

from pathlib import Path

from schemas.storage.record_file import RecordFile
from schemas.storage.records import Record, RecordReader

HEADER = {"run": "01J", "logic": "1"}


def record(position: int) -> Record:
    """The record that tests put at a position: of two kinds and several sizes."""
    return Record(
        position=position,
        at_ns=1_000 + position,
        kind="issued" if position % 3 else "outcome",
        agent="" if position % 2 else f"{position % 5}.0",
        body=position.to_bytes(4, "big") * (position % 40),
    )


def records(first: int, last: int) -> list[Record]:
    """The records from one position to another, both included."""
    return [record(position) for position in range(first, last + 1)]


def append(file: RecordFile, record: Record) -> None:
    """Append one record and check its position."""
    assert file.append(record.kind, record.agent, record.at_ns, record.body) == record.position


def fill(file: RecordFile, last: int) -> None:
    """Append and commit records up to a position, in groups of ten."""
    while file.last_position < last:
        for added in records(file.last_position + 1, min(file.last_position + 10, last)):
            append(file, added)
        file.commit()


def write(path: Path, last: int) -> Path:
    """Write a file with records up to a position."""
    with RecordFile.open(path, HEADER) as file:
        fill(file, last)
    return path


def read(path: Path) -> list[Record]:
    """Read all records of a file."""
    with RecordReader.open(path) as reader:
        return list(reader.records())


def positions(found: list[Record]) -> list[int]:
    """The positions of records."""
    return [record.position for record in found]
