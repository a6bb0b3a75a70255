"""Timelines of recorded runs: well-formed, ordered, exact about clocks; and the command that writes them."""

import json
import shutil
import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from controlplane.machine.events import SampleCount, SamplesCounted
from controlplane.record.log import RunLog
from controlplane.timeline.perfetto import TimelineDraft, write_timeline
from controlplane.timeline.survey import LogSurvey
from controlplane.timeline.tracks import TraceEvent
from schemas.errors import LogError
from schemas.events import Answer, CommandReceived, EngineObserved, Observation
from schemas.identity import Identity
from schemas.outcomes import Acted, Skipped
from schemas.outcomes import Reason as Why
from schemas.storage.record_file import RecordFile
from tests.running import typed
from tests.timeline.trace_events import Event, checked_timeline, problems, read
from tests.timeline.written import FLUSH, MS, START_NS, Written
from tests.unit.test_report import Recorded as LoggedBus

REPLAYS = sorted((Path(__file__).parents[1] / "replays").glob("*.db"))
PRIMARY = Identity(replica=0, node_rank=0)
FLUSHED = Acted(calls=("flush",))


def slices(events: list[Event], process: str, thread: str) -> list[Event]:
    """Slices and instants of one thread in time order, without issue marks. `process` is the beginning of its name."""
    named = {
        (event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else 0): event["args"].get(
            "name", ""
        )
        for event in events
        if event["ph"] == "M"
    }
    found = [
        event
        for event in events
        if event["ph"] in "Xi"
        and event.get("args", {}).get("kind") != "issue"
        and named["process_name", event["pid"], 0].startswith(process)
        and named["thread_name", event["pid"], event["tid"]] == thread
    ]
    return sorted(found, key=lambda event: Decimal(str(event["ts"])))


def copied(log: Path, without: str = "", renamed: tuple[bytes, bytes] = (b"", b"")) -> Path:
    """Copy a log without the records of one kind, or with another word in them."""
    copy = log.with_name("copy.db")
    with RecordFile.open(log) as old, RecordFile.open(copy, old.header) as new:
        for record in old.records():
            if record.kind != without:
                new.append(record.kind, record.agent, record.at_ns, record.body.replace(*renamed))
    return copy


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "run.db")


# --- recorded runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", REPLAYS, ids=lambda path: path.stem)
def test_every_recorded_run_gives_a_timeline(recorded: Path, tmp_path: Path) -> None:
    _, events = checked_timeline(Path(shutil.copy(recorded, tmp_path / "run.db")))
    kinds = {event["args"]["kind"] for event in events if "kind" in event.get("args", {})}
    assert kinds == {"command", "issue", "outcome", "decide", "effect"}
    assert {event.get("cat") for event in events if event["ph"] != "M"} == {"rolloutctl"}
    assert [event for event in events if event["ph"] == "C"]


def test_agents_without_clock_estimates_are_placed_by_when_the_bus_heard_of_them(written: Written) -> None:
    peer = written.joins(PRIMARY)
    for i in range(20):
        written.commands(peer, 100 + 10 * i + i / 7, 4, FLUSHED)
    drawn, events = checked_timeline(written.close())
    (line,) = drawn.clocks
    assert (line.offset_ns, line.error_ns, line.estimates) == (None, None, 0)
    assert str(line) == "agent 0.0: clock offset unknown; events placed by when the bus heard of them"
    for issued, decided in zip(slices(events, "bus", "commands"), slices(events, "agent 0.0", "commands"), strict=True):
        assert 0 <= decided["ts"] - issued["ts"] <= 600_000  # half a second until the upload


def test_an_answer_sent_again_does_not_move_the_first(written: Written) -> None:
    peer = written.joins(PRIMARY)
    written.commands(peer, 100, 4, FLUSHED)
    again = CommandReceived(at_ms=written.zero_ms + 9_000, epoch=1, origin=1, seq=1, ttl_ms=1, command=FLUSH)
    written.decides("0.0", again, Answer(epoch=1, seq=1, outcome=FLUSHED, rule=2))
    drawn, events = checked_timeline(written.close())
    assert abs(slices(events, "agent 0.0", "commands")[0]["ts"] - 600_000) < 5_000  # the agent joined at 1 ms
    assert drawn.warnings == ()


