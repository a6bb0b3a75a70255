"""Marks in the log: where a bus begins when it opens one, whether they equal the records, and what damage does."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import pytest
from msgspec import Raw

from bench.logs import Run
from controlplane.bus.bus import Bus
from controlplane.cli.replay_log import new_replayer, replay_log
from controlplane.machine.coordinator import LOGIC, CoordinatorState, decide
from controlplane.machine.events import CoordinatorEvent
from controlplane.record import log as log_module
from controlplane.record.entries import AgentMark, LogEntry, LogItem, LogMark
from controlplane.record.log import RunLog
from controlplane.record.marks import CoordinatorMark, decode_mark, decode_state, encode_mark
from schemas.commands import EngineCommand, Target
from schemas.config import BusConfig
from schemas.errors import LogCorrupt, LogError, ReplayDiffers
from schemas.storage.record_file import RecordFile
from schemas.storage.records import RecordReader
from schemas.transport.sockets import Context
from schemas.wire import encode
from tests.running import typed
from tests.unit.small_bus import PRIMARY, Engine, running
from workers.link import upload
from workers.machine.state import AgentState

REPLAYS = sorted((Path(__file__).parents[1] / "replays").glob("*.db"))


@pytest.fixture(autouse=True)
def frequent_marks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log_module, "MARK_RECORDS", 100)
    monkeypatch.setattr(log_module, "MARK_SHARE", 1)
    yield


def write(path: Path, commands: int = 100) -> Path:
    run = Run(path, agents=3)
    run.commands(commands)
    run.close()
    return path


def end(path: Path) -> int:
    """Position of the last record."""
    return max(entry.position for entry in RunLog.read(path))


def marks(path: Path) -> list[LogMark]:
    return [entry for entry in RunLog.walk(path) if isinstance(entry, LogMark)]


def rewrite(path: Path, position: int, mark: CoordinatorMark) -> None:
    """Put another mark into the file, with a checksum that holds."""
    with RecordFile.open(path) as file:
        file._next = position + 1
        file.append_mark(1, encode(mark))
        file.commit()


# --- opening ----------------------------------------------------------------------------------------------------------


def test_a_log_opens_from_its_newest_mark_and_comes_to_the_same_state(tmp_path: Path) -> None:
    path = write(tmp_path / "run.db", commands=300)
    last = end(path)
    positions = [mark.position for mark in marks(path)]
    assert len(positions) >= 3 and last > 500
    with RunLog.open(path) as log:
        assert log.folded == last - positions[-1] < 200
        state, recorded = log.state, log._recorded
    without_marks(path)
    with RunLog.open(path) as log:
        assert (log.state, log._recorded, log.folded) == (state, recorded, last)


def without_marks(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM marks")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("commands", [300, 600])
def test_the_number_of_records_folded_does_not_grow_with_the_run(tmp_path: Path, commands: int) -> None:
    with RunLog.open(write(tmp_path / "run.db", commands)) as log:
        assert log.folded < 300


def test_a_log_that_is_opened_again_and_again_is_marked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "MARK_RECORDS", 10)
    path = write(tmp_path / "run.db", 5)
    event = next(entry for entry in RunLog.read(path) if entry.kind == "opened").typed_event()
    for _ in range(25):
        with RunLog.open(path) as log:
            state, effects = decide(log.state, event)  # type: ignore[arg-type]
            log.append(event, effects, 1, state)  # type: ignore[arg-type]
    assert log.folded <= 20


def test_a_mark_is_in_the_file_only_together_with_its_records(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with RecordFile.open(path) as file:
        file.append("k", "", 1, b"x")
        file.append_mark(1, b"state")
        file.append("k", "", 1, b"y")
        with RecordReader.open(path) as reader:
            assert reader.mark_positions() == []
            file.commit()
            assert reader.mark_positions() == [1]
            assert reader.mark(1).body == b"state"
            with pytest.raises(LogCorrupt):
                reader.mark(2)
        for _ in range(3):
            file.append_mark(1, b"again")
        file.drop_before(2)
        file.commit()
        file.commit()
        assert file.mark_positions() == [1, 2]
        file.drop_before(3)
        file.commit()
        assert file.mark_positions() == [2]


# --- every state can be marked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", REPLAYS, ids=lambda path: path.stem)
def test_a_state_that_was_read_from_a_mark_goes_on_as_the_one_that_was_written(path: Path) -> None:
    if RunLog.header(path).logic != LOGIC:
        pytest.skip("written by other logic")
    state = CoordinatorState()
    for entry in RunLog.read(path):
        if entry.agent:
            continue
        state, effects = decide(state, coordinator_event(entry))
        assert encode(effects) == bytes(entry.effects)
        read = decode_state(decode_mark(encode_mark(state, {})))
        assert read == state
        assert read is not None and [*read.members] == [*state.members] and [*read.desired] == [*state.desired]
        state = read


def coordinator_event(entry: LogEntry) -> CoordinatorEvent:
    return entry.typed_event()  # type: ignore[return-value]


# --- replay, verify, damage -------------------------------------------------------------------------------------------


def test_replay_compares_every_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "run.db")
    count = len(marks(path))
    replayed = replay_log(RunLog.walk(path))
    assert replayed.marks == count
    assert replayed.compared == replayed.records == len(list(RunLog.read(path)))


@pytest.mark.parametrize("what", ["state", "recorded"])
def test_a_mark_that_differs_from_the_records_is_found(tmp_path: Path, what: str) -> None:
    path = write(tmp_path / "run.db")
    mark = marks(path)[1]
    state = decode_state(mark)
    assert state is not None
    if what == "state":
        body = encode_mark(msgspec.structs.replace(state, seq=state.seq + 1), dict(mark.recorded))
    else:
        body = encode_mark(state, {"7.0": {"j": 1}})
    rewrite(path, mark.position, decode_mark(body))
    with pytest.raises(ReplayDiffers, match=f"the mark after record {mark.position} has another"):
        replay_log(RunLog.walk(path))


@pytest.mark.parametrize("what", ["checksum", "body", "other logic", "unknown state"])
def test_a_log_opens_without_a_mark_that_cannot_be_used(tmp_path: Path, what: str) -> None:
    path = write(tmp_path / "run.db")
    last, newest, before = end(path), marks(path)[-1], marks(path)[-2]
    if what == "other logic":
        rewrite(path, newest.position, CoordinatorMark(logic=LOGIC + 1, state=newest.state, recorded={}))
    elif what == "unknown state":
        rewrite(path, newest.position, CoordinatorMark(logic=LOGIC, state=Raw(encode({"epoch": "x"})), recorded={}))
    else:
        connection = sqlite3.connect(path)
        change = "checksum = 1" if what == "checksum" else "body = x'00'"
        connection.execute(f"UPDATE marks SET {change} WHERE position = ?", (newest.position,))
        connection.commit()
        connection.close()
    with RunLog.open(path) as log:
        assert log.folded == last - before.position
    verified = typed("log", "verify", path)
    assert verified.returncode == (1 if what in ("checksum", "body") else 0)
    if what in ("checksum", "body"):
        assert f"the mark after record {newest.position} does not match its checksum" in verified.stdout
        assert f"{len(list(RunLog.read(path)))} decisions read" in verified.stdout


def test_a_log_without_its_beginning_and_without_a_mark_is_not_continued(tmp_path: Path) -> None:
    path = write(tmp_path / "run.db")
    with RecordFile.open(path) as file:
        file.drop_before(marks(path)[1].position + 1)
        file.commit()
    with RunLog.open(path) as log:
        assert log.state.seq == 101
    without_marks(path)
    with pytest.raises(LogError, match=r"its records before \d+ were dropped, and no mark after them can be used"):
        RunLog.open(path)


def test_states_at_a_position_are_the_same_with_and_without_marks(tmp_path: Path) -> None:
    path = write(tmp_path / "run.db")
    first, second = new_replayer(), new_replayer()
    for entry in RunLog.walk(path):
        if isinstance(entry, LogMark):
            first.check_mark(entry)
        elif isinstance(entry, LogEntry):
            first.feed(entry)
            second.feed(entry)
    assert first.state_hash() == second.state_hash()


# --- states of agents -------------------------------------------------------------------------------------------------


def agent_marks(path: Path) -> list[AgentMark]:
    return [entry for entry in RunLog.walk(path) if isinstance(entry, AgentMark)]


def test_states_that_agents_sent_are_compared_with_their_decisions(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db", agents=3, state_every=40)
    run.commands(100)
    run.close()
    entries = list(RunLog.walk(tmp_path / "run.db"))
    sent = agent_marks(tmp_path / "run.db")
    assert len(sent) >= 6 and {mark.agent for mark in sent} == {"0.0", "1.0", "2.0"}
    assert "" not in {entry.kind for entry in RunLog.read(tmp_path / "run.db")}
    assert replay_log(entries).holes == ()
    place = entries.index(sent[0])
    entries[place] = msgspec.structs.replace(sent[0], state=encode(AgentState()))
    with pytest.raises(
        ReplayDiffers, match=f"agent {sent[0].agent} says that decision {sent[0].number} led to another"
    ):
        replay_log(entries)


@pytest.mark.parametrize("state", ["its own", "unreadable"])
def test_a_replay_goes_on_behind_a_hole_from_a_state(tmp_path: Path, state: str) -> None:
    run = Run(tmp_path / "run.db", agents=3, state_every=40)
    run.commands(100)
    run.close()
    sent = [mark for mark in agent_marks(tmp_path / "run.db") if mark.agent == "1.0"]
    kept: list[LogItem] = []
    for entry in RunLog.walk(tmp_path / "run.db"):
        if isinstance(entry, LogEntry) and entry.agent == "1.0" and entry.number in (5, 6):
            continue
        if isinstance(entry, AgentMark) and entry.agent == "1.0" and state == "unreadable":
            entry = msgspec.structs.replace(entry, state=b"\xc1")
        kept.append(entry)
    replayed = replay_log(kept)
    assert replayed.holes == ("agent 1.0 from 5 to 6",)
    uncompared = replayed.records - replayed.compared
    assert uncompared == (sent[0].number - 6 if state == "its own" else 103 - 6)


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_an_agent_uploads_its_state_now_and_then(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "STATE_EVERY", 2)
    config = BusConfig(head_interval_ms=50, heartbeat_ms=50, agent_timeout_ms=5_000)
    address, path = f"ipc://{tmp_path}/bus", tmp_path / "run.db"
    async with (
        Bus(address, RunLog.open(path), config, context=context) as bus,
        running(address, context, Engine(), tmp_path, PRIMARY),
    ):
        with anyio.fail_after(20):
            await bus.wait_until(lambda state: any(member.state == "live" for member in state.members.values()))
            while not agent_marks(path):
                await bus.publish(EngineCommand(operation="flush"), Target(), 5_000)
    replayed = replay_log(RunLog.walk(path))
    assert (replayed.agents, replayed.holes) == (("0.0",), ())
