"""What the report of a sync names: replicas in quarantine, unproven, and held by hand, however the sync ended."""

import pytest

from controlplane.cli.replay_log import replay_log
from controlplane.machine.replicas import not_ready_reasons, proven_replicas, quarantined_replicas
from controlplane.machine.status import fleet_status
from controlplane.machine.stops import stopped_replicas
from controlplane.record.marks import decode_mark, decode_state, encode_mark
from schemas.agent_status import AgentStatus
from schemas.commands import EngineCommand, Target
from schemas.errors import CommandFailed
from schemas.identity import RolloutMode
from schemas.outcomes import Outcome, Reason, Skipped
from schemas.reports import SyncReport
from tests.unit.fleets import DONE, NO, NOT_PRIMARY, SECOND_US, Coordinator
from tests.unit.test_report import Recorded
from tests.unit.test_weights import ALL, ALREADY, BUT_2, ONLY_0, OTHERS, STALE, fleet, run_phases


def named(bus: Coordinator) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """How the sync ended, and the replicas in quarantine and unproven, by its report."""
    (report,) = bus.synced
    return report.status, report.quarantined, report.unproven


def test_a_replica_in_quarantine_is_named_by_every_report_until_it_is_back() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, BUT_2, ALL)
    assert named(bus) == ("committed", (2,), ())
    bus.sync(2)
    run_phases(bus, ONLY_0, {**ALL, "2": ALREADY})
    assert named(bus) == ("aborted", (2,), ())
    bus.sync(1)
    run_phases(bus, dict.fromkeys("012", STALE))
    assert named(bus) == ("stale", (2,), ())
    ticket = bus.sync(3, sends=True)
    run_phases(bus, {**ALL, "2": ALREADY})
    bus.send_failed(ticket)
    assert named(bus) == ("aborted", (), (0, 1, 2)), "none has answered that it loads"
    assert quarantined_replicas(bus.state) == {2}
    bus.sync(4)
    run_phases(bus, ALL, ALL, ALL)
    assert named(bus) == ("committed", (), ()) and quarantined_replicas(bus.state) == frozenset()


@pytest.mark.parametrize("heard", [True, False], ids=["by its heartbeat", "by its failure"])
def test_a_quarantine_that_the_agent_imposed_itself_is_named_by_an_aborted_sync(heard: bool) -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, ALL, BUT_2)
    if heard:
        said = AgentStatus(ready=False, tokenizer="present", quarantined=1, version=1)
        bus.status("2.0", said)
    bus.sync(2)
    run_phases(bus, ONLY_0, ALL)
    (report,) = bus.synced
    assert (report.status, report.quarantined) == ("aborted", (2,) if heard else ())
    assert 2 in proven_replicas(bus.state).unproven


def test_an_abort_lifts_the_quarantine_of_its_own_sync() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, BUT_2)
    bus.status("2.0", AgentStatus(ready=False, tokenizer="present", quarantined=1))
    run_phases(bus, ONLY_0, ALL)
    assert named(bus) == ("aborted", (), ())
    assert quarantined_replicas(bus.state) == frozenset()


def test_of_a_replica_in_quarantine_that_failed_the_abort_it_is_not_known_that_it_is_out_of_service() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, BUT_2, ALL)
    bus.sync(2)
    run_phases(bus, ONLY_0, BUT_2)
    assert named(bus) == ("aborted", (), (2,))


def test_a_replica_in_quarantine_at_this_version_does_not_serve_it_already() -> None:
    bus = fleet()
    bus.sync(1, target=Target(replicas=frozenset({1, 2})), quorum=1)
    for left_out in (DONE, NO, DONE):
        bus.answer(a0_0=OTHERS, a1_0=DONE, a2_0=left_out)
    assert named(bus) == ("committed", (2,), ())
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=STALE, a2_0=STALE)
    assert bus.synced[0].loaded == (0, 1) and named(bus) == ("committed", (2,), ())


