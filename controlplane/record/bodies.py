"""Bodies of the records in a run's log, and how they say less.

    map      event, effects; of an agent also journal and number. What earlier versions wrote for every decision
    array 1  a decision of an agent                 _AgentBody. What earlier versions wrote for each one
    array 2  answers that came in one turn          _AnswersBody
    array 3  decisions of an agent, an upload       _BatchBody
    array    the state of an agent                  StateBody
    0x78 …   one of those, compressed by zlib

Theory of operation. Of a thousand agents most decide the same about the same command: only the moment differs. So a
body names what it shares with earlier ones by numbers in a table of values: journals, events without their moment,
effects, peers. The first record that has a value brings it. The table begins anew with each segment: at every mark,
when a log is opened, and when it has grown large. Each record says where its segment begins, so that a reader may start
anywhere: it looks through the segment up to there. A damaged record takes with it only those that need its values.

What is read is byte for byte what was decided: a value stands for exactly its bytes.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Annotated, Final

from msgspec import Meta, MsgspecError, Raw, Struct
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from controlplane.machine.events import AnswersReceived, CoordinatorEffect, CoordinatorEvent, PeerAnswer
from controlplane.record.entries import LogEntry
from schemas.carriers.records import Record
from schemas.errors import LogCorrupt
from schemas.events import Decision
from schemas.identity import Count, Name, Positive
from schemas.wire import DECODE_ERRORS, UNREADABLE, encode

SEGMENT_BYTES: Final = 4 * 1024 * 1024
"""Values of a segment, at most."""
COMPRESS_BYTES: Final = 1024
"""Smaller bodies are not worth it: to compress one takes 14 µs, as long as its commit."""

_ZLIB: Final = b"\x78"  # first byte of a stream of zlib; no array or map of ours begins so
_AT_MS: Final = b"\xa5at_ms"
_TYPE: Final = b"\xa4type"
_INT_BYTES: Final = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}


class LoggedDecision(Struct, frozen=True, kw_only=True):
    """A decision as it was made. One of the coordinator has only `event` and `effects`.

    Attributes:
        journal: The agent's journal. An agent that starts without one creates another.
        number: Number of the decision in the journal: 1, 2, 3 …
    """

    journal: Name = ""
    number: Count = 0
    event: Raw
    effects: Raw


class _Tagged(Struct):
    type: Name


class StateBody(Struct, frozen=True, array_like=True):
    """The state of an agent's machine after the decision `number` of its journal. The kind of its record is empty."""

    journal: Name
    number: Count
    state: bytes


