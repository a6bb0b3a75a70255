"""Bodies of the log's records: what is read is what was decided, byte for byte, from wherever reading begins."""

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from bench.logs import Run
from controlplane.machine.events import AnswersReceived, Closed, PeerAnswer
from controlplane.record import bodies
from controlplane.record.bodies import BodyReader, BodyWriter, LoggedDecision, deflated
from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from schemas.carriers.record_file import RecordFile
from schemas.carriers.records import Record, RecordReader
from schemas.errors import LogCorrupt
from schemas.events import Decision, HeadSeen, Tick
from schemas.outcomes import Acted, Reason, Skipped
from schemas.wire import DecisionBatch, encode

REPLAYS = sorted((Path(__file__).parents[1] / "replays").glob("*.db"))


def reader_of(records: list[Record]) -> BodyReader:
    return BodyReader(lambda start: iter(records[start - 1 :]))


def as_record(position: int, body: bytes, agent: str = "") -> Record:
    return Record(position, 1, "k", agent, body)


# --- byte for byte ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", REPLAYS, ids=lambda path: path.stem)
def test_a_recorded_run_reads_the_same_after_it_is_written_again(path: Path, tmp_path: Path) -> None:
    entries = list(RunLog.read(path))
    writer, records = BodyWriter(), list[Record]()
    for position, entry in enumerate(entries, start=1):
        if entry.agent:
            body = writer.batch(position, entry.journal, entry.number, [Decision(Raw(entry.event), Raw(entry.effects))])
        else:
            body = writer.coordinator(position, entry.typed_event(), entry.typed_effects())  # type: ignore[arg-type]
        records.append(as_record(position, body, entry.agent))
    reader = reader_of(records)
    for record, entry in zip(records, entries, strict=True):
        (decision,) = reader.entries(record)
        assert (decision.journal, decision.number) == (entry.journal, entry.number)
        if entry.agent:
            assert (bytes(decision.event), bytes(decision.effects)) == (bytes(entry.event), bytes(entry.effects))
        else:
            assert bytes(decision.event) == encode(entry.typed_event())
            assert bytes(decision.effects) == encode(entry.typed_effects())


@given(st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=40)), max_size=30), st.integers(0, 2**63))
def test_whatever_an_agent_sends_is_read_as_it_was_sent(pairs: list[tuple[bytes, bytes]], at_ms: int) -> None:
    moment = b"\xa5at_ms" + encode(at_ms)
    events = [(begin + end, effects) for begin, effects in pairs for end in (b"", moment, moment + begin, b"\xa5at_ms")]
    writer, records = BodyWriter(), list[Record]()
    decisions = [Decision(Raw(event or b"\xc0"), Raw(effects or b"\xc0")) for event, effects in events]
    for position, decision in enumerate(decisions, start=1):
        records.append(as_record(position, writer.batch(position, "j", position, [decision])))
    reader = reader_of(records)
    for record, decision in zip(records, decisions, strict=True):
        (read,) = reader.entries(record)
        assert (bytes(read.event), bytes(read.effects)) == (bytes(decision.event), bytes(decision.effects))
        assert (read.journal, read.number) == ("j", record.position)


