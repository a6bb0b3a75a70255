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
FAULTS = "select name, value from stats where value > 0 and severity != 'info'"


class Seen:
    """What Perfetto shows of a run."""

    def __init__(self, folder: Path) -> None:
        log, out = record(folder), folder / "run.perfetto.json.gz"
        self.written: Timeline = write_timeline(log, out, [folder / "traces"])
        self.slices, self.counters, self.arrows, self.faults = ask(out, SLICES, COUNTERS, ARROWS, FAULTS)

    def named(self, process: str, thread: str) -> list[Row]:
        """Slices of the thread of a name, of processes whose names begin so; without the marks of issues."""
        mine = [one for one in self.slices if one["process"].startswith(process) and one["thread"] == thread]
        return [one for one in mine if not one["name"].startswith("issue ")]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory.mktemp("run"))


def names(rows: list[Row]) -> list[Any]:
    return [one["name"] for one in rows]


def test_it_loads_without_a_fault(seen: Seen) -> None:
    assert seen.faults == []
    assert seen.written.warnings == ()


def test_weight_syncs_are_spans_with_their_phases_inside(seen: Seen) -> None:
    drawn = seen.named("bus", "weight syncs")
    assert [one["name"].partition(" (")[0] for one in drawn] == [
        *("sync to v1: committed", "weights prepare v1", "weights load v1", "weights commit v1"),
        *("sync to v2: committed", "weights prepare v2", "weights load v2", "weights commit v2"),
    ]
    assert [one["depth"] for one in drawn] == [0, 1, 1, 1] * 2
    assert {one["category"] for one in drawn} == {"rolloutctl"}


@pytest.mark.parametrize("replica", [0, 1])
def test_pauses_sleeps_sessions_and_calls_are_spans_of_each_agent(seen: Seen, replica: int) -> None:
    agent = f"agent {replica}.0"
    assert set(names(seen.named(agent, "generation"))) == {"paused"}
    assert names(seen.named(agent, "memory")) == ["asleep: kv_cache weights"]
    assert names(seen.named(agent, "profile session")) == [f"profile step {replica + 1}"]
    calls = names(seen.named(agent, "engine calls"))
    assert [one for one in calls if one.startswith("load")] == ["load v1", "load v2"]
    assert {"pause", "resume", "sleep", "wake", "start_profile", "stop_profile"} <= set(calls)
    (asleep,) = seen.named(agent, "memory")
    assert any(
        one["ts"] <= asleep["ts"] and asleep["ts"] + asleep["dur"] <= one["ts"] + one["dur"]
        for one in seen.named(agent, "generation")
    ), "a sleeping engine is paused"


@pytest.mark.parametrize("replica", [0, 1])
def test_the_weight_version_of_each_replica_is_a_counter(seen: Seen, replica: int) -> None:
    mine = [one for one in seen.counters if one["process"].startswith(f"agent {replica}.0")]
    assert [one["value"] for one in mine] == [0, 1, 2]
    assert {one["name"] for one in mine} == {f"replica {replica} weight version value"}


def test_an_arrow_leads_from_each_command_to_each_decision(seen: Seen) -> None:
    issued = [one["name"] for one in seen.slices if one["name"].startswith("issue ")]
    issued.remove("issue (seq 1)")  # the start of the epoch: nobody was there
    decided = [one for one in seen.slices if one["process"].startswith("agent") and one["thread"] == "commands"]
    assert len(seen.arrows) == len(decided) == 2 * len(issued)
    assert sorted(one["issued"] for one in seen.arrows) == sorted(2 * issued)
    for arrow in seen.arrows:
        assert arrow["from_process"].startswith("bus"), arrow
        assert arrow["to_process"].startswith("agent"), arrow
        assert f" {arrow['issued'].removeprefix('issue ')}: " in arrow["decided"], arrow
        assert arrow["late"] >= 0, arrow


@pytest.mark.parametrize("replica", [0, 1])
def test_what_torch_recorded_lies_in_its_session(seen: Seen, replica: int) -> None:
    torch = [
        one
        for one in seen.slices
        if one["process"].startswith(f"replica {replica} rank {replica}, step {replica + 1}: ")
        and one["category"] != "Trace"
    ]
    (session,) = seen.named(f"agent {replica}.0", "profile session")
    (clock,) = [one for one in seen.written.clocks if one.agent == f"{replica}.0"]
    assert clock.error_ns is not None
    slack = clock.error_ns + 1_000_000  # an agent's moments are whole milliseconds
    assert len(torch) > 1_000
    assert {one["category"] for one in torch} == {"cpu_op", "user_annotation"}
    assert session["ts"] - slack <= min(one["ts"] for one in torch)
    assert max(one["ts"] + one["dur"] for one in torch) <= session["ts"] + session["dur"] + slack