def aborted_with(conclusion: Outcome) -> SyncReport:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, ONLY_0, {**ALL, "2": conclusion})
    return bus.synced[0]


@pytest.mark.parametrize("proof", [DONE, ALREADY, STALE])
def test_an_abort_that_was_carried_out_is_proof(proof: Outcome) -> None:
    assert aborted_with(proof).unproven == ()


@pytest.mark.parametrize("reason", [NO, Skipped(Reason.EXPIRED), Skipped(Reason.SUPERSEDED)])
def test_an_abort_that_was_not_carried_out_proves_nothing(reason: Outcome) -> None:
    assert aborted_with(reason).unproven == (2,)


def test_of_a_replica_that_could_not_be_paused_it_is_not_known_that_it_is_out_of_service() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, BUT_2, BUT_2, BUT_2)
    assert named(bus) == ("committed", (), (2,))
    bus.sync(2)
    run_phases(bus, ALL, BUT_2, BUT_2)
    assert named(bus) == ("committed", (2,), ()), "it was seen to pause in the prepare phase"


def test_a_replica_that_a_commit_quarantines_has_not_loaded_though_it_carried_out_the_commit() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, BUT_2, ALL)
    assert (bus.state.members["1.0"].sync_acked, bus.state.members["2.0"].sync_acked) == (True, False)
    assert proven_replicas(bus.state).unproven == {2}


# --- unproven ---------------------------------------------------------------------------------------------------------


def test_a_replica_that_was_away_is_unproven_in_every_report_until_it_is_back() -> None:
    bus = Coordinator("0.0", "1.0", "2.0", "2.1")
    bus.lose("2.0")
    for version in (1, 2):
        bus.sync(version)
        for _ in range(3):
            bus.answer(a0_0=DONE, a1_0=DONE, a2_1=NOT_PRIMARY)
        (report,) = bus.synced
        assert (report.loaded, report.quarantined, report.unproven) == ((0, 1), (), (2,))
        with pytest.raises(CommandFailed, match=f"weights v{version} committed on replicas 0, 1; unproven: replica 2"):
            report.raise_for_failures()
    assert bus.arrive("2.0").version == 2
    bus.sync(3)
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE, a2_1=NOT_PRIMARY)
    assert bus.synced[0].unproven == ()
    bus.synced[0].raise_for_failures()


def test_a_replica_of_an_earlier_life_of_the_bus_is_unproven_until_it_is_retired() -> None:
    bus = fleet()
    bus.open()
    bus.arrive("0.0")
    unproven = []
    for version in (1, 2):
        bus.sync(version)
        for _ in range(3):
            bus.answer(a0_0=DONE)
        unproven.append(bus.synced[0].unproven)
        bus.retire("1", "2.0")
    assert unproven == [(1, 2), ()]


def test_only_replicas_that_the_sync_is_for_can_be_unproven() -> None:
    bus = fleet()
    bus.arrive("3.0", mode=RolloutMode.COLOCATED)
    bus.arrive("actor.0")
    for agent in ("1.0", "2.0", "3.0", "actor.0"):
        bus.lose(agent)
    bus.sync(1, target=Target(replicas=frozenset({0, 1, 3})))
    for _ in range(3):
        bus.answer(a0_0=DONE)
    assert bus.synced[0].unproven == (1,)


def test_a_replica_that_does_not_answer_the_commit_is_unproven() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, ALL)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.time(60 * SECOND_US)
    (report,) = bus.synced
    assert (report.loaded, report.quarantined, report.unproven) == ((0, 1), (), (2,))


# --- stopped by hand --------------------------------------------------------------------------------------------------

NOON_NS = 12 * 3600 * 1_000_000_000
PAUSE, RESUME = EngineCommand(operation="pause"), EngineCommand(operation="resume")
SLEEP, WAKE = EngineCommand(operation="sleep"), EngineCommand(operation="wake")
ONLY_2 = Target(replicas=frozenset({2}))
PAUSED_2 = "replica 2 paused by an operator since 12:00:00.000 UTC"