def test_answers_of_many_agents_are_said_once_and_read_in_their_order() -> None:
    skip, act = Skipped(Reason.NOT_TARGETED), Acted(calls=("flush",))
    answers = tuple(
        PeerAnswer(peer=f"{n}.0/{n:032x}/{n:010x}", origin=1, seq=1 + n // 128, outcome=act if n == 7 else skip, rule=5)
        for n in range(256)
    )
    event = AnswersReceived(at_us=5, answers=answers)
    writer = BodyWriter()
    records = [as_record(position, writer.coordinator(position, event, ())) for position in (1, 2)]
    for record in reversed(records):
        assert bytes(reader_of(records).entries(record)[0].event) == encode(event)
    assert len(records[1].body) < 5 * len(answers)


def test_a_skip_of_another_agent_takes_a_few_bytes() -> None:
    decision = Decision(Raw(encode(HeadSeen(at_ms=2**30, epoch=3, seq=2**20))), Raw(encode((Tick(at_ms=9),) * 20)))
    writer = BodyWriter()
    sizes = [len(writer.batch(position, "j", position, [decision])) for position in range(1, 100)]
    assert sizes[0] > 400 and max(sizes[1:]) < 30


# --- from anywhere ----------------------------------------------------------------------------------------------------


def write(path: Path) -> dict[int, list[tuple[bytes, bytes]]]:
    """Record a run. Returns its decisions, by the position of their record."""
    run = Run(path, agents=3)
    run.commands(100)
    run.close()
    return by_position(RunLog.read(path))


def by_position(entries: Iterable[LogEntry]) -> dict[int, list[tuple[bytes, bytes]]]:
    found: dict[int, list[tuple[bytes, bytes]]] = {}
    for entry in entries:
        found.setdefault(entry.position, []).append((bytes(entry.event), bytes(entry.effects)))
    return found


def test_reading_may_begin_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    whole = write(path)
    assert list(whole) == list(range(1, len(whole) + 1))
    for start in range(1, len(whole), 17):
        assert by_position(RunLog.read(path, start)) == {at: whole[at] for at in range(start, len(whole) + 1)}


def test_reading_in_order_looks_nothing_up(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    whole = write(path)
    looked_up: list[int] = []

    def fetch(start: int) -> Iterator[Record]:
        looked_up.append(start)
        return file.records(start)

    with RecordReader.open(path) as file:
        reader = BodyReader(fetch)
        assert by_position(entry for record in file.records() for entry in reader.entries(record)) == whole
    assert len(looked_up) <= 1  # at the first record that has a segment


def test_reading_may_go_backwards(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    whole = write(path)
    with RecordReader.open(path) as file:
        records, reader = list(file.records()), BodyReader(file.records)
        for record in reversed(records[-60:]):
            assert by_position(reader.entries(record)) == {record.position: whole[record.position]}


def test_values_of_a_segment_are_bounded_and_a_new_segment_needs_no_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "SEGMENT_BYTES", 2000)
    path = tmp_path / "run.db"
    whole = write(path)
    with RecordFile.open(path) as file:
        file.truncate_before(len(whole) - 40)
    begins = len(whole) - 10
    assert list(by_position(RunLog.read(path, begins))) == list(range(begins, len(whole) + 1))


def test_a_log_continued_in_several_lives_reads_as_one(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    decision = Decision(Raw(encode(Tick(at_ms=77))), Raw(encode(())))
    for number in range(1, 10):
        with RunLog.open(path, "r") as log:
            log.append_batch("0.0", DecisionBatch(journal="j", first=number, decisions=(decision,)), 1)
    assert [entry.number for entry in RunLog.read(path)] == list(range(1, 10))
    assert {bytes(entry.event) for entry in RunLog.read(path)} == {encode(Tick(at_ms=77))}


# --- old and damaged --------------------------------------------------------------------------------------------------


def test_bodies_of_the_first_format_are_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with RunLog.open(path, "r"):
        pass
    event, effects = Raw(encode(Closed(at_us=1, at_ns=1))), Raw(encode(()))
    agents = LoggedDecision(journal="j", number=1, event=Raw(encode(Tick(at_ms=1))), effects=effects)
    with RecordFile.open(path) as file:
        file.append("closed", "", 1, encode(Decision(event, effects)))
        file.append("tick", "0.0", 1, encode(agents))
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE marks")
    connection.execute("UPDATE meta SET value = '1' WHERE key = 'format'")
    connection.commit()
    connection.close()
    assert [(entry.agent, entry.number) for entry in RunLog.read(path)] == [("", 0), ("0.0", 1)]
    with RunLog.open(path) as log:
        assert log.recorded("0.0", "j") == 1
        log.append_batch("0.0", DecisionBatch(journal="j", first=2, decisions=(Decision(agents.event, effects),)), 1)
    assert [entry.number for entry in RunLog.read(path)] == [0, 1, 2]


def test_a_damaged_record_takes_with_it_only_those_that_need_it(tmp_path: Path) -> None:
    writer = BodyWriter()
    decisions = [Decision(Raw(encode(Tick(at_ms=n))), Raw(encode((n // 3,)))) for n in range(9)]
    path = tmp_path / "run.db"
    with RunLog.open(path, "r"):
        pass
    with RecordFile.open(path) as file:
        for position, decision in enumerate(decisions, start=1):
            file.append("tick", "0.0", 1, writer.batch(position, "j", position, [decision]))
    connection = sqlite3.connect(path)
    connection.execute("UPDATE records SET checksum = 1 WHERE position = 4")
    connection.commit()
    connection.close()
    assert [entry.number for entry in RunLog.read(path, 7)] == [7, 8, 9]
    with pytest.raises(LogCorrupt, match="record 5 needs an earlier record that is damaged or missing") as caught:
        next(RunLog.read(path, 5))
    assert caught.value.position == 5


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x78\x01", deflated(b"\xc1" * 999), encode([1, 2]), encode([9] * 9)])
def test_a_body_that_cannot_be_read_is_one_clear_error(body: bytes) -> None:
    with pytest.raises(LogCorrupt, match="record 3 is no decision"):
        reader_of([]).entries(as_record(3, body))
