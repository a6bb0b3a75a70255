"""Journals as they lie on a disk, read and made by hand."""

from pathlib import Path

import msgspec

from schemas import wire
from schemas.carriers.framed_file import FramedFile, FrameReader
from schemas.events import Effect, Event
from workers.link.journal import DECISIONS, Entry, entries_decoder


def entries(path: Path) -> list[Entry]:
    """The decisions that are kept in a journal."""
    with FrameReader.open(path) as file:
        groups = [entries_decoder.decode(frame.payload) for frame in file.frames() if frame.kind == DECISIONS]
    return [entry for group in groups for entry in group]


def append(path: Path, added: list[Entry], header: dict[str, str] | None = None) -> None:
    """Write decisions behind those of a journal, or into a new one."""
    with FramedFile.create_or_open(path, header or {}, flush=False) as file:
        file.append(DECISIONS, wire.encode(added))


def entry(event: Event | msgspec.Raw, effects: tuple[Effect, ...]) -> Entry:
    """A decision."""
    return Entry(1, msgspec.Raw(wire.encode(event)), msgspec.Raw(wire.encode(effects)))


def decoded(event: msgspec.Raw) -> Event:
    """An event."""
    return wire.event_decoder.decode(event)
