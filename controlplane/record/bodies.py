"""Bodies of the records in a run's log.

    map      event, effects                         a decision of the coordinator
    array    journal, first, events, effects        decisions of an agent that follow each other, an upload
    array    journal, number, state                 the state of an agent
    0x78 …   one of those, compressed by zlib

What is read is byte for byte what was decided. Agents decide the same again and again, and what came together is in one
body, so compression leaves a few bytes of each decision.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta, Raw, Struct
from msgspec.msgpack import Decoder

from controlplane.machine.events import CoordinatorEffect, CoordinatorEvent
from controlplane.record.entries import LogEntry
from schemas.errors import LogCorrupt
from schemas.events import Decision
from schemas.identity import Count, Name, Positive
from schemas.storage.records import Record
from schemas.wire import DECODE_ERRORS, decision_decoder, encode

STATE: Final = ""
"""Kind of the record of an agent's state; no event has it."""
COMPRESS_BYTES: Final = 1024
"""Smaller bodies are not worth it: to compress one takes 14 µs, as long as its commit."""

_ZLIB: Final = b"\x78"  # first byte of a stream of zlib; no array or map of ours begins so


class _Tagged(Struct):
    type: Name


class StateBody(Struct, frozen=True, array_like=True):
    """The state of an agent's machine after the decision `number` of its journal. The kind of its record is empty."""

    journal: Name
    number: Count
    state: bytes


class UploadBody(Struct, frozen=True, array_like=True):
    """Decisions of an agent that follow each other."""

    journal: Name
    first: Positive
    events: Annotated[list[Raw], Meta(min_length=1)]
    effects: list[Raw]


tag_decoder = Decoder(_Tagged)
_upload_decoder = Decoder(UploadBody)
state_body_decoder = Decoder(StateBody)


def decision_body(event: CoordinatorEvent, effects: tuple[CoordinatorEffect, ...]) -> bytes:
    """Return the body of a decision of the coordinator."""
    return deflated(encode(Decision(Raw(encode(event)), Raw(encode(effects)))))


def upload_body(journal: str, first: int, decisions: Sequence[Decision]) -> bytes:
    """Return the body of decisions of an agent. They follow each other in its journal, from number `first` on."""
    events = [decision.event for decision in decisions]
    return deflated(encode(UploadBody(journal, first, events, [decision.effects for decision in decisions])))


def read_entries(record: Record, path: Path) -> list[LogEntry]:
    """Return the decisions of a record of a log, none of an agent's state. Raises LogCorrupt."""
    try:
        if record.kind == STATE:
            return []
        encoded = inflated(record.body)
        if not record.agent:
            return [_entry(record, record.kind, decision_decoder.decode(encoded))]
        body = _upload_decoder.decode(encoded)
        return [
            _entry(record, tag_decoder.decode(event).type, Decision(event, effects), body.journal, number)
            for number, (event, effects) in enumerate(zip(body.events, body.effects, strict=True), body.first)
        ]
    except (*DECODE_ERRORS, zlib.error, ValueError) as error:
        text = f"{path}: record {record.position} is no decision ({error})"
        raise LogCorrupt(text, record.position) from error


def newest_decision(record: Record) -> tuple[str, int]:
    """Return the journal of an agent's upload, and the number of its last decision. Raises MsgspecError, zlib.error."""
    body = _upload_decoder.decode(inflated(record.body))
    return body.journal, body.first + len(body.events) - 1


def _entry(record: Record, kind: str, decision: Decision, journal: str = "", number: int = 0) -> LogEntry:
    return LogEntry(
        position=record.position,
        at_ns=record.at_ns,
        agent=record.agent,
        kind=kind,
        journal=journal,
        number=number,
        event=bytes(decision.event),
        effects=bytes(decision.effects),
    )


def deflated(body: bytes) -> bytes:
    """Return a body, compressed if that makes it smaller."""
    return min(zlib.compress(body, 1), body, key=len) if len(body) >= COMPRESS_BYTES else body


def inflated(body: bytes) -> bytes:
    """Undo `deflated`. Raises zlib.error."""
    return zlib.decompress(body) if body[:1] == _ZLIB else body