# --- placing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset_ns", [0, -37_000 * MS, 5_003_000_123])
def test_decisions_are_placed_on_the_clock_of_the_bus(written: Written, offset_ns: int) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(10, offset_ns), written.clock(60_010, offset_ns)))
    written.commands(peer, 30_000, 400, FLUSHED)
    drawn, events = checked_timeline(written.close())
    (decided,) = slices(events, "agent 0.0", "commands")
    assert (decided["ts"], decided["dur"]) == (Decimal("30099000.0"), 200_000)  # the agent joined at 1 ms
    assert drawn.clocks[0].offset_ns == offset_ns
    assert read(Path(drawn.path))["baseTimeNanoseconds"] == START_NS + 1 * MS


def test_an_estimate_from_before_a_clock_was_set_is_not_used_after(written: Written) -> None:
    """In ten minutes, clocks may drift by more than the step of this one."""
    was_set = structs.replace(written.clock(60_000), offset_ns=6 * MS)
    peer = written.joins(PRIMARY, clocks=(written.clock(59_000), was_set))
    clock = LogSurvey(RunLog.read(written.close())).clock(peer)
    assert clock.bus_ns(written.zero_ms + 500) == START_NS + 500 * MS
    assert clock.bus_ns(written.zero_ms + 601_000) == START_NS + 601_006 * MS
    offset_ns, error_ns = clock.wall(START_NS + 601_006 * MS) or (0, 0)
    assert offset_ns == 6 * MS and abs(error_ns - 541 * 15_000) < MS / 10  # 15 ppm of nine minutes


def test_a_poor_estimate_does_not_spoil_a_good_one(written: Written) -> None:
    poor = structs.replace(written.clock(1), offset_ns=9 * MS, error_ns=10 * MS)
    peer = written.joins(PRIMARY, clocks=(poor, written.clock(500)))
    written.commands(peer, 100, 8, FLUSHED)
    drawn, events = checked_timeline(written.close())
    (decided,) = slices(events, "agent 0.0", "commands")
    assert abs(decided["ts"] - 101_000) < 10
    assert drawn.warnings == ()


def test_a_decision_is_never_drawn_before_its_command_nor_before_the_one_before_it(written: Written) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    for i in range(5):  # all within one millisecond of the agent's clock, and issued late in it
        written.commands(peer, 50.7 + i / 20, 0.04, Skipped(Why.ALREADY))
    _, events = checked_timeline(written.close())
    issued, decided = slices(events, "bus", "commands"), slices(events, "agent 0.0", "commands")
    assert len(issued) == len(decided) == 5
    assert all(late["ts"] >= early["ts"] for early, late in zip(issued, decided, strict=True))
    assert [event["args"]["seq"] for event in decided] == [1, 2, 3, 4, 5]


def test_overlapping_commands_are_drawn_on_lanes(written: Written) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    first = written.issue(peer, 10, 12)
    second = written.issue(peer, 20, 22)
    written.answer(peer, first, 30, 32, FLUSHED)
    third = written.issue(peer, 40, 42)
    written.answer(peer, second, 50, 52, FLUSHED)
    written.answer(peer, third, 60, 62, FLUSHED)
    _, events = checked_timeline(written.close())
    for process in ("bus", "agent 0.0"):
        assert [event["args"]["seq"] for event in slices(events, process, "commands")] == [1, 3]
        assert [event["args"]["seq"] for event in slices(events, process, "commands (2)")] == [2]


def test_open_commands_of_an_interrupted_run_end_with_the_log(written: Written) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.commands(peer, 10, 400, FLUSHED)
    _, events = checked_timeline(copied(written.close(), without="answers"))
    (open_,) = slices(events, "bus", "commands")
    assert open_["args"]["unfinished"] is True


