"""The agent's journal: what is committed is found again, numbered as before, and what the bus has is dropped."""

import os
from pathlib import Path

import pytest

from schemas import events
from schemas.carriers.framed_file import FramedFile
from schemas.carriers.record_file import RecordFile
from schemas.commands import EngineCommand, Target
from schemas.desired import Desired
from schemas.errors import AgentError, LogCorrupt, LogLocked
from schemas.identity import Identity
from tests.unit import journal_files
from workers.link import journal as journal_module
from workers.link.journal import Journal
from workers.machine.decide import LOGIC, decide

SECOND = Identity(replica=0, node_rank=1, nnodes=2)
MANY = 1 << 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent-0.1.journal"


def opened(path: Path) -> Journal:
    return Journal.open(path, "0.1", "os")


def feed(journal: Journal, event: events.Event) -> None:
    state, effects = decide(journal.state, event)
    journal.append(event, effects, state)


def grow(journal: Journal, number: int, group: int = 3) -> None:
    """Decide until there are so many decisions, in groups."""
    if journal.number == 0:
        feed(journal, events.Started(at_ms=0, identity=SECOND, incarnation="i"))
        feed(journal, events.SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=Desired()))
    while journal.number < number:
        seq = journal.state.seq + 1
        flush = events.CommandReceived(
            at_ms=seq,
            epoch=1,
            origin=1,
            seq=seq,
            ttl_ms=1000,
            command=EngineCommand(operation="flush"),
            target=Target(),
        )
        feed(journal, flush)
        if journal.number % group == 0:
            journal.commit()
    journal.commit()


def seqs(journal: Journal, number: int, count: int = MANY, nbytes: int = MANY) -> tuple[int, list[int]]:
    """What is read after a decision: the number of the first, and the seq of each, which is less by 2."""
    first, decisions = journal.decisions_after(number, count, nbytes)
    found = [journal_files.decoded(decision.event) for decision in decisions]
    return first, [event.seq if isinstance(event, events.CommandReceived) else 0 for event in found]


def test_a_journal_continues_where_it_was_committed(path: Path) -> None:
    journal = opened(path)
    journal.join_run("run-1")
    grow(journal, 100)
    state = journal.state
    grow(journal, 103, group=MANY)
    feed(journal, events.Tick(at_ms=1))
    assert (journal.number, journal.committed) == (104, 103)
    with pytest.raises(LogLocked):
        opened(path)
    journal._file.close()  # as a kill leaves it
    again = opened(path)
    assert (again.id, again.run, again.number, again.committed) == (journal.id, "run-1", 103, 103)
    assert again.state.seq == state.seq + 3
    grow(again, 110)
    again.close()
    assert opened(path).number == 110


@pytest.mark.parametrize("recent", [0, 40, 512])
def test_batches_follow_each_other_wherever_they_end(path: Path, recent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from memory, from the file, or from both."""
    monkeypatch.setattr(journal_module, "RECENT_MAX", recent)
    journal = opened(path)
    grow(journal, 200, group=7)
    for count in (1, 5, 7, 10, 300):
        number = 2
        while number < 200:
            first, found = seqs(journal, number, count)
            assert first == number + 1 and found == list(range(first - 2, first - 2 + len(found)))
            assert len(found) == min(count, 200 - number)
            number += len(found)
    assert seqs(journal, 2, nbytes=1) == (3, [1])
    _, decisions = journal.decisions_after(2, MANY, MANY)
    size = sum(len(decision.event) + len(decision.effects) for decision in decisions[:4])
    assert seqs(journal, 2, nbytes=size) == (3, [1, 2, 3, 4])
    grow(journal, 210)
    assert seqs(journal, 200) == (201, list(range(199, 209)))
    assert seqs(journal, 57) == (58, list(range(56, 209)))  # read before, and again after a lost ack


def test_what_the_bus_has_is_dropped_and_the_rest_keeps_its_numbers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MARK_EVERY", 50)
    journal = opened(path)
    journal.join_run("run-1")
    sizes = []
    for number in range(100, 3000, 100):
        grow(journal, number)
        assert seqs(journal, number - 10) == (number - 9, list(range(number - 11, number - 1)))
        journal.release(number - 20)
        if journal._file._made is not None:
            journal._file._made.result()
        sizes.append(path.stat().st_size)
    assert max(sizes) < 3 * sizes[0]
    oldest, found = seqs(journal, 0)
    assert 2900 - 20 >= oldest > 2900 - 3 * 50 - 100
    assert found == list(range(oldest - 2, 2899))
    assert seqs(journal, oldest + 10) == (oldest + 11, list(range(oldest + 9, 2899)))
    state = journal.state
    journal.close()
    again = opened(path)
    assert (again.number, again.run, again.state) == (2900, "run-1", state)
    assert seqs(again, 0) == (oldest, found)
    assert seqs(again, 2890) == (2891, list(range(2889, 2899)))


def test_decisions_that_the_bus_lacks_are_kept_however_many(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MARK_EVERY", 50)
    journal = opened(path)
    grow(journal, 40)
    journal.release(40)
    grow(journal, 1000)
    assert seqs(journal, 40)[0] == 41 and len(seqs(journal, 40)[1]) == 960
    journal.close()
    assert opened(path).number == 1000


def test_a_commit_that_was_interrupted_after_it_was_written_is_not_written_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = FramedFile.append

    def interrupted(file: FramedFile, kind: int, payload: bytes) -> None:
        append(file, kind, payload)
        raise KeyboardInterrupt

    journal = opened(path)
    grow(journal, 10)
    with monkeypatch.context() as patch:
        patch.setattr(FramedFile, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grow(journal, 12)
    grow(journal, 15)
    assert seqs(journal, 2) == (3, list(range(1, 14)))
    journal.close()
    assert len(journal_files.entries(path)) == opened(path).number == 15


def test_a_damaged_journal_says_what_to_do_and_is_left_as_it_is(path: Path) -> None:
    journal = opened(path)
    grow(journal, 100)
    journal.close()
    spoiled = bytearray(path.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    path.write_bytes(spoiled)
    with pytest.raises(LogCorrupt, match=r"is damaged.*Move the file away: the agent then begins a new journal"):
        opened(path)
    assert path.read_bytes() == spoiled


def test_a_journal_of_an_earlier_version_is_refused_and_left_as_it_is(path: Path) -> None:
    earlier = path.with_suffix(".db")
    header = {"journal": "j", "logic": str(LOGIC), "agent": "0.1"}
    with RecordFile.open(earlier, header) as file:
        file.append("tick", "0.1", 1, b"a decision")
    before = earlier.read_bytes()
    with pytest.raises(AgentError, match=r"agent-0\.1\.db cannot be continued.*SQLite.*move the file away"):
        opened(path)
    assert earlier.read_bytes() == before and os.listdir(path.parent) == [earlier.name]
    earlier.rename(path.with_suffix(".old"))
    opened(path).close()
    earlier.touch()
    opened(path).close()  # an agent that has a journal has left the earlier one behind


def test_a_journal_of_another_agent_or_logic_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(path).close()
    with pytest.raises(AgentError, match="not the journal of agent 0.0"):
        Journal.open(path, "0.0", "os")
    monkeypatch.setattr(journal_module, "LOGIC", LOGIC + 1)
    with pytest.raises(AgentError, match=f"written by decision logic {LOGIC}, this agent has logic {LOGIC + 1}"):
        opened(path)