class _AgentBody(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A decision of an agent.

    Attributes:
        back: How many records before this one the segment begins.
        base: Number of the first of `values` in the table.
        values: New ones, for the table.
        journal, event, effects: Numbers in the table.
        at_ms: The moment that belongs into the event, encoded; `b""` if that is whole.
    """

    back: int
    base: int
    values: tuple[bytes, ...]
    number: int
    journal: int
    event: int
    effects: int
    at_ms: bytes


class _BatchBody(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Decisions of an agent that follow each other. As in `_AgentBody`, and the last three have an item for each.

    Attributes:
        first: Number of the first decision.
    """

    back: int
    base: int
    values: tuple[bytes, ...]
    first: Positive
    journal: int
    events: Annotated[list[int], Meta(min_length=1)]
    effects: list[int]
    moments: list[bytes]


class _SameAnswers(Struct, frozen=True, array_like=True):
    """Answers that follow each other and are equal but for their peers, which are numbers in the table."""

    answer: PeerAnswer
    peers: list[int]


class _AnswersBody(Struct, frozen=True, array_like=True, tag=2):
    """An `AnswersReceived`, with what it led to. The first three as in `_AgentBody`."""

    back: int
    base: int
    values: tuple[bytes, ...]
    event: AnswersReceived
    answers: list[_SameAnswers]
    effects: Raw


_content_of = attrgetter(*(field for field in PeerAnswer.__struct_fields__ if field != "peer"))
_plain_decoder = Decoder(LoggedDecision)
_short_decoder: Decoder[_AgentBody | _AnswersBody | _BatchBody] = Decoder(_AgentBody | _AnswersBody | _BatchBody)
_tag_decoder = Decoder(_Tagged)
_state_body_decoder = Decoder(StateBody)


class BodyWriter:
    """Encodes the bodies of a log's new records, in order."""

    def __init__(self) -> None:
        self._table: dict[bytes, int] = {}
        self._begin: int | None = None
        self._nbytes = 0

    def begin_segment(self) -> None:
        """Let no later body refer to an earlier one."""
        self._begin = None

    def coordinator(self, position: int, event: CoordinatorEvent, effects: tuple[CoordinatorEffect, ...]) -> bytes:
        """Return the body of a decision of the coordinator, for the record at a position."""
        if isinstance(event, AnswersReceived) and len(event.answers) > 1:
            body = self._answers(position, event, effects)
        else:
            body = encode(Decision(Raw(encode(event)), Raw(encode(effects))))
        return deflated(body)

    def batch(self, position: int, journal: str, first: int, decisions: Sequence[Decision]) -> bytes:
        """Return the body of decisions of an agent that follow each other, for the record at a position."""
        back, base, new = self._open(position), len(self._table), list[bytes]()
        index = self._index
        journal_at = index(journal.encode(), new)
        events, effects, moments = list[int](), list[int](), list[bytes]()
        for decision in decisions:
            rest, at_ms = _split(bytes(decision.event))
            events.append(index(rest, new))
            effects.append(index(bytes(decision.effects), new))
            moments.append(at_ms)
        return encode(_BatchBody(back, base, tuple(new), first, journal_at, events, effects, moments))

    def _answers(self, position: int, event: AnswersReceived, effects: tuple[CoordinatorEffect, ...]) -> bytes:
        back, base, new = self._open(position), len(self._table), list[bytes]()
        answers: list[_SameAnswers] = []
        last: object = None
        for answer in event.answers:
            content = _content_of(answer)
            if content != last:
                answers.append(_SameAnswers(replace(answer, peer=""), []))
                last = content
            answers[-1].peers.append(self._index(answer.peer.encode(), new))
        return encode(_AnswersBody(back, base, tuple(new), replace(event, answers=()), answers, Raw(encode(effects))))

    def _open(self, position: int) -> int:
        """Return how many records before this one its segment begins: with the position before its first."""
        if self._begin is None or self._nbytes > SEGMENT_BYTES:
            self._table.clear()
            self._begin, self._nbytes = position - 1, 0
        return position - self._begin

    def _index(self, value: bytes, new: list[bytes]) -> int:
        index = self._table.get(value)
        if index is None:
            index = self._table[value] = len(self._table)
            new.append(value)
            self._nbytes += len(value)
        return index


_Part = tuple[bytes, bytes, str]


class BodyReader:
    """Decodes the bodies of a log's records. Cheapest in the order of their positions.

    Args:
        fetch: Yields the records from a position on, to look through a segment.
    """

    def __init__(self, fetch: Callable[[int], Iterator[Record]]) -> None:
        self._fetch = fetch
        self._table: dict[int, bytes] = {}
        self._parts: dict[int, _Part] = {}  # of events in the table
        self._kinds: dict[bytes, str] = {}  # of events, by what is before their moment
        self._peers: dict[int, str] = {}  # those in the table, as text
        self._begin = self._through = 0

    def entries(self, record: Record) -> list[LogEntry]:
        """Return the decisions of a record. Raises LogCorrupt if it can't be read, or needs a record that can't."""
        try:
            body = self._read(record)
            match body:
                case LoggedDecision():
                    return [_entry(record, bytes(body.event), bytes(body.effects), body.journal, body.number)]
                case _BatchBody():
                    return self._batch(record, body)
                case _AnswersBody():
                    return [self._answers(record, body)]
                case _AgentBody():
                    return [self._agent(record, body)]
        except KeyError:
            text = f"record {record.position} needs an earlier record that is damaged or missing"
        except (MsgspecError, zlib.error, ValueError) as error:
            text = f"record {record.position} is no decision ({error})"
        raise LogCorrupt(text, record.position)

    def _read(self, record: Record) -> LoggedDecision | _AgentBody | _AnswersBody | _BatchBody:
        """Decode a body, and take what is new in it into the table."""
        encoded = inflated(record.body)
        if encoded[:1] < b"\x90":
            if record.position == self._through + 1:  # it has no values, so nothing is to be looked up in it
                self._through = record.position
            return _plain_decoder.decode(encoded)
        body = _short_decoder.decode(encoded)
        self._look_through(record.position - body.back, record.position)
        self._take(body)
        self._through = record.position
        return body

    def _agent(self, record: Record, body: _AgentBody) -> LogEntry:
        table = self._table
        head, tail, _ = self._parted(table[body.event], body.at_ms)
        return _entry(record, head + body.at_ms + tail, table[body.effects], table[body.journal].decode(), body.number)

    def _batch(self, record: Record, body: _BatchBody) -> list[LogEntry]:
        table, parts, entries = self._table, self._parts, list[LogEntry]()
        position, at_ns, agent = record.position, record.at_ns, record.agent
        journal, number = table[body.journal].decode(), body.first
        for event, effects, at_ms in zip(body.events, body.effects, body.moments, strict=True):
            part = parts.get(event)
            if part is None:
                part = parts[event] = self._parted(table[event], at_ms)
            head, tail, kind = part
            entries.append(
                LogEntry(
                    position=position,
                    at_ns=at_ns,
                    agent=agent,
                    kind=kind,
                    journal=journal,
                    number=number,
                    event=head + at_ms + tail,
                    effects=table[effects],
                )
            )
            number += 1
        return entries

    def _parted(self, event: bytes, at_ms: bytes) -> _Part:
        """An event of the table: what is before its moment, what is behind, and its kind."""
        before, name, tail = event.partition(_AT_MS)
        head = before + name
        return head, tail, self._kinds.get(head) or self._kind(head, at_ms, tail)

    def _kind(self, head: bytes, at_ms: bytes, tail: bytes) -> str:
        try:
            # What a machine encodes begins with its kind.
            if head[1:6] == _TYPE and b"\xa0" < head[6:7] < b"\xc0" and (end := head[6] - 0x99) <= len(head):
                kind = self._kinds[head] = head[7:end].decode()
                return kind
            return _tag_decoder.decode(head + at_ms + tail).type
        except DECODE_ERRORS:  # one without a kind is refused before it is written
            return UNREADABLE

    def _answers(self, record: Record, body: _AnswersBody) -> LogEntry:
        peers = self._peers
        answers = tuple(
            replace(same.answer, peer=peers.get(peer) or self._peer(peer))
            for same in body.answers
            for peer in same.peers
        )
        return _entry(record, encode(replace(body.event, answers=answers)), bytes(body.effects))

    def _peer(self, index: int) -> str:
        peer = self._peers[index] = self._table[index].decode()
        return peer

    def _look_through(self, begin: int, position: int) -> None:
        """Have the values of a segment from its beginning up to a position."""
        if begin != self._begin or position <= self._through:
            self._table.clear()
            self._parts.clear()
            self._kinds.clear()
            self._peers.clear()
            self._begin = self._through = begin
        while self._through < position - 1:
            try:
                for record in self._fetch(self._through + 1):
                    if record.position >= position:
                        return
                    self._through = record.position
                    self._take_from(record)
                return
            except LogCorrupt as error:
                self._through = max(self._through + 1, error.position)

    def _take_from(self, record: Record) -> None:
        try:
            body = inflated(record.body)
            short = _short_decoder.decode(body) if body[:1] >= b"\x90" else None
        except (MsgspecError, zlib.error):
            return
        if short is not None and record.position - short.back == self._begin:
            self._take(short)

    def _take(self, body: _AgentBody | _AnswersBody | _BatchBody) -> None:
        if body.values:
            self._table.update(enumerate(body.values, body.base))


def _split(event: bytes) -> tuple[bytes, bytes]:
    """An event without its moment, and the moment as it was encoded; `b""` if it has none where one is expected."""
    begin = event.find(_AT_MS) + len(_AT_MS)
    first = event[begin] if len(_AT_MS) <= begin < len(event) else 0xC0
    end = begin + (1 if first < 0x80 else _INT_BYTES.get(first, 0))
    if not begin < end <= len(event):
        return event, b""
    return event[:begin] + event[end:], event[begin:end]


def _entry(record: Record, event: bytes, effects: bytes, journal: str = "", number: int = 0) -> LogEntry:
    return LogEntry(
        position=record.position,
        at_ns=record.at_ns,
        agent=record.agent,
        kind=record.kind,
        journal=journal,
        number=number,
        event=event,
        effects=effects,
    )


def check_kind(event: Raw) -> None:
    """Raise one of DECODE_ERRORS if an encoded event has no kind."""
    _tag_decoder.decode(event)


def decode_state_body(body: bytes) -> StateBody:
    """Decode a `StateBody`. Raises MsgspecError or zlib.error."""
    return _state_body_decoder.decode(inflated(body))


def deflated(body: bytes) -> bytes:
    """Return a body, compressed if that makes it smaller."""
    return min(zlib.compress(body, 1), body, key=len) if len(body) >= COMPRESS_BYTES else body


def inflated(body: bytes) -> bytes:
    """Undo `deflated`. Raises zlib.error."""
    return zlib.decompress(body) if body[:1] == _ZLIB else body