def test_a_pause_that_never_ended_is_marked_unfinished(written: Written) -> None:
    for replica in (0, 1):
        written.joins(Identity(replica=replica, node_rank=0), 0, (written.clock(0),))
        paused = Observation(engine="tiny", tokenizer="present", generating=False)
        written.decides(f"{replica}.0", EngineObserved(at_ms=written.zero_ms + 10, observation=paused))
    runs = structs.replace(paused, generating=True)
    written.decides("1.0", EngineObserved(at_ms=written.zero_ms + 90, observation=runs))
    drawn, events = checked_timeline(written.close())
    (never,) = slices(events, "agent 0.0", "generation")
    assert never["args"] == {"unfinished": True}
    assert never["ts"] + never["dur"] == 590_000, "the log ends when the bus received the last decision"
    (ended,) = slices(events, "agent 1.0", "generation")
    assert (ended["dur"], "args" in ended) == (80_000, False)


def test_the_newest_version_of_each_adapter_of_a_replica_is_a_counter(written: Written) -> None:
    written.joins(PRIMARY, 0, (written.clock(0),))
    listings: tuple[list[str], ...] = (
        ["policy-v9"],
        ["policy-v9", "policy-v10", "judge-v1"],
        ["policy-v10", "of-another"],
        [],
    )
    for moment, models in enumerate(listings, 1):
        lists = Observation(engine="vllm", tokenizer="present", adapters=dict.fromkeys(models, "adapters/a"))
        written.decides("0.0", EngineObserved(at_ms=written.zero_ms + 10 * moment, observation=lists))
    _, events = checked_timeline(written.close())
    counted = {(event["name"], *event["args"].values(), event["ts"]) for event in events if event["ph"] == "C"}
    assert counted == {
        ("replica 0 adapter policy version", 9, 10_000),
        ("replica 0 adapter policy version", 10, 20_000),
        ("replica 0 adapter judge version", 1, 20_000),
    }


def test_samples_by_staleness_are_counters_of_the_bus(written: Written) -> None:
    def count(staleness: int | None, sequences: int, accepted: bool = True) -> SampleCount:
        made: dict[str, Any] = {"version": staleness and 3 - staleness, "staleness": staleness, "proof": "proven"}
        return SampleCount(accepted=accepted, sequences=sequences, tokens=9, **made)

    written.joins(PRIMARY, 0, (written.clock(0),))
    for at_ms, counts in (
        (10, (count(0, 5), count(1, 2), count(1, 1, accepted=False))),
        (20, (count(None, 4, False),)),
    ):
        written.bus(at_ms, SamplesCounted(at_us=0, at_ns=0, step=1, counts=counts))
    _, events = checked_timeline(written.close())
    counted = [(event["name"], *event["args"].values(), event["ts"]) for event in events if event["ph"] == "C"]
    assert counted == [
        *(("samples 0 behind", 5, 10_000), ("samples 1 behind", 3, 10_000), ("samples refused", 1, 10_000)),
        *(("samples 0 behind", 0, 20_000), ("samples 1 behind", 0, 20_000)),
        *(("samples of unknown age", 4, 20_000), ("samples refused", 4, 20_000)),
    ]


def test_a_running_run_is_drawn_as_far_as_it_was_surveyed(written: Written) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.commands(peer, 10, 4, FLUSHED)
    path = written.commit()
    draft = TimelineDraft("written", LogSurvey(RunLog.read(path)))
    whole = list(draft.fleet_events(RunLog.read(path)))
    written.joins(Identity(replica=7, node_rank=0), at_ms=60)  # while traces are checked, which may take minutes
    assert list(draft.fleet_events(RunLog.read(written.close()))) == whole


def test_records_of_another_version_are_left_out_and_counted(written: Written) -> None:
    peer = written.joins(PRIMARY, clocks=(written.clock(0),))
    written.commands(peer, 10, 4, FLUSHED)
    drawn, _ = checked_timeline(copied(written.close(), renamed=(b"\xa7started", b"\xa7painted")))
    assert drawn.warnings == ("left out: 1 unreadable log records, the first at position 2",)


