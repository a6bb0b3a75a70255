"""The page about a run: what it collects from recorded and made-up runs, and the file that the command writes."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from controlplane.report import collect as collecting
from controlplane.report.collect import MAX_STEP_COMMANDS, collect
from controlplane.report.fleet_history import MAX_SPANS, FleetHistory, ReplicaHistory
from controlplane.report.model import Latencies, Refusal, RunReport
from controlplane.report.page import write_page
from schemas.agent_status import AgentStatus, Clock
from schemas.commands import EngineCommand, ProfileCommand, Target
from schemas.errors import LogCorrupt
from schemas.events import Observation
from schemas.outcomes import Acted, ErrorKind, Failed, Reason, Skipped, Trace
from schemas.wire import encode
from tests.running import typed
from tests.unit.fleets import DONE, Coordinator

REPLAYS = Path(__file__).parents[1] / "replays"
PAUSE, RESUME = EngineCommand(operation="pause"), EngineCommand(operation="resume")
HOSTILE = """</pre><script>document.title = "owned"</script><img src=x onerror='alert(1)' title="a" b=`c`>&amp;"""


class Recorded(Coordinator):
    """A coordinator whose decisions are kept as a log, a second for each."""

    def __init__(self, *agents: str) -> None:
        self.entries: list[LogEntry] = []
        super().__init__(*agents)

    def feed(self, event: object) -> tuple[object, ...]:  # type: ignore[override]
        effects = super().feed(event)  # type: ignore[arg-type]
        position = len(self.entries) + 1
        self.entries.append(
            LogEntry(
                position=position,
                at_ns=1_700_000_000_000_000_000 + position * 1_000_000_000,
                agent="",
                kind=str(event.__struct_config__.tag),  # type: ignore[attr-defined]
                journal="",
                number=0,
                event=encode(event),
                effects=encode(effects),
            )
        )
        return effects

    def report(self) -> RunReport:
        return collect(self.entries)

    def page(self) -> str:
        return html(self.report())


def html(report: RunReport) -> str:
    page = StringIO()
    write_page(page, report, report.run, "run.db")
    return page.getvalue()


def recorded(name: str) -> RunReport:
    return collect(RunLog.read(REPLAYS / f"{name}.db"))


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return typed("report", *args)


# --- recorded runs ----------------------------------------------------------------------------------------------------


def test_a_refused_checkpoint_is_reported_with_its_message() -> None:
    report = recorded("torn-fleet")
    (cause,) = report.causes
    assert (cause.text, cause.agents, cause.kind) == ("weights prepare v2", "1.0", "failed")
    assert cause.message.startswith("checkpoint refused")
    (out,) = report.quarantines
    assert (cause.quarantines, report.unexplained) == ([out], [])
    assert (out.replica, out.version, out.reason_ended) == (1, 2, "the sync to v3 included it")
    assert report.tone == "warn"


def test_a_killed_agent_is_lost_and_its_replica_out_of_service_until_it_is_back() -> None:
    report = recorded("killed")
    (cause,) = report.causes
    assert (cause.kind, cause.away, cause.outcomes) == ("lost", [], report.counts["missing"])
    assert [agent.agent for agent in report.lost] == [cause.agents]
    assert (report.stragglers[0].agent, report.stragglers[0].missing) == (cause.agents, cause.outcomes)
    (out,) = report.quarantines
    assert out.reason_ended == "its agent restarted" and f"{out.replica}.0" == cause.agents
    assert (cause.quarantines, report.unexplained) == ([out], [])
    assert report.replicas[out.replica].totals_ns["gone"] > 0 and report.replicas[out.replica].totals_ns["out"] > 0


def test_a_good_run_shows_its_traces_and_training_ranks() -> None:
    report = recorded("trained")
    assert (report.tone, report.verdict, report.violations) == ("ok", "nothing failed", [])
    traced = [command for step in report.steps for command in step.commands if command.traces]
    assert any(trace.rank == 0 for command in traced for trace in command.traces)
    assert sorted(report.replicas) == [0, 1]  # a rank has no weights
    (rank,) = [agent for agent in report.agents if agent.member.hello.identity.role == "actor"]
    assert "v0" not in rank.condition and "generating" not in rank.condition
    for replica in report.replicas.values():
        assert (replica.latest, replica.bad) == (report.version, False) and replica.totals_ns["paused"] > 0
    body = html(report).partition("<body>")[2]
    assert not re.search(r'class="[^"]*(?:bad|warn|behind|out|gone)\b', body.replace('id="out"', "")), "nothing is red"


@pytest.mark.parametrize("name", ["killed", "torn-fleet", "trained"])
def test_a_page_needs_no_other_file(name: str) -> None:
    page = html(recorded(name))
    assert not re.search(r"(?:src|href)=[\"'](?!#)|@import|url\((?!#)", page)
    assert "default-src 'none'" in page
    assert page.index("h-failures") < page.index("h-fleet") < page.index("h-commands")


# --- made-up runs -----------------------------------------------------------------------------------------------------


def test_text_from_a_log_stays_text() -> None:
    bus = Recorded("0.0")
    bus.status("0.0", AgentStatus(ready=True, tokenizer="present", engine=HOSTILE, generating=True))
    bus.issue(PAUSE)
    bus.answer(a0_0=Failed(ErrorKind.ENGINE_ERROR, HOSTILE))
    bus.issue(ProfileCommand(action="stop", step=1))
    trace = Trace(path='"><script>1</script>', nbytes=1, sha256="0" * 64)
    bus.answer(a0_0=Acted(calls=("stop_profile",), traces=(trace,)))
    page = bus.page()
    assert page.count("<script>") == 1 and "<img" not in page
    assert page.count("&lt;script&gt;document.title = &#34;owned&#34;") == 2  # the engine, and the failure
    assert "&#34;&gt;&lt;script&gt;1" in page


def test_replicas_and_agents_missing_at_the_end_come_first() -> None:
    bus = Recorded("0.0", "1.0", "2.0")
    bus.sync()
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=Failed(ErrorKind.ENGINE_ERROR, "It burns."))
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE)
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE)
    bus.lose("1.0")
    report = bus.report()
    assert report.tone == "bad"
    assert [out.replica for out in report.out_now] == [2] and [agent.agent for agent in report.gone_now] == ["1.0"]
    page = bus.page()
    assert "Replica 2 has been <b>out of service</b>" in page and page.index("Replica 2 has") < page.index("h-failures")


def test_a_rank_without_a_trace_and_a_running_hook_are_named() -> None:
    bus = Recorded("actor.3")
    bus.issue(ProfileCommand(action="finish", step=4, profiled_steps=(4,)))
    bus.answer(actor_3=Acted(calls=("finish_profile",), ranks_without_trace=(3,), still_running=True))
    report = bus.report()
    assert (report.tone, report.verdict) == ("warn", "1 without a trace")
    page = bus.page()
    assert "no trace of rank 3" in page and "hook still running: actor.3" in page and "training rank" in page


def test_profiled_steps_separate_the_commands_of_a_fleet_without_syncs() -> None:
    bus = Recorded("actor.0")
    for step in (3, 7):
        for action in ("start", "stop"):
            bus.issue(ProfileCommand(action=action, step=step))
            bus.answer(actor_0=DONE)
    assert [step.profiled for step in bus.report().steps] == [[3], [7]]


def test_a_command_without_a_report_is_named() -> None:
    bus = Recorded("0.0")
    bus.issue(PAUSE)
    report = bus.report()
    assert [command.text for command in report.unconcluded] == ["pause"] and report.steps[-1].bad
    bus.answer(a0_0=DONE)
    assert not bus.report().steps[-1].bad


def test_commands_left_open_by_a_trainer_are_no_agents_fault() -> None:
    bus = Recorded("0.0", "1.0")
    bus.issue(PAUSE, timeout_ms=600_000)
    bus.answer(a0_0=DONE)
    bus.open()
    report = bus.report()
    (left,) = [command for command in report.steps[0].commands if command.text == "pause"]
    assert (left.concluded, left.duration_us) == (True, 2_000_000)  # not its timeout of ten minutes
    assert [(cause.kind, cause.reason) for cause in report.causes] == [("missing", "bus_restarted")]
    assert report.stragglers == []


UP = AgentStatus(ready=True, tokenizer="present", engine="tiny", generating=True)


# --- one cause, one line ----------------------------------------------------------------------------------------------


def test_a_killed_agent_with_many_open_commands_is_one_line_that_begins_with_its_death() -> None:
    bus = Recorded("0.0", "1.0")
    for _ in range(129):
        bus.issue(PAUSE)
        bus.answer(a0_0=DONE)
    bus.lose("1.0")
    lost_ns = bus.entries[-1].at_ns
    for _ in range(3):  # it is absent from these
        bus.issue(PAUSE)
        bus.answer(a0_0=DONE)
    report = bus.report()
    (cause,) = report.causes
    assert (cause.kind, cause.reason, cause.agents, cause.at_ns) == ("lost", "silent", "1.0", lost_ns)
    assert (cause.outcomes, cause.commands, cause.away) == (132, {"pause": 132}, ["1.0"])
    assert report.verdict == "1 gone, 132 not answered by lost agents"
    page = bus.page()
    moment = page.index("was lost", page.index('class="verdict'))
    assert page.count('class="card bad"') == 1 and page[:moment].count("<li>") == 1
    assert "132 commands, seq 2 to 133: 132 × pause" in page and "It did not come back" in page
    bus.hello("1.0", "b")
    bus.join("1.0", "b")
    assert "It came back" in bus.page() and "did not come back" not in bus.page()
    bus.issue(PAUSE)
    bus.answer(a0_0=DONE)
    assert bus.report().causes[0].outcomes == 132, "it is back: what follows is not of its death"


def test_agents_that_die_together_are_one_line() -> None:
    agents = [f"{replica}.0" for replica in range(8)]
    bus = Recorded(*agents, "8.0")
    bus.issue(PAUSE)
    for agent in agents:
        bus.lose(agent)
    bus.answer(a8_0=DONE)
    (cause,) = bus.report().causes
    assert (cause.agents, cause.count, cause.outcomes, cause.commands) == ("0.0 … 7.0", 8, 8, {"pause": 1})
    assert "<b>0.0 … 7.0 were lost</b>" in bus.page()


def test_agents_that_die_at_different_times_are_two_lines() -> None:
    bus = Recorded("0.0", "1.0")
    bus.lose("0.0")
    for _ in range(6):
        bus.status("1.0", UP)
    bus.lose("1.0")
    assert [cause.agents for cause in bus.report().causes] == ["0.0", "1.0"]


def test_the_same_failure_of_many_agents_and_commands_is_one_line() -> None:
    bus = Recorded("0.0", "1.0")
    for version in range(20):
        bus.issue(PAUSE)
        first, second = (f"127.0.0.1:{port} refused v{version}" for port in (8000, 8001))
        bus.answer(a0_0=Failed(ErrorKind.ENGINE_ERROR, first), a1_0=Failed(ErrorKind.ENGINE_ERROR, second))
    bus.issue(PAUSE)
    bus.answer(a0_0=Failed(ErrorKind.ENGINE_ERROR, "It burns."), a1_0=DONE)
    many, other = bus.report().causes
    assert (many.agents, many.outcomes, many.commands) == ("0.0, 1.0", 40, {"pause": 20})
    assert (many.message, other.message) == ("127.0.0.1:8000 refused v0", "It burns.")
    assert "2 agents): failed, engine_error" in bus.page()


@pytest.mark.parametrize("heard", [False, True])
def test_deadlines_that_an_agent_missed_before_it_was_lost_belong_to_its_death_unless_it_was_heard_since(
    heard: bool,
) -> None:
    bus = Recorded("0.0", "1.0")
    bus.status("1.0", UP)
    bus.issue(PAUSE, timeout_ms=1000)
    bus.answer(a0_0=DONE)
    bus.time(2_000_000)
    if heard:
        bus.status("1.0", UP)
    bus.lose("1.0")
    causes = [(cause.kind, cause.reason, cause.agents, cause.outcomes) for cause in bus.report().causes]
    if heard:
        assert causes == [("missing", "deadline", "1.0", 1), ("lost", "silent", "1.0", 0)]
    else:
        assert causes == [("lost", "silent", "1.0", 1)]


def test_agents_that_miss_the_same_deadlines_are_one_line() -> None:
    bus = Recorded("0.0", "1.0", "2.0")
    for round_ in range(3):
        bus.issue(PAUSE, timeout_ms=1000, at_us=round_ * 3_000_000)
        bus.answer(a0_0=DONE, at_us=round_ * 3_000_000)
        bus.time(round_ * 3_000_000 + 2_000_000)
        for agent in ("0.0", "1.0", "2.0"):
            bus.status(agent, UP, at_us=round_ * 3_000_000 + 2_000_000)
    (cause,) = bus.report().causes
    assert (cause.reason, cause.agents, cause.outcomes, cause.commands) == ("deadline", "1.0, 2.0", 6, {"pause": 3})


# --- replicas out of service ------------------------------------------------------------------------------------------


def sync_on_replica_0(bus: Recorded, version: int) -> None:
    bus.sync(version, quorum=1)
    for _ in range(3):
        bus.answer(a0_0=DONE)


def test_a_replica_whose_server_was_killed_is_out_of_service_until_it_serves_again() -> None:
    bus = Recorded("0.0", "1.0")
    for agent in ("0.0", "1.0"):
        bus.status(agent, UP)
    bus.status("1.0", replace(UP, ready=False, tokenizer="unknown", generating=False))
    for version in (1, 2, 3):
        sync_on_replica_0(bus, version)
    (out,) = bus.report().out_now
    assert (out.replica, out.version, bus.report().tone) == (1, 1, "bad")
    bus.status("1.0", replace(UP, version=3))
    report = bus.report()
    (out,) = report.quarantines
    assert (out.reason_ended, report.out_now) == ("it served v3", [])
    assert report.tone == "warn" and report.verdict != "nothing failed"
    assert report.replicas[1].totals_ns["out"] == 13_000_000_000, "from its first heartbeat without a server on"
    assert "Replica 1 was out of service for" in bus.page()


def test_an_aborted_sync_is_a_failure_and_those_for_the_same_reason_are_one_line() -> None:
    bus = Recorded("0.0", "1.0")
    for verdict in ("1 weight sync aborted", "2 weight syncs aborted", "3 weight syncs aborted"):
        bus.sync(None, path="a")
        for _ in range(2):
            bus.answer(a0_0=Skipped(Reason.EXPIRED), a1_0=Skipped(Reason.EXPIRED))
        assert bus.report().verdict == verdict
    report = bus.report()
    assert report.tone == "warn"
    (aborted,) = report.aborted
    assert aborted.count == 3 and "0 of 2 replicas prepared, and 2 must: not replicas 0, 1" in aborted.reason
    assert "Aborted weight syncs" in bus.page() and "Nothing failed" not in bus.page()


@pytest.mark.parametrize("operator", [True, False])
def test_a_replica_that_an_operator_left_paused_is_named(operator: bool) -> None:
    bus = Recorded("0.0", "1.0")
    bus.issue(PAUSE, target=Target(replicas=frozenset({1})), operator=operator)
    bus.answer(a0_0=Skipped(Reason.NOT_TARGETED), a1_0=DONE)
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=DONE)
    report = bus.report()
    assert [stop.replicas for stop in report.stopped] == [(1,)]
    assert report.verdict == ("1 stopped by an operator" if operator else "nothing failed")
    named = "Replica 1 paused by an operator since 00:00:00.000 UTC, and still at the end of this log"
    assert (named in bus.page()) is operator
    bus.issue(RESUME)
    assert bus.report().stopped == ()


def test_a_replica_that_was_absent_from_a_sync_is_out_of_service() -> None:
    bus = Recorded("0.0", "1.0")
    bus.lose("1.0", "left")
    sync_on_replica_0(bus, 1)
    (out,) = bus.report().out_now
    assert out.replica == 1 and bus.report().counts["missing"] == 3


def test_an_agent_that_begins_a_new_journal_because_the_run_is_another_has_lived_once() -> None:
    bus = Recorded()
    bus.hello("0.0", "a")
    bus.lose("0.0", "left")
    bus.arrive("0.0", "b")
    assert bus.report().agents[0].lives == 1


def test_an_agent_that_was_ended_and_started_again_has_lived_twice() -> None:
    bus = Recorded("0.0")
    bus.lose("0.0", "left")
    bus.arrive("0.0", "b")
    assert bus.report().agents[0].lives == 2


def test_a_replica_that_could_not_load_what_is_committed_is_out_of_service() -> None:
    bus = Recorded("0.0")
    bus.status("0.0", UP)
    bus.status("0.0", replace(UP, ready=False, generating=False, quarantined=1))
    bus.status("0.0", UP)
    assert bus.report().replicas[0].totals_ns["out"] == 1_000_000_000


def test_an_engine_restart_is_a_change_from_one_instance_that_was_up_to_another() -> None:
    bus = Recorded("0.0")
    fleet = FleetHistory()
    for event in bus.history[:2]:
        fleet.follow(event, 1)

    def see(*seen: tuple[str | None, Any]) -> int:
        for instance, tokenizer in seen:
            fleet.observed("0.0", Observation(engine="sglang", instance=instance, tokenizer=tokenizer))
        (agent,) = fleet.agents()
        return agent.launches

    assert see(("a.1.0", "unknown"), ("a.1.77", "unknown"), ("a.1.77.x", "present"), (None, "present")) == 0
    assert see(("a.1.0", "unknown"), ("a.2.0", "unknown"), ("a.2.99", "unknown"), ("a.2.99.y", "present")) == 1
    assert see(("b.1.0", "unknown"), ("b.1.5.z", "present")) == 2, "an agent that starts again launches it again"


def test_a_clock_that_was_measured_while_its_process_stood_still_replaces_no_better_one() -> None:
    bus = Recorded("0.0")
    for at_ms, error_ns, best_ms in ((1_000, 500, 1_000), (3_000, 10**9, 1_000), (4_000, 45_000, 4_000), (9, 10**9, 9)):
        clock = Clock(at_ms=at_ms, wall_ns=0, offset_ns=0, error_ns=error_ns)
        bus.status("0.0", AgentStatus(ready=True, tokenizer="present", engine="tiny", clock=clock))
        fleet = FleetHistory()
        for event in bus.history:
            fleet.follow(event, 1)
        assert fleet.clocks["0.0"].at_ms == best_ms  # the last is of a host that was started again


def test_an_agent_that_is_not_ready_at_the_end_is_a_warning() -> None:
    bus = Recorded("0.0", "1.0")
    for agent, ready, trouble in (("0.0", True, ""), ("1.0", False, "a resume failed")):
        status = AgentStatus(ready=ready, tokenizer="present", engine="tiny", generating=ready, trouble=trouble)
        bus.status(agent, status)
    report = bus.report()
    assert (report.tone, report.verdict) == ("warn", "1 not ready")
    page = bus.page()
    assert "Agent 1.0 on node-1 is <b>not ready</b>: not ready, v0, paused, a resume failed." in page
    assert "Nothing failed." not in page and "was resolved" not in page and "No outcome failed" not in page
    bus.lose("1.0", "left")
    assert bus.report().tone == "ok"


def test_truncated_lists_say_so() -> None:
    bus = Recorded("0.0")
    for _ in range(60):
        bus.issue(PAUSE)
    for _ in range(500):
        bus.sync()  # all but the first are refused: only one sync runs at a time
    report = bus.report()
    (refused,) = report.refused
    assert (len(report.unconcluded), refused.count, report.verdict) == (
        61,
        499,
        "61 not concluded, 499 refused by the bus",
    )
    page = bus.page()
    assert "And 11 more.</p>" in page and "(499 times, until " in page


def test_more_reasons_to_refuse_than_the_page_lists_are_counted() -> None:
    refused = [Refusal(reason="x" * number, at_ns=number, until_ns=number, count=1) for number in range(57)]
    assert "And 7 more: <code>rolloutctl log show run.db</code>" in html(RunReport(refused=refused))


def test_an_empty_log_has_a_page_without_a_time() -> None:
    page = html(collect([]))
    assert "1970" not in page and "00:00" not in page and "This log has no records of the bus." in page


def test_a_violated_invariant_has_its_own_card() -> None:
    bus = Recorded("0.0")
    bus.issue(PAUSE)
    del bus.entries[-1]
    bus.issue(PAUSE)
    report = bus.report()
    assert report.tone == "bad" and report.violations[0].invariant == "I4"
    assert "Violated invariants" in bus.page()


def test_old_commands_are_dropped_and_what_failed_in_them_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "MAX_COMMANDS", 100)
    bus = Recorded("0.0")
    bus.issue(PAUSE)
    bus.answer(a0_0=Failed(ErrorKind.ENGINE_ERROR, "It burns."))
    for _ in range(600):
        bus.issue(PAUSE)
        bus.answer(a0_0=DONE)
    found = collect(bus.entries)
    kept = sum(len(step.commands) for step in found.steps)
    assert kept <= 100 + MAX_STEP_COMMANDS < found.commands
    assert kept + found.dropped == found.commands
    assert found.causes[0].message == "It burns."


def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed() -> None:
    latencies = Latencies()
    latencies.values.extend(range(10_000, 0, -1))
    assert [latencies.percentile(percent) for percent in (50, 95, 100)] == [5_000, 9_500, 10_000]


def test_a_long_run_keeps_the_first_problems_of_a_replica_and_their_total() -> None:
    replica = ReplicaHistory()
    for minute in range(10_000):
        replica.set("paused", minute % 2 == 0, minute)
        replica.set("gone", minute % 2 == 1, minute)
    assert len(replica.spans) == MAX_SPANS and replica.spans[0] == ("gone", 1, 2)
    assert replica.totals_ns == {"paused": 5_000, "gone": 4_999}


def test_a_log_with_two_damages_is_shown_as_far_as_possible() -> None:
    bus = Recorded("0.0")
    bus.issue(PAUSE)
    bus.issue(PAUSE)

    def read() -> Iterator[LogEntry]:
        for entry in bus.entries:
            if entry.kind == "join":  # of another version
                entry = replace(entry, event=encode({"type": "joined otherwise"}))
            yield entry
        raise LogCorrupt("record 99 is missing", 99)

    report = collect(read())
    assert report.damage.startswith("record 3: the event of the coordinator can't be read")
    assert report.commands == bus.report().commands > 0
    assert "record 3: the event" in html(report)


# --- the command ------------------------------------------------------------------------------------------------------


def test_an_existing_page_is_replaced_only_by_force(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    refused = command(REPLAYS / "torn-fleet.db", "-o", page)
    assert refused.returncode == 2 and "--force" in refused.stderr and page.read_text() == "mine"
    made = command(REPLAYS / "torn-fleet.db", "-o", page, "--force")
    assert made.returncode == 0 and page.read_text().startswith("<!doctype html>")
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_a_truncated_log_is_shown_as_far_as_possible(tmp_path: Path) -> None:
    log = Path(shutil.copy(REPLAYS / "torn-fleet.db", tmp_path / "run.db"))
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    made = command(log)
    assert "Traceback" not in made.stderr and made.returncode in (1, 3)
    page = tmp_path / "run.html"
    assert page.exists() == (made.returncode == 1)
    assert made.returncode == 3 or "damaged" in page.read_text()


def test_a_file_that_is_no_log_leaves_no_page(tmp_path: Path) -> None:
    other = tmp_path / "notes.db"
    other.write_text("not a log")
    refused = command(other)
    assert refused.returncode == 3 and "Traceback" not in refused.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["notes.db"]
