"""Bodies of the log's records: what is read is what was decided, byte for byte, from wherever reading begins."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from bench.logs import Run
from controlplane.machine.events import AnswersReceived, PeerAnswer
from controlplane.record.bodies import decision_body, deflated, read_entries, upload_body
from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from schemas.errors import LogCorrupt
from schemas.events import Decision, HeadSeen, Tick
from schemas.outcomes import Acted, Reason, Skipped
from schemas.storage.records import Record, RecordReader
from schemas.wire import DecisionBatch, encode

LOG = Path("run.db")


def as_record(position: int, body: bytes, agent: str = "") -> Record:
    return Record(position, 1, "k", agent, body)


@given(st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=40)), min_size=1, max_size=40))
def test_whatever_an_agent_sends_is_read_as_it_was_sent(pairs: list[tuple[bytes, bytes]]) -> None:
    sent = [(encode({"type": "t", "body": event}), encode(effects)) for event, effects in pairs]
    body = upload_body("j", 7, [Decision(Raw(event), Raw(effects)) for event, effects in sent])
    read = read_entries(as_record(3, body, "0.0"), LOG)
    assert [(entry.event, entry.effects) for entry in read] == sent
    assert [(entry.journal, entry.number, entry.kind) for entry in read] == [
        ("j", number, "t") for number, _ in enumerate(sent, 7)
    ]


def test_answers_of_many_agents_and_their_repeated_decisions_take_few_bytes() -> None:
    skip, act = Skipped(Reason.NOT_TARGETED), Acted(calls=("flush",))
    answers = tuple(
        PeerAnswer(peer=f"{n}.0/{n:032x}/{n:010x}", origin=1, seq=1 + n // 128, outcome=act if n == 7 else skip, rule=5)
        for n in range(256)
    )
    event = AnswersReceived(at_us=5, answers=answers)
    body = decision_body(event, ())
    assert read_entries(as_record(1, body), LOG)[0].event == encode(event)
    decisions = [Decision(Raw(encode(HeadSeen(at_ms=n, epoch=3, seq=n))), Raw(encode(()))) for n in range(100)]
    assert max(len(body) / len(answers), len(upload_body("j", 1, decisions)) / len(decisions)) < 20


def by_position(entries: Iterable[LogEntry]) -> dict[int, list[tuple[bytes, bytes]]]:
    found: dict[int, list[tuple[bytes, bytes]]] = {}
    for entry in entries:
        found.setdefault(entry.position, []).append((entry.event, entry.effects))
    return found


def test_reading_may_begin_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    run = Run(path, agents=3)
    run.commands(100)
    run.close()
    whole = by_position(RunLog.read(path))
    assert list(whole) == list(range(1, len(whole) + 1))
    for start in range(1, len(whole), 17):
        assert by_position(RunLog.read(path, start)) == {at: whole[at] for at in range(start, len(whole) + 1)}
    with RecordReader.open(path) as file:
        for record in file.records():
            assert by_position(read_entries(record, LOG)) == {record.position: whole[record.position]}


def test_a_log_continued_in_several_lives_reads_as_one(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    decision = Decision(Raw(encode(Tick(at_ms=77))), Raw(encode(())))
    for number in range(1, 10):
        with RunLog.open(path, "r") as log:
            log.append_batch("0.0", DecisionBatch(journal="j", first=number, decisions=(decision,)), 1)
    assert [entry.number for entry in RunLog.read(path)] == list(range(1, 10))
    assert {entry.event for entry in RunLog.read(path)} == {encode(Tick(at_ms=77))}


@pytest.mark.parametrize("agent", ["", "0.0"])
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\xc1", b"\x78\x01", deflated(b"\xc1" * 999), encode([1, 2]), encode([9] * 9)),
        *(encode(["j", 1, [], []]), encode(["j", 1, [1], [1]]), encode(["j", 1, [{"type": "t"}], []])),
    ],
)
def test_a_body_that_cannot_be_read_is_one_clear_error(body: bytes, agent: str) -> None:
    with pytest.raises(LogCorrupt, match="record 3 is no decision"):
        read_entries(as_record(3, body, agent), LOG)
