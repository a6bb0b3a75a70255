"""`rolloutctl log` on the journal of an agent: shown, verified and replayed, also while it is written."""

import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.machines import agent_events
from controlplane.analysis.invariants import verify
from controlplane.cli.interrupt import CODE
from controlplane.cli.journals import is_journal, walk_journal
from controlplane.cli.replay_log import replay_file
from controlplane.record.entries import LogEntry
from controlplane.record.follow import follow
from schemas.errors import LogError
from schemas.events import RequestResend, Tick
from schemas.storage.record_file import RecordFile
from tests.running import rolloutctl, started, typed
from tests.unit import journal_files
from workers.link import journal as journal_module
from workers.link.journal import Journal, archive_journal
from workers.machine.decide import LOGIC, decide


def log(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return rolloutctl("log", *args)


def written(path: Path) -> Journal:
    """The journal of an agent that carried out commands, still open."""
    journal = Journal.open(path, "0.0", "os")
    journal.join_run("run-1", 60_000)
    seen, commanded = agent_events(0, 60)
    events = seen + commanded
    for event in events:
        state, effects = decide(journal.state, event)
        journal.append(event, effects, state)
        journal.commit()
    return journal


class Agent:
    """An agent that goes on with its journal whenever all of it was read, one step at a time."""

    def __init__(self, path: Path, *steps: Callable[[], object]) -> None:
        self.path, self._steps = path, list(steps)

    def next(self) -> None:
        if not self._steps:
            raise KeyboardInterrupt
        self._steps.pop(0)()

    def follow(self, start: int = 1) -> list[int]:
        numbers: list[int] = []
        followed = follow(self.path, start, self.next)
        with pytest.raises(KeyboardInterrupt):
            numbers.extend(entry.number for entry in followed)
        return numbers


def tick(journal: Journal) -> None:
    event = Tick(at_ms=99_999_999)
    journal.append(event, (), journal.state)
    journal.commit()


def test_a_journal_is_followed_while_its_agent_writes_it(path: Path) -> None:
    journal = written(path)
    last = journal.number
    agent = Agent(path, lambda: None, lambda: tick(journal), lambda: None, lambda: tick(journal))
    assert agent.follow(last) == [last, last + 1, last + 2]


def test_a_journal_whose_oldest_decisions_are_dropped_goes_on_where_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MARK_EVERY", 8)
    journal = written(path)
    begun = journal.number

    def many() -> None:
        for _ in range(30):
            tick(journal)
            journal.release(journal.number)
        assert journal.decisions_after(0, 1, 1)[0] > begun

    agent = Agent(path, lambda: tick(journal), many, lambda: tick(journal))
    numbers = agent.follow(begun)
    assert numbers == sorted(set(numbers)) and numbers[-1] == journal.number


def test_following_ends_when_another_file_is_there_and_after_what_the_old_one_still_had(path: Path) -> None:
    journal = written(path)

    def begin_anew() -> None:
        tick(journal)
        journal.close()
        archive_journal(path)
        assert not path.exists()

    agent = Agent(path, begin_anew, lambda: None, lambda: written(path).close(), lambda: None)
    numbers, begun = list[int](), journal.number
    with pytest.raises(LogError, match="was replaced by another file"):
        numbers.extend(entry.number for entry in follow(path, begun, agent.next))
    assert numbers == [begun, begun + 1]


def test_following_a_journal_ends_with_ctrl_c(path: Path) -> None:
    journal = written(path)
    with started("-m", "controlplane.cli", "log", "show", "-f", path, stderr=subprocess.PIPE) as following:
        assert following.stdout is not None
        for _ in range(journal.number):
            following.stdout.readline()
        tick(journal)
        assert following.stdout.readline().split()[0] == str(journal.number)
        following.send_signal(signal.SIGINT)
        assert following.wait(60) == CODE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent-0.0.journal"


def test_a_journal_is_shown_verified_and_replayed_while_its_agent_writes_it(path: Path) -> None:
    journal = written(path)
    shown = log("show", path)
    assert shown.returncode == 0 and len(shown.stdout.splitlines()) == journal.number > 60
    assert shown.stdout.splitlines()[0].split()[0] == "1" and " 0.0 " in shown.stdout
    lines = [
        json.loads(line)
        for line in log("show", path, "--json", "--from", "50", "--kind", "command").stdout.split("\n")[:-1]
    ]
    assert lines and all(line["kind"] == "command" and line["number"] >= 50 for line in lines)
    assert {line["journal"] for line in lines} == {journal.id}
    verified = log("verify", path)
    assert verified.returncode == 0
    assert verified.stdout == f"journal of agent 0.0: {journal.number} decisions read, no violations\n"
    replayed = log("replay", path)
    assert replayed.returncode == 0 and replayed.stdout.startswith(
        f"replayed {journal.number} decisions of agent 0.0: all"
    )
    journal.close()


def test_a_journal_whose_first_decisions_were_dropped_is_replayed_from_its_mark(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MARK_EVERY", 20)
    journal = written(path)
    journal.release(journal.number - 5)
    tick = Tick(at_ms=10**9)
    state, effects = decide(journal.state, tick)
    journal.append(tick, effects, state)
    journal.close()
    entries = [entry for entry in walk_journal(path) if isinstance(entry, LogEntry)]
    assert entries[0].number > 20 and entries[-1].number == journal.number
    assert replay_file(path).compared == len(entries) and replay_file(path).holes == ()
    assert list(verify(walk_journal(path))) == []


def test_damage_and_other_decisions_are_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = written(path)
    last.close()
    sound = path.read_bytes()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE records SET at_ns = 7 WHERE position = ?", (last.number // 2,))
    database.close()
    shown, verified = typed("log", "show", path), typed("log", "verify", path, "--json")
    assert shown.returncode == 3 and len(shown.stdout.splitlines()) == last.number // 2 - 1
    assert "does not match its checksum" in shown.stderr and "Traceback" not in shown.stderr
    assert verified.returncode == 1 and "does not match its checksum" in json.loads(verified.stdout)["damage"]
    path.write_bytes(sound)
    event = next(entry.typed_event() for entry in walk_journal(path) if isinstance(entry, LogEntry))
    journal_files.append(path, [journal_files.entry(event, (RequestResend(7),))])  # type: ignore[arg-type]
    replayed = typed("log", "replay", path)
    assert replayed.returncode == 1 and "led to other effects" in replayed.stdout
    monkeypatch.setattr("controlplane.cli.journals.LOGIC", LOGIC + 1)
    with pytest.raises(LogError, match=f"can't be replayed: decision logic {LOGIC} wrote it"):
        replay_file(path)


def test_what_only_a_log_has_is_refused_for_a_journal_in_one_line(path: Path) -> None:
    written(path).close()
    before = path.read_bytes()
    for command, *options in (["prune", "--days", "1"], ["archive"]):
        refused = typed("log", command, path, *options)
        assert refused.returncode == 3 and str(path) in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert path.read_bytes() == before and [near.name for near in path.parent.iterdir()] == [path.name]


def test_to_look_what_a_file_is_leaves_sqlite_its_locks(tmp_path: Path) -> None:
    """To close any descriptor of a database drops the locks that SQLite has on it in the same process."""
    path = tmp_path / "run.db"

    def locks() -> list[str]:
        lines = Path("/proc/locks").read_text().splitlines()
        own = [line for line in lines if f" {os.getpid()} " in line and f":{path.stat().st_ino} " in line]
        return [line.partition(": ")[2] for line in own]  # before it is the line's number, among the locks of others

    with RecordFile.open(path) as file:
        file.append("k", "", 1, b"x")
        file.commit()
        before = locks()
        assert before and not is_journal(path) and locks() == before
