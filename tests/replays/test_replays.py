"""Recorded runs: they replay, what must hold in every run held in them, and each tells its story."""

from pathlib import Path

import pytest

from controlplane.analysis.invariants import verify
from controlplane.cli.replay_log import new_replayer, replay_log
from controlplane.machine import coordinator
from controlplane.record.log import RunLog
from controlplane.replay.recorded_run import RecordedRun
from schemas.commands import ProfileCommand
from schemas.events import Perform
from schemas.outcomes import Acted, Failed, Missing, Reason, Skipped
from workers.machine import decide

HERE = Path(__file__).parent
LOGS = sorted(HERE.glob("*.db"))


def run(name: str) -> RecordedRun:
    return RecordedRun(HERE / f"{name}.db")


def test_there_are_those_that_can_be_made_anew() -> None:
    assert [path.stem for path in LOGS] == [
        *("all-must", "died", "killed", "one-must", "stood-still", "torn-fleet", "trained"),
    ]


def test_they_were_recorded_by_this_decision_logic_of_which_both_machines_have_the_same() -> None:
    headers = {RunLog.header(path).logic for path in LOGS}
    assert headers == {coordinator.LOGIC} == {decide.LOGIC}


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_every_decision_comes_out_the_same(path: Path) -> None:
    entries = RecordedRun(path).entries
    replayed = replay_log(entries)
    assert replayed.compared == replayed.records == len(entries)
    assert replay_log(entries) == replayed


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_no_invariant_is_violated(path: Path) -> None:
    assert [str(entry) for entry in verify(RecordedRun(path).entries)] == []


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_every_position_has_one_state_hash(path: Path) -> None:
    first, second = new_replayer(), new_replayer()
    for entry in RecordedRun(path).entries[:60]:
        first.feed(entry)
        second.feed(entry)
        assert first.state_hash() == second.state_hash()


def test_a_training_run_syncs_each_step_and_profiles_two(run_of_training: RecordedRun) -> None:
    assert [(sync.version, sync.status, sync.loaded) for sync in run_of_training.syncs] == [
        (version, "committed", (0, 1)) for version in range(1, 8)
    ]
    profiled = {command.step for command in run_of_training.commands.values() if isinstance(command, ProfileCommand)}
    assert len(profiled) == 2
    assert not any(report.failed or report.missing for report in run_of_training.reports.values())
    for agent in ("0.1", "1.1"):  # no tokenizer there: their engines are never called, except to collect traces
        outcomes = set(run_of_training.answers(agent).values())
        assert outcomes == {Skipped(Reason.NOT_PRIMARY), Acted(calls=("collect_traces",))}


def test_both_replicas_traced_both_profiled_steps(run_of_training: RecordedRun) -> None:
    traced = [
        trace.path.rpartition("/")[0]
        for agent in ("0.0", "1.0")
        for outcome in run_of_training.answers(agent).values()
        if isinstance(outcome, Acted)
        for trace in outcome.traces
    ]
    assert len(traced) == len(set(traced)) == 4


def test_a_killed_agent_is_missing_and_comes_back_to_the_newest_weights() -> None:
    killed = run("killed")
    missing = [
        (report.seq, outcome.agent)
        for report in killed.reports.values()
        for outcome in report.outcomes
        if isinstance(outcome.conclusion, Missing)
    ]
    assert {agent for _, agent in missing} == {"1.0"}
    assert [sync.loaded for sync in killed.syncs if sync.loaded != (0, 1)] == [(0,)]
    assert killed.syncs[-1].loaded == (0, 1)
    lives = [event for event, _ in killed.decisions("1.0") if type(event).__name__ == "Started"]
    assert len(lives) == 2


def test_a_torn_fleet_quarantines_one_replica_until_a_sync_heals_it() -> None:
    torn = run("torn-fleet")
    assert [(sync.version, sync.status, sync.loaded, sync.quarantined) for sync in torn.syncs] == [
        (1, "committed", (0, 1), ()),
        (2, "committed", (0,), (1,)),
        (3, "committed", (0, 1), ()),
    ]
    failures = [answer for answer in torn.answers("1.0").values() if isinstance(answer, Failed)]
    assert len(failures) == 1 and "cut off" in failures[0].message


def test_a_session_is_stopped_once_for_each_start(run_of_training: RecordedRun) -> None:
    calls = [
        str(effect.call.__struct_config__.tag)
        for _, effects in run_of_training.decisions("0.0")
        for effect in effects
        if isinstance(effect, Perform) and "profile" in str(effect.call.__struct_config__.tag)
    ]
    assert calls == ["check_profile", *2 * ["start_profile", "stop_profile"]]


@pytest.fixture(scope="module")
def run_of_training() -> RecordedRun:
    return run("trained")
