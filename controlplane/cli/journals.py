"""Journals of agents, read as if each were the log of one agent: for `rolloutctl log show`, `verify` and `replay`."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from msgspec import MsgspecError, Raw, Struct
from msgspec.msgpack import Decoder

from controlplane.record.bodies import EntryReader
from controlplane.record.entries import AgentMark, LogEntry
from schemas.errors import LogCorrupt, LogError
from schemas.storage.records import RecordReader
from workers.machine.decide import LOGIC


class _Mark(Struct):
    state: Raw


_mark_decoder = Decoder(_Mark)


def is_journal(path: Path) -> bool:
    """Whether the file is a journal, and not a log."""
    try:
        with RecordReader.open(path) as reader:
            return "journal" in reader.header
    except LogError:
        return False


def agent_of_journal(path: Path) -> str:
    """Return whose journal it is. Raises LogError or LogCorrupt."""
    with RecordReader.open(path) as reader:
        return reader.header.get("agent", "")


def check_journal_logic(path: Path) -> None:
    """Raise LogError if a journal was written by other logic than this version's."""
    with RecordReader.open(path) as reader:
        logic = reader.header.get("logic")
    if logic != str(LOGIC):
        raise LogError(
            f"the journal {path} can't be replayed: decision logic {logic} wrote it, this version has logic {LOGIC}. "
            "Replay it with the version that wrote it; `show` and `verify` work here"
        )


def walk_journal(path: Path, start: int = 1) -> Iterator[LogEntry | AgentMark]:
    """Yield the decisions from number `start` on, and the marks, even while the agent writes them.

    Raises LogError or LogCorrupt.
    """
    with RecordReader.open(path) as reader:
        marks = deque(reader.mark_positions())
        entries = EntryReader(reader)
        for record in reader.records(start):
            while marks and marks[0] < record.position:
                yield _mark(reader, marks.popleft())
            yield from entries.read(record)
        for position in marks:
            yield _mark(reader, position)


def _mark(reader: RecordReader, position: int) -> AgentMark:
    try:
        state = _mark_decoder.decode(reader.mark(position).body).state
    except MsgspecError as error:
        raise LogCorrupt(
            f"{reader.path}: the mark after decision {position} can't be read: {error}", position
        ) from error
    header = reader.header
    return AgentMark(
        position=position, agent=header["agent"], journal=header["journal"], number=position, state=bytes(state)
    )
