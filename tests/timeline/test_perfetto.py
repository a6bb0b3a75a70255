"""A timeline of a real run, loaded by Perfetto's own trace processor and asked what it shows."""

from pathlib import Path
from typing import Any

import pytest

from controlplane.timeline.perfetto import Timeline, write_timeline
from tests.timeline.environment import Row, ask
from tests.timeline.real_run import record

pytestmark = pytest.mark.timeline_perfetto

SLICES = (
    "select p.name as process, t.name as thread, s.name as name, s.category as category, s.ts as ts, s.dur as dur, "
    "s.depth as depth from slice s join thread_track tt on s.track_id = tt.id join thread t using (utid) "
    "join process p using (upid) order by s.ts"
)
COUNTERS = (
    "select p.name as process, t.name as name, c.value as value from counter c "
    "join process_counter_track t on c.track_id = t.id join process p using (upid) order by c.ts"
)
ARROWS = (
    "select o.name as issued, op.name as from_process, i.name as decided, ip.name as to_process, i.ts - o.ts as late "
    "from flow f join slice o on f.slice_out = o.id join slice i on f.slice_in = i.id "
    "join thread_track ot on o.track_id = ot.id join thread oth on ot.utid = oth.utid "
    "join process op on oth.upid = op.upid "
    "join thread_track it on i.track_id = it.id join thread ith on it.utid = ith.utid "
    "join process ip on ith.upid = ip.upid"
)
TRACKS = (
    "select p.name as process, t.name as thread, count(s.id) as slices from thread t join process p using (upid) "
    "left join thread_track tt using (utid) left join slice s on s.track_id = tt.id "
    "where p.name is not null and t.name is not null group by t.utid"
)
FAULTS = "select name, value from stats where value > 0 and severity != 'info'"


class Seen:
    """What Perfetto shows of a run."""

    def __init__(self, folder: Path) -> None:
        log, out = record(folder), folder / "run.perfetto.json.gz"
        self.written: Timeline = write_timeline(log, out, [folder / "traces"])
        queries = SLICES, COUNTERS, ARROWS, TRACKS, FAULTS
        self.slices, self.counters, self.arrows, self.tracks, self.faults = ask(out, *queries)

    def named(self, process: str, thread: str) -> list[Row]:
        """Slices of one thread, without issue marks. `process` is the beginning of its name."""
        slices = [row for row in self.slices if row["process"].startswith(process) and row["thread"] == thread]
        return [row for row in slices if not row["name"].startswith("issue ")]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory.mktemp("run"))


def names(rows: list[Row]) -> list[Any]:
    return [row["name"] for row in rows]


def test_the_file_loads_without_errors(seen: Seen) -> None:
    assert seen.faults == []
    assert seen.written.warnings == ()


def test_each_rank_is_one_process_and_no_track_is_empty(seen: Seen) -> None:
    processes = {row["process"].partition(" (clock")[0] for row in seen.tracks}
    assert processes == {"bus (trainer)", "agent 0.0", "agent 1.0", "replica 0 rank 0", "replica 1 rank 1"}
    assert [row for row in seen.tracks if not row["slices"]] == []


def test_weight_syncs_are_spans_with_their_phases_inside(seen: Seen) -> None:
    drawn = seen.named("bus", "weight syncs")
    assert [row["name"].partition(" (")[0] for row in drawn] == [
        *("sync to v1: committed", "weights prepare v1", "weights load v1", "weights commit v1"),
        *("sync to v2: committed", "weights prepare v2", "weights load v2", "weights commit v2"),
    ]
    assert [row["depth"] for row in drawn] == [0, 1, 1, 1] * 2
    assert {row["category"] for row in drawn} == {"rolloutctl"}


@pytest.mark.parametrize("replica", [0, 1])
def test_pauses_sleeps_sessions_and_calls_are_spans_of_each_agent(seen: Seen, replica: int) -> None:
    agent = f"agent {replica}.0"
    assert set(names(seen.named(agent, "generation"))) == {"paused"}
    assert names(seen.named(agent, "memory")) == ["asleep: kv_cache weights"]
    assert names(seen.named(agent, "profile session")) == [f"profile step {replica + 1}"]
    calls = names(seen.named(agent, "engine calls"))
    assert [call for call in calls if call.startswith("load")] == ["load v1", "load v2"]
    assert {"pause", "resume", "sleep", "wake", "start_profile", "stop_profile"} <= set(calls)
    (asleep,) = seen.named(agent, "memory")
    assert any(
        paused["ts"] <= asleep["ts"] and asleep["ts"] + asleep["dur"] <= paused["ts"] + paused["dur"]
        for paused in seen.named(agent, "generation")
    ), "a sleeping engine is paused"


@pytest.mark.parametrize("replica", [0, 1])
def test_the_weight_version_of_each_replica_is_a_counter(seen: Seen, replica: int) -> None:
    counters = [row for row in seen.counters if row["process"].startswith(f"agent {replica}.0")]
    assert [row["value"] for row in counters] == [0, 1, 2]
    assert {row["name"] for row in counters} == {f"replica {replica} weight version value"}


def test_an_arrow_leads_from_each_command_to_each_decision(seen: Seen) -> None:
    issued = [row["name"] for row in seen.slices if row["name"].startswith("issue ")]
    issued.remove("issue (seq 1)")  # the start of the epoch, before any agent
    decided = [row for row in seen.slices if row["process"].startswith("agent") and row["thread"] == "commands"]
    assert len(seen.arrows) == len(decided) == 2 * len(issued)
    assert sorted(row["issued"] for row in seen.arrows) == sorted(2 * issued)
    for arrow in seen.arrows:
        assert arrow["from_process"].startswith("bus"), arrow
        assert arrow["to_process"].startswith("agent"), arrow
        assert f" {arrow['issued'].removeprefix('issue ')}: " in arrow["decided"], arrow
        assert arrow["late"] >= 0, arrow


@pytest.mark.parametrize("replica", [0, 1])
def test_torch_slices_lie_within_their_session(seen: Seen, replica: int) -> None:
    torch = [
        row
        for row in seen.slices
        if row["process"] == f"replica {replica} rank {replica}" and row["category"] != "Trace"
    ]
    (session,) = seen.named(f"agent {replica}.0", "profile session")
    (clock,) = [clock for clock in seen.written.clocks if clock.agent == f"{replica}.0"]
    assert clock.error_ns is not None
    slack = clock.error_ns + 1_000_000  # an agent's moments are whole milliseconds
    assert len(torch) > 1_000
    assert {row["category"] for row in torch} == {"cpu_op", "user_annotation"}
    assert session["ts"] - slack <= min(row["ts"] for row in torch)
    assert max(row["ts"] + row["dur"] for row in torch) <= session["ts"] + session["dur"] + slack
