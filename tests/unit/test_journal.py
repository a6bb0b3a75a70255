"""The agent's journal: what is committed is found again, numbered as before, and what the bus has is dropped."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from schemas import events
from schemas.commands import EngineCommand, Target
from schemas.desired import Desired
from schemas.errors import AgentError, LogCorrupt, LogLocked
from schemas.identity import Identity
from schemas.storage import filesystems, record_file
from schemas.storage.records import RecordReader
from tests.unit import journal_files
from workers.link import journal as journal_module
from workers.link.journal import LOOK_S, Journal, archive_journal
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
    journal.join_run("run-1", 60_000)
    grow(journal, 100)
    state = journal.state
    grow(journal, 103, group=MANY)
    feed(journal, events.Tick(at_ms=1))
    assert (journal.number, journal.committed) == (104, 103)
    with pytest.raises(LogLocked, match="another process runs agent .*give this one another --replica, or --state-dir"):
        opened(path)
    killed = path.parent / "killed"  # as a kill leaves it
    killed.mkdir()
    for file in path.parent.glob("agent-*"):
        shutil.copy(file, killed)
    again = opened(killed / path.name)
    assert (again.id, again.run, again.number, again.committed) == (journal.id, "run-1", 103, 103)
    assert again.state.seq == state.seq + 3
    grow(again, 110)
    again.close()
    assert opened(killed / path.name).number == 110


def test_batches_follow_each_other_wherever_they_end(path: Path) -> None:
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
    feed(journal, events.Tick(at_ms=1))
    assert seqs(journal, 205) == (206, [204, 205, 206, 207, 208])  # what is not on disk yet is not sent
    journal.release(207)
    assert seqs(journal, 207) == (208, [206, 207, 208])
    assert seqs(journal, 200) == (201, list(range(199, 209)))  # the bus may have lost what it had


def test_what_the_bus_has_is_dropped_and_the_rest_keeps_its_numbers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MARK_EVERY", 50)
    journal = opened(path)
    journal.join_run("run-1", 60_000)
    sizes = []
    for number in range(100, 3000, 100):
        grow(journal, number)
        assert seqs(journal, number - 10) == (number - 9, list(range(number - 11, number - 1)))
        journal.release(number - 20)
        sizes.append(journal._file.used_bytes)
    assert max(sizes) < 4 * sizes[0]
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
    journal = opened(path)
    cursor = journal._file._cursor

    class Interrupted:
        """Ctrl-C, right after a statement."""

        def execute(self, statement: str, values: tuple[object, ...] = ()) -> None:
            cursor.execute(statement, values)
            if statement.startswith(("INSERT", "COMMIT")):
                raise KeyboardInterrupt

        executemany = staticmethod(cursor.executemany)

    grow(journal, 10)
    for last in (11, 14):  # one decision, and a group
        with monkeypatch.context() as patch:
            patch.setattr(journal._file, "_cursor", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                grow(journal, last, group=MANY)
    grow(journal, 17)
    assert seqs(journal, 2) == (3, list(range(1, 16)))
    journal.close()
    assert len(journal_files.entries(path)) == opened(path).number == 17


def test_where_processes_share_no_memory_a_journal_has_a_rollback_journal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystems, "is_network", lambda filesystem: True)
    journal = opened(path)
    grow(journal, 20)
    assert not Path(f"{path}-wal").exists()
    journal.close()
    assert opened(path).number == 20


def test_a_damaged_journal_says_what_to_do_and_keeps_what_is_readable(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the damage is before the newest mark, so that the machine is not folded over it."""
    monkeypatch.setattr(journal_module, "MARK_EVERY", 60)
    journal = opened(path)
    grow(journal, 100)
    journal.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE records SET body = zeroblob(20) WHERE position = 50")
    database.close()
    for _ in range(2):
        with pytest.raises(LogCorrupt, match=r"record 50.*Move the file away: the agent then begins a new journal"):
            opened(path)
    with RecordReader.open(path) as reader, pytest.raises(LogCorrupt):
        found = [record.position for record in reader.records() if record.position < 50 or pytest.fail("damaged")]
        assert found == list(range(1, 50))


def test_a_journal_without_the_state_after_what_was_dropped_is_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MARK_EVERY", 50)
    journal = opened(path)
    grow(journal, 100)
    journal.release(100)
    grow(journal, 101)
    journal.close()
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM marks")
    database.close()
    with pytest.raises(LogCorrupt, match=r"the state after decision \d+ is missing.*Move the file away"):
        opened(path)


def test_an_archived_journal_keeps_what_a_reader_kept_from_its_file(path: Path) -> None:
    journal = opened(path)
    grow(journal, 20)
    with RecordReader.open(path) as reader:
        next(reader.records())
        reading = reader._connection.execute("SELECT position FROM records")
        reading.fetchone()
        journal.close()
        archive_journal(path)
        opened(path).close()
    kept = path.with_suffix(".previous.journal")
    assert len(journal_files.entries(kept)) == 20 and journal_files.entries(path) == []
    assert {near.name for near in path.parent.iterdir() if "previous" not in near.name} == {path.name}


def test_a_journal_of_another_agent_or_logic_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(path).close()
    with pytest.raises(AgentError, match="not the journal of agent 0.0"):
        Journal.open(path, "0.0", "os")
    monkeypatch.setattr(journal_module, "LOGIC", LOGIC + 1)
    with pytest.raises(AgentError, match=f"written by decision logic {LOGIC}, this agent has logic {LOGIC + 1}"):
        opened(path)


def test_a_journal_that_is_taken_away_ends_its_agent_at_the_next_look(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(record_file, "monotonic", lambda: now_s)
    journal = opened(path)
    grow(journal, 10, group=1)
    path.unlink()
    grow(journal, 20, group=1)
    now_s += LOOK_S
    with pytest.raises(AgentError, match="another program interfered while it was written: .* was deleted or moved"):
        grow(journal, 21, group=1)
