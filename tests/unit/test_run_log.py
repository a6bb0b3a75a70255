"""The run's log: what it accepts from agents, how it is continued, and how one with holes is replayed."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import Raw

from controlplane.cli.replay_log import replay_log
from controlplane.machine.coordinator import LOGIC, CoordinatorState, decide
from controlplane.machine.events import Closed, CoordinatorEvent, CoordinatorSettings, Issued, Opened
from controlplane.record.log import RunLog
from controlplane.replay.recorded_run import RecordedRun
from schemas.commands import EngineCommand, Target
from schemas.errors import ConfigError, LogCorrupt, LogError, ReplayDiffers, WireError
from schemas.events import Decision, Tick
from schemas.storage.record_file import RecordFile
from schemas.wire import MAJOR, DecisionBatch, encode

REPLAYS = Path(__file__).parents[1] / "replays"
SETTINGS = CoordinatorSettings(heartbeat_ms=1000, agent_timeout_ms=4000, lease_ms=9000, history=8, retransmit_ms=500)
DECISION = Decision(Raw(encode(Tick(at_ms=1))), Raw(encode(())))


def events() -> list[CoordinatorEvent]:
    return [
        Opened(at_us=1, at_ns=1, run="r", settings=SETTINGS, logic=LOGIC),
        Issued(at_us=2, at_ns=2, ticket=1, command=EngineCommand(operation="flush"), target=Target(), timeout_ms=50),
        Closed(at_us=3, at_ns=3),
    ]


def write(path: Path) -> CoordinatorState:
    with RunLog.open(path, "r") as log:
        state = log.state
        for event in events():
            state, effects = decide(state, event)
            log.append(event, effects, 1)
    return state


def batch(first: int, count: int = 1, journal: str = "j") -> DecisionBatch:
    return DecisionBatch(journal=journal, first=first, decisions=(DECISION,) * count)


# --- going on with a log ----------------------------------------------------------------------------------------------


def test_a_log_that_is_opened_again_gives_the_state_of_its_last_record(tmp_path: Path) -> None:
    state = write(tmp_path / "run.db")
    with RunLog.open(tmp_path / "run.db") as log:
        assert (log.run, log.state) == ("r", state)
    header = RunLog.header(tmp_path / "run.db")
    assert (header.run, header.major, header.logic) == ("r", MAJOR, LOGIC)


def test_a_run_without_a_name_gets_one(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "a.db") as first, RunLog.open(tmp_path / "b.db") as second:
        assert first.run != second.run


def test_the_log_of_another_run_is_not_continued(tmp_path: Path) -> None:
    write(tmp_path / "run.db")
    with pytest.raises(ConfigError, match=r"run\.db is the log of run r, not of other: name another file"):
        RunLog.open(tmp_path / "run.db", "other")


@pytest.mark.parametrize("key", ["logic", "major"])
def test_a_log_of_other_logic_is_read_and_not_continued(tmp_path: Path, key: str) -> None:
    header = {"run": "r", "created": "1", "major": str(MAJOR), "logic": str(LOGIC), key: "99"}
    RecordFile.open(tmp_path / "run.db", header).close()
    with pytest.raises(LogError, match="can't be continued: .*99"):
        RunLog.open(tmp_path / "run.db")
    assert list(RunLog.read(tmp_path / "run.db")) == []


def test_a_log_that_this_version_would_decide_otherwise_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with RunLog.open(path, "r") as log:
        log.append(events()[0], (), 1)  # an opening that published nothing
    with pytest.raises(LogError, match="this version would decide otherwise in record 1"):
        RunLog.open(path)
    with pytest.raises(ReplayDiffers, match="record 1, the coordinator: event `opened` led to other effects"):
        replay_log(RunLog.read(path))


def test_a_record_that_is_no_decision_is_reported_at_its_position(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    write(path)
    with RecordFile.open(path) as file:
        file.append("issued", "", 1, b"\xc1")
    with pytest.raises(LogError, match="record 4 can't be understood"):
        RunLog.open(path)
    read = RunLog.read(path)
    assert [next(read).kind for _ in range(3)] == ["opened", "issued", "closed"]
    with pytest.raises(LogCorrupt) as caught:
        next(read)
    assert caught.value.position == 4


def test_sqlite_copies_a_log_that_is_being_written(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "run.db", "r") as log:
        for event in events()[:2]:
            _, effects = decide(log.state, event)
            log.append(event, effects, 1)
            log.commit()
        with closing(sqlite3.connect(tmp_path / "run.db")) as copying:
            copying.execute("VACUUM INTO ?", [str(tmp_path / "kept.db")])
        written = [entry.position for entry in RecordedRun(tmp_path / "run.db").entries]
    assert len(written) == 2
    assert [entry.position for entry in RecordedRun(tmp_path / "kept.db").entries] == written


# --- decisions of agents ----------------------------------------------------------------------------------------------


def test_a_decision_is_recorded_once_however_often_it_arrives(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "run.db") as log:
        assert log.append_batch("0.0", batch(1, 3), 1) == 3
        assert log.append_batch("0.0", batch(1, 3), 1) == 3
        assert log.append_batch("0.0", batch(2, 4), 1) == 5
        assert log.append_batch("0.1", batch(1, 1), 1) == 1
        assert log.recorded("0.0", "j") == 5 and log.recorded("0.0", "another") == 0
    numbers = [(entry.agent, entry.number) for entry in RunLog.read(tmp_path / "run.db")]
    assert numbers == [("0.0", 1), ("0.0", 2), ("0.0", 3), ("0.0", 4), ("0.0", 5), ("0.1", 1)]


def test_recorded_decisions_are_known_after_a_restart(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "run.db") as log:
        log.append_batch("0.0", batch(1, 3), 1)
    with RunLog.open(tmp_path / "run.db") as log:
        assert log.recorded("0.0", "j") == 3
        assert log.append_batch("0.0", batch(3, 2), 1) == 4


def test_a_hole_is_requested_and_stays_when_the_agent_has_nothing_older(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "run.db") as log:
        log.append_batch("0.0", batch(1, 2), 1)
        assert log.append_batch("0.0", batch(5, 2), 1) == 2  # not taken: go on after 2
        assert log.append_batch("0.0", batch(5, 2), 1) == 6  # it has nothing older any more
    assert [entry.number for entry in RunLog.read(tmp_path / "run.db")] == [1, 2, 5, 6]


@pytest.mark.parametrize(
    "bad",
    [
        DecisionBatch(journal="j", first=1, decisions=(DECISION, Decision(Raw(b"\x80"), Raw(b"\x90")))),
        DecisionBatch(journal="j", first=2**60, decisions=(DECISION,)),
    ],
    ids=["no kind", "beyond belief"],
)
def test_a_batch_with_an_invalid_decision_is_refused_completely(tmp_path: Path, bad: DecisionBatch) -> None:
    with RunLog.open(tmp_path / "run.db") as log:
        with pytest.raises(WireError):
            log.append_batch("0.0", bad, 1)
        assert (log.pending, log.recorded("0.0", "j")) == (0, 0)


# --- replaying a log with holes ---------------------------------------------------------------------------------------


def test_the_result_names_holes_that_could_not_be_compared() -> None:
    entries = RecordedRun(REPLAYS / "torn-fleet.db").entries
    kept = [entry for entry in entries if not (entry.agent == "0.0" and entry.number in (5, 6))]
    replayed = replay_log(kept)
    assert replayed.holes == ("agent 0.0 from 5 to 6",)
    assert replayed.compared < replayed.records == len(kept)
    assert "could not be compared, because the log lacks decisions before them: agent 0.0 from 5 to 6" in str(replayed)
