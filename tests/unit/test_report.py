"""The page about a run: its facts from recorded and made-up runs, and the file that the command writes."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from msgspec import Raw
from msgspec.structs import replace

from controlplane.record.entries import LogEntry
from controlplane.record.log import RunLog
from controlplane.report.collect import KEPT_COMMANDS, STEP_COMMANDS, RunReport, gather
from controlplane.report.fleet_history import place
from controlplane.report.histogram import COLUMNS, Lanes, Spread
from controlplane.report.page import write_page
from schemas.commands import EngineCommand, ProfileCommand
from schemas.errors import LogCorrupt
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Trace
from schemas.reports import AgentStatus
from schemas.wire import encode
from tests.running import rolloutctl
from tests.unit.fleets import DONE, Coordinator

REPLAYS = Path(__file__).parents[1] / "replays"
PAUSE = EngineCommand(operation="pause")
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
                event=Raw(encode(event)),
                effects=Raw(encode(effects)),
            )
        )
        return effects

    def report(self) -> RunReport:
        return gather(self.entries)

    def page(self) -> str:
        return html(self.report())


def html(report: RunReport) -> str:
    page = StringIO()
    write_page(page, report, report.run, "run.db")
    return page.getvalue()


def recorded(name: str) -> RunReport:
    return gather(RunLog.read(REPLAYS / f"{name}.db"))


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return rolloutctl("report", *words)


# --- recorded runs ----------------------------------------------------------------------------------------------------


def test_a_refused_checkpoint_is_told_with_what_was_said_and_what_the_engine_held() -> None:
    report = recorded("torn-fleet")
    (trouble,) = report.troubles
    assert (trouble.words, trouble.agents, trouble.what) == ("weights prepare v2", "1.0", "failed")
    assert trouble.message.startswith("checkpoint refused") and trouble.held[0][1].startswith("then held v1")
    (out,) = report.quarantines
    assert (out.replica, out.version, out.ended) == (1, 2, "the sync to v3 took it in")
    assert report.tone == "warn"


def test_a_killed_agent_is_missing_and_lost_and_its_replica_out_of_service_until_it_comes_back() -> None:
    report = recorded("killed")
    (trouble,) = report.troubles
    assert (trouble.what, trouble.reason) == ("missing", "gone") and trouble.held[0][1].startswith("was last heard")
    assert [one.agent for one in report.lost] == [trouble.agents]
    (out,) = report.quarantines
    assert out.ended == "its agent started anew" and f"{out.replica}.0" == trouble.agents


def test_a_good_run_says_so_and_shows_its_traces_and_training_ranks() -> None:
    report = recorded("trained")
    assert (report.tone, report.verdict, report.violations) == ("ok", "nothing failed", [])
    traced = [one for step in report.steps for one in step.commands if one.traces]
    assert any(trace.rank == 0 for one in traced for trace in one.traces)
    assert sorted(report.time.replicas) == [0, 1]  # a rank has no weights to draw
    (rank,) = [one for one in report.agents if one.identity.role == "actor"]
    assert "v0" not in rank.state and "generating" not in rank.state
    assert all(painted.latest == report.version for painted in report.time.replicas.values())


@pytest.mark.parametrize("name", ["killed", "torn-fleet", "trained"])
def test_a_page_needs_nothing_else(name: str) -> None:
    page = html(recorded(name))
    assert not re.search(r"(?:src|href)=[\"'](?!#)|@import|url\((?!#)", page)
    assert "default-src 'none'" in page
    assert page.index("h-failures") < page.index("h-fleet") < page.index("h-commands")


# --- made-up runs -----------------------------------------------------------------------------------------------------


def test_everything_that_comes_from_a_log_stays_text() -> None:
    bus = Recorded("0.0")
    bus.say("0.0", AgentStatus(ready=True, tokenizer="present", engine=HOSTILE, generating=True))
    bus.issue(PAUSE)
    bus.answer(a0_0=Failed(ErrorKind.ENGINE_ERROR, HOSTILE))
    bus.issue(ProfileCommand(action="stop", step=1))
    trace = Trace(path='"><script>1</script>', nbytes=1, sha256="0" * 64)
    bus.answer(a0_0=Acted(calls=("stop_profile",), traces=(trace,)))
    page = bus.page()
    assert page.count("<script>") == 1 and "<img" not in page
    assert page.count("&lt;script&gt;document.title = &#34;owned&#34;") == 2  # the engine, and the failure
    assert "&#34;&gt;&lt;script&gt;1" in page


def test_who_is_still_out_or_gone_at_the_end_comes_first() -> None:
    bus = Recorded("0.0", "1.0", "2.0")
    bus.sync()
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=Failed(ErrorKind.ENGINE_ERROR, "It burns."))
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE)
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE)
    bus.lose("1.0")
    report = bus.report()
    assert report.tone == "bad"
    assert [one.replica for one in report.out_now] == [2] and [one.agent for one in report.gone_now] == ["1.0"]
    page = bus.page()
    assert "Replica 2 is <b>out of service</b>" in page and page.index("Replica 2 is") < page.index("h-failures")


def test_an_untraced_rank_and_a_hook_that_goes_on_are_told() -> None:
    bus = Recorded("actor.3")
    bus.issue(ProfileCommand(action="finish", step=4, profiled_steps=(4,)))
    bus.answer(actor_3=Acted(calls=("finish_profile",), ranks_without_trace=(3,), still_running=True))
    report = bus.report()
    assert (report.tone, report.verdict) == ("warn", "1 without a trace")
    page = bus.page()
    assert "no trace of rank 3" in page and "goes on: actor.3" in page and "training rank" in page


def test_profiled_steps_part_the_commands_where_no_weights_are_synced() -> None:
    bus = Recorded("actor.0")
    for step in (3, 7):
        for action in ("start", "stop"):
            bus.issue(ProfileCommand(action=action, step=step))
            bus.answer(actor_0=DONE)
    assert [one.profiled for one in bus.report().steps] == [[3], [7]]


def test_a_command_that_never_ended_is_named() -> None:
    bus = Recorded("0.0")
    bus.issue(PAUSE)
    report = bus.report()
    assert [one.words for one in report.unended] == ["pause"] and report.steps[-1].bad
    bus.answer(a0_0=DONE)
    assert not bus.report().steps[-1].bad


def test_what_a_trainer_left_open_took_until_its_next_life_and_is_no_agents_fault() -> None:
    bus = Recorded("0.0", "1.0")
    bus.issue(PAUSE, timeout_ms=600_000)
    bus.answer(a0_0=DONE)
    bus.open()
    report = bus.report()
    (left,) = [one for one in report.steps[0].commands if one.words == "pause"]
    assert (left.ended, left.duration_us) == (True, 2_000_000)  # and not the ten minutes that it had
    assert [(one.what, one.reason) for one in report.troubles] == [("missing", "bus_restarted")]
    assert report.stragglers == []


def test_an_agent_that_was_not_ready_at_the_end_is_no_good_news() -> None:
    bus = Recorded("0.0", "1.0")
    for agent, ready in (("0.0", True), ("1.0", False)):
        bus.say(agent, AgentStatus(ready=ready, tokenizer="present", engine="tiny", generating=ready))
    report = bus.report()
    assert (report.tone, report.verdict) == ("warn", "1 not ready")
    page = bus.page()
    assert "Agent 1.0 on node-1 was <b>not ready</b>: v0, paused, not ready." in page
    assert "Nothing failed." not in page and "was over" not in page and "No outcome failed" not in page
    bus.lose("1.0", "left")
    assert bus.report().tone == "ok"


def test_lists_that_are_cut_say_so() -> None:
    bus = Recorded("0.0")
    for _ in range(60):
        bus.issue(PAUSE)
    for _ in range(500):
        bus.sync()  # while one is under way there is no other
    report = bus.report()
    refused = len(report.refused) + report.left_out["refused"]
    assert (len(report.unended), refused) == (61, 499)
    page = bus.page()
    assert "And 11 more.</p>" in page and "And 449 more: <code>rolloutctl log show run.db</code>" in page


def test_an_empty_log_has_a_page_without_a_time() -> None:
    page = html(gather([]))
    assert "1970" not in page and "00:00" not in page and "Nothing of the bus is in this log." in page


def test_a_broken_invariant_is_a_card_of_its_own() -> None:
    bus = Recorded("0.0")
    bus.issue(PAUSE)
    del bus.entries[-1]
    bus.issue(PAUSE)
    report = bus.report()
    assert report.tone == "bad" and report.violations[0].invariant == "I4"
    assert "Broken invariants" in bus.page()


def test_what_is_kept_has_an_end_and_old_trouble_is_kept_longer() -> None:
    bus = Recorded("0.0")
    bus.issue(PAUSE)
    bus.answer(a0_0=Failed(ErrorKind.ENGINE_ERROR, "It burns."))
    first = bus.entries[:]
    said: Outcome = DONE
    for _ in range(KEPT_COMMANDS // 20):
        bus.issue(PAUSE)
        bus.answer(a0_0=said)
    repeated = gather(first + [one for _ in range(25) for one in bus.entries[len(first) :]])
    kept = sum(len(step.commands) for step in repeated.steps)
    assert kept <= KEPT_COMMANDS + STEP_COMMANDS
    assert kept + repeated.left_out["commands"] == repeated.commands
    assert repeated.steps[0].bad and repeated.troubles[0].message == "It burns."


def test_a_percentile_is_near_and_the_largest_is_exact() -> None:
    spread = Spread()
    for value in range(1, 10_001):
        spread.add(value)
    assert spread.largest == 10_000
    assert 5_000 <= spread.at(500) <= 5_080 and 9_500 <= spread.at(950) <= 9_660


def test_a_long_run_does_not_need_more_columns() -> None:
    lanes = Lanes()
    for minute in range(10_000):
        lanes.at(1 + minute * 60_000_000_000)
        lanes.set(0, version=minute, paused=minute % 2 == 0)
    (painted,) = lanes.painted().values()
    assert len(painted.versions) <= COLUMNS and painted.latest == 9_999
    half = sum(painted.paused) / (lanes.end_ns - lanes.start_ns)
    assert 0.499 < half < 0.501


def test_agents_stand_in_the_order_of_the_fleet() -> None:
    names = ["critic.0", "10.0", "actor.11", "actor.2", "2.1", "2.0", "strange"]
    assert sorted(names, key=place) == ["2.0", "2.1", "10.0", "actor.2", "actor.11", "critic.0", "strange"]


def test_a_log_with_two_damages_is_shown_as_far_as_it_goes() -> None:
    bus = Recorded("0.0")
    bus.issue(PAUSE)
    bus.issue(PAUSE)

    def read() -> Iterator[LogEntry]:
        for entry in bus.entries:
            if entry.kind == "join":  # of another version
                entry = replace(entry, event=Raw(encode({"type": "joined otherwise"})))
            yield entry
        raise LogCorrupt("record 99 is missing", 99)

    report = gather(read())
    assert report.damage.startswith("record 3: the event of the coordinator can't be read")
    assert report.commands == bus.report().commands > 0
    assert "record 3: the event" in html(report)


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_page_that_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    refused = command(REPLAYS / "torn-fleet.db", "-o", page)
    assert refused.returncode == 2 and "--force" in refused.stderr and page.read_text() == "mine"
    made = command(REPLAYS / "torn-fleet.db", "-o", page, "--force")
    assert made.returncode == 0 and page.read_text().startswith("<!doctype html>")
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


def test_a_log_that_is_cut_off_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
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
    assert [one.name for one in tmp_path.iterdir()] == ["notes.db"]