def paused_by_hand() -> Coordinator:
    """A fleet whose replica 2 an operator has paused."""
    bus = fleet()
    bus.issue(PAUSE, target=ONLY_2, operator=True, at_ns=NOON_NS)
    bus.answer(a0_0=OTHERS, a1_0=OTHERS, a2_0=DONE)
    return bus


def stops(bus: Coordinator) -> list[str]:
    return [stop.text for stop in stopped_replicas(bus.state)]


@pytest.mark.parametrize("phases", [[ALL, ALL, ALL], [ONLY_0, ALL]], ids=["committed", "aborted"])
def test_every_report_names_a_replica_that_an_operator_has_paused(phases: list[dict[str, Outcome]]) -> None:
    bus = paused_by_hand()
    bus.sync(1)
    run_phases(bus, *phases)
    (report,) = bus.synced
    assert [stop.text for stop in report.stopped] == [PAUSED_2]
    assert PAUSED_2 in report.headline and report.lines()[0].trouble
    if report.status == "committed":
        report.raise_for_failures()


def test_the_status_names_it_first_and_says_so_until_it_is_resumed() -> None:
    bus = paused_by_hand()
    status = fleet_status(bus.state, 0, "log", {})
    assert status.warnings == (PAUSED_2,) and str(status).splitlines()[1] == f"  {PAUSED_2}"
    bus.issue(PAUSE, operator=False, at_ns=2 * NOON_NS)
    assert stops(bus) == ["replicas 0, 1 paused by the trainer since 00:00:00.000 UTC", PAUSED_2]
    assert fleet_status(bus.state, 0, "log", {}).warnings == (PAUSED_2,), "what the trainer does is no warning"
    bus.issue(RESUME, target=ONLY_2)
    assert stops(bus) == ["replicas 0, 1 paused by the trainer since 00:00:00.000 UTC"]
    bus.issue(RESUME)
    assert stops(bus) == [] and bus.state.stops == {}


def test_a_pause_and_a_sleep_are_each_whose_they_were() -> None:
    bus = paused_by_hand()
    bus.issue(SLEEP, at_ns=1)
    assert stops(bus)[1] == PAUSED_2.replace("paused", "paused and asleep")
    bus.issue(RESUME)
    assert stops(bus) == ["replicas 0 … 2 asleep by the trainer since 00:00:00.000 UTC"]
    bus.issue(WAKE)
    assert stops(bus) == []


def test_a_replica_that_joins_a_paused_fleet_is_stopped_by_the_same_order() -> None:
    bus = fleet()
    bus.issue(PAUSE, operator=True, at_ns=NOON_NS)
    bus.arrive("3.0")
    assert stops(bus) == ["replicas 0 … 3 paused by an operator since 12:00:00.000 UTC"]
    bus.open()
    assert stops(bus) == [], "a new trainer resumes what an earlier one left paused"


def test_a_trainer_that_waits_for_the_agents_is_told_what_stopped_one() -> None:
    bus = paused_by_hand()
    bus.status("2.0", AgentStatus(ready=False, tokenizer="present"), at_us=1)
    assert not_ready_reasons(bus.state, 0)["2.0"] == f"it does not serve: v0, paused; {PAUSED_2}"


def test_a_log_in_which_a_replica_is_stopped_replays_and_a_mark_keeps_it() -> None:
    bus = Recorded("0.0", "1.0", "2.0")
    bus.issue(PAUSE, target=ONLY_2, operator=True, at_ns=NOON_NS)
    assert replay_log(bus.entries).compared == len(bus.entries)
    read = decode_state(decode_mark(encode_mark(bus.state, {})))
    assert read == bus.state and read is not None and stopped_replicas(read) == stopped_replicas(bus.state) != ()
