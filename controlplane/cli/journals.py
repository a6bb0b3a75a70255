"""Journals of agents, read as if each were the log of one agent: for `rolloutctl log show`, `verify` and `replay`."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Raw, Struct
from msgspec.msgpack import Decoder

from controlplane.record.entries import AgentMark, LogEntry
from schemas.carriers.framed_file import FrameReader
from schemas.carriers.framing import MAGIC
from schemas.carriers.writer_lock import first_bytes
from schemas.errors import LogCorrupt, LogError
from schemas.identity import Count
from schemas.wire import DECODE_ERRORS
from workers.link.journal import MARK, entries_decoder
from workers.machine.decide import LOGIC

_BEGIN = MAGIC.rstrip(b"1\n")


class _Mark(Struct):
    number: Count
    state: Raw


class _EventTag(Struct):
    type: str


_mark_decoder = Decoder(_Mark)
_tag_decoder = Decoder(_EventTag)


def is_journal(path: Path) -> bool:
    """Whether the file is a journal of any format, and not a log."""
    try:
        return path.is_file() and first_bytes(path, len(_BEGIN)) == _BEGIN
    except OSError:
        return False


def agent_of_journal(path: Path) -> str:
    """Return whose journal it is. Raises LogError or LogCorrupt."""
    with FrameReader.open(path) as reader:
        return reader.header.get("agent", "")


def check_journal_logic(path: Path) -> None:
    """Raise LogError if a journal was written by other logic than this version's."""
    with FrameReader.open(path) as reader:
        logic = reader.header.get("logic")
    if logic != str(LOGIC):
        raise LogError(
            f"the journal {path} can't be replayed: decision logic {logic} wrote it, this version has logic {LOGIC}. "
            "Replay it with the version that wrote it; `show` and `verify` work here"
        )


def walk_journal(path: Path, start: int = 1) -> Iterator[LogEntry | AgentMark]:
    """Yield the decisions from number `start` on, and the marks, even while the agent writes them.

    Raises:
        LogError: The file can't be read.
        LogCorrupt: At the first damaged group, after all those before it.
    """
    with FrameReader.open(path) as reader:
        agent, journal = reader.header.get("agent", ""), reader.header.get("journal", "")
        number = 0
        for frame in reader.frames():
            try:
                if frame.kind == MARK:
                    mark = _mark_decoder.decode(frame.payload)
                    number = mark.number
                    yield AgentMark(
                        position=number, agent=agent, journal=journal, number=number, state=bytes(mark.state)
                    )
                    continue
                entries = entries_decoder.decode(frame.payload)
                for entry in entries:
                    number += 1
                    if number >= start:
                        yield LogEntry(
                            position=number,
                            at_ns=entry.at_ns,
                            agent=agent,
                            kind=_tag_decoder.decode(entry.event).type,
                            journal=journal,
                            number=number,
                            event=bytes(entry.event),
                            effects=bytes(entry.effects),
                        )
            except (msgspec.MsgspecError, *DECODE_ERRORS) as error:
                raise LogCorrupt(f"{path}: decision {number} can't be decoded: {error}", number) from error


def follow_journal(
    path: Path, start: int, wait: Callable[[], object], on_replaced: Callable[[], object]
) -> Iterator[LogEntry]:
    """Yield the decisions from number `start` on, and those made later, without end: no journal says that it ended.

    The file is read anew after each change, since an agent now and then writes it anew without its oldest decisions. If
    the agent begins another journal, for another run, that is read from its beginning.

    Args:
        wait: Called whenever all decisions were read; returns when it is time to look again.
        on_replaced: Called when another journal is in the place of the followed one.

    Raises:
        LogError: The file can't be read.
        LogCorrupt: At the first damaged group, after all those before it.
    """
    journal, seen = "", None
    while True:
        look = _look(path)
        if look is not None and look != seen:
            seen = look
            with FrameReader.open(path) as reader:
                found = reader.header.get("journal", "")
            if journal and found != journal:
                on_replaced()
                start = 1
            journal = found
            for entry in walk_journal(path, start):
                if entry.journal != journal:  # replaced in between
                    seen = None
                    break
                if isinstance(entry, LogEntry):
                    start = entry.number + 1
                    yield entry
        wait()


def _look(path: Path) -> tuple[int, ...] | None:
    """What changes with the file. None while there is none: it may be about to be replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
