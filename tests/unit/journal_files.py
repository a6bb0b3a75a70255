"""Journals as they lie on a disk, read and made by hand."""

from pathlib import Path

import msgspec

from schemas import wire
from schemas.events import Decision, Effect, Event
from schemas.storage.record_file import RecordFile
from schemas.storage.records import RecordReader

_decoder = msgspec.msgpack.Decoder(Decision)


def entries(path: Path) -> list[Decision]:
    """The decisions that are kept in a journal."""
    with RecordReader.open(path) as file:
        return [_decoder.decode(record.body) for record in file.records()]


def append(path: Path, added: list[Decision], header: dict[str, str] | None = None) -> None:
    """Write decisions behind those of a journal, or into a new one."""
    with RecordFile.open(path, header or {}) as file:
        agent = file.header["agent"]
        for decision in added:
            file.append("made by hand", agent, 1, wire.encode(decision))


def entry(event: Event | msgspec.Raw, effects: tuple[Effect, ...]) -> Decision:
    """A decision."""
    return Decision(msgspec.Raw(wire.encode(event)), msgspec.Raw(wire.encode(effects)))


def decoded(event: msgspec.Raw) -> Event:
    """An event."""
    return wire.event_decoder.decode(event)