# --- the file and the command -----------------------------------------------------------------------------------------


def test_a_failed_write_leaves_nothing_behind(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.joins(PRIMARY)
    log = written.close()
    with pytest.raises(LogError, match=r"out\.json was not written: No such file or directory"):
        write_timeline(log, tmp_path / "nowhere" / "out.json")
    place = tmp_path / "out"
    place.mkdir()

    def full(_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("controlplane.timeline.perfetto._encoder", type("Full", (), {"encode": staticmethod(full)}))
    with pytest.raises(LogError, match="No space left on device"):
        write_timeline(log, place / "out.json.gz")
    assert list(place.iterdir()) == []


def test_the_command_prints_each_clock_and_what_it_wrote(written: Written, tmp_path: Path) -> None:
    written.joins(PRIMARY, clocks=(written.clock(5, -2_500_000, 40_000),))
    log, out = written.close(), tmp_path / "t.json.gz"
    done = typed("timeline", log, "-o", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "agent 0.0: clock offset -2.500 ms ± 0.047 ms (1 estimate)"
    assert f"{out}: run written, " in done.stdout
    about = read(out)["otherData"]
    assert (about["run"], about["agents"][0]["offset_ns"], about["agents"][0]["error_ns"]) == (
        "written",
        -2_500_000,
        47_440,  # clocks drift on in the half second until the end of the log
    )
    again = typed("timeline", log, "-o", out)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"rolloutctl: {out} already exists; nothing was written. Name another file, or use --force\n"
    forced = typed("timeline", log, "-o", out, "--force", "--json")
    assert json.loads(forced.stdout)["clocks"][0]["agent"] == "0.0"


def test_commands_left_open_by_a_trainer_are_concluded_by_the_next() -> None:
    bus = LoggedBus("0.0", "1.0")
    bus.issue(FLUSH)
    bus.answer(a0_0=FLUSHED)
    bus.open()
    (left,) = [event for event in draw(bus) if event.ph == "X" and event.name.startswith("flush")]
    assert left.args == {
        "kind": "command",
        "seq": 2,
        "epoch": 1,
        "0.0": "acted",
        "1.0": "missing bus_restarted",
    }


def draw(bus: LoggedBus) -> list[TraceEvent]:
    return list(TimelineDraft("run", LogSurvey(bus.entries)).fleet_events(bus.entries))


def test_a_damaged_log_is_drawn_up_to_the_damage(tmp_path: Path) -> None:
    log = Path(shutil.copy(REPLAYS[0], tmp_path / "run.db"))
    whole, _ = checked_timeline(log)
    with sqlite3.connect(log) as connection:
        connection.execute("update records set body = x'00' where position = 100")
    connection.close()
    out = tmp_path / "cut.json"
    done = typed("timeline", log, "-o", out)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "warning: cut off: the log after its record 99. " in done.stdout
    events = read(out)["traceEvents"]
    assert problems(events) == [] and 50 < len(events) < whole.control_events


def test_a_traces_root_that_has_none_of_the_traces_is_said(tmp_path: Path) -> None:
    log = Path(__file__).parents[1] / "replays" / "torn-fleet.db"
    done = typed("timeline", log, "--traces", tmp_path, "-o", tmp_path / "run.json")
    assert done.returncode == 1 and (tmp_path / "run.json").exists()
    assert done.stderr.endswith("rolloutctl: none of the traces that the log names is below --traces\n")


def test_a_missing_traces_root_and_a_file_that_is_no_log_are_named(written: Written, tmp_path: Path) -> None:
    log = written.close()
    wrong = typed("timeline", log, "--traces", tmp_path / "no")
    assert (wrong.returncode, wrong.stderr) == (2, f"rolloutctl: --traces {tmp_path}/no: there is no such folder\n")
    other = tmp_path / "other.db"
    other.write_text("no log")
    assert typed("timeline", other).returncode == 3
    assert not (tmp_path / "other.perfetto.json.gz").exists()
