"""A weight sync from its request to its report: who takes part, who drops out, and when there are enough."""

import pytest

from controlplane.machine.weights import Sync, next_phase, primary_conclusions
from schemas.commands import Checkpoint, EngineCommand, Target, WeightSync
from schemas.desired import Committed, Desired
from schemas.errors import CommandFailed
from schemas.identity import RolloutMode
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing, Outcome, Reason, Skipped
from schemas.reports import AgentOutcome, Report
from schemas.wire import Snapshot
from tests.unit.fleets import DONE, NO, NOT_PRIMARY, Coordinator

ALREADY, STALE = Skipped(Reason.ALREADY), Skipped(Reason.STALE_VERSION)
NEVER, OTHERS = Skipped(Reason.MODE_NEVER_SYNCS), Skipped(Reason.NOT_TARGETED)
V1 = Checkpoint("v1")


def phase(bus: Coordinator) -> WeightSync:
    """The phase that the last event opened."""
    (body,) = bus.published
    assert isinstance(body, WeightSync)
    return body


def run_phases(bus: Coordinator, *phases: dict[str, Outcome]) -> None:
    for said in phases:
        bus.answer(a0_0=said["0"], a1_0=said["1"], a2_0=said["2"])


def fleet() -> Coordinator:
    """Three replicas of one node."""
    return Coordinator("0.0", "1.0", "2.0")


ALL: dict[str, Outcome] = {"0": DONE, "1": DONE, "2": DONE}
BUT_2: dict[str, Outcome] = {"0": DONE, "1": DONE, "2": NO}
ONLY_0: dict[str, Outcome] = {"0": DONE, "1": NO, "2": NO}

# --- the good end -----------------------------------------------------------------------------------------------------


def test_a_sync_goes_from_prepare_over_load_to_commit() -> None:
    bus = fleet()
    ticket = bus.sync(1)
    seen = [phase(bus)]
    for _ in range(2):
        run_phases(bus, ALL)
        seen.append(phase(bus))
    run_phases(bus, ALL)
    assert seen == [
        WeightSync(phase="prepare", version=1, source=V1, in_flight="wait"),
        WeightSync(phase="load", version=1),
        WeightSync(phase="commit", version=1, source=V1),
    ]
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined) == ("committed", (0, 1, 2), ())
    assert [one.command for one in report.phases] == seen
    assert bus.effects[-1].ticket == ticket and bus.state.sync is None  # type: ignore[union-attr]
    assert bus.state.default_desired == Desired(committed=Committed(1, V1, None))
    report.raise_for_failures()


def test_who_holds_it_already_has_followed() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, {**ALL, "2": ALREADY}, ALL)
    assert bus.synced[0].loaded == (0, 1, 2)


def test_only_the_first_node_speaks_for_its_replica() -> None:
    bus = Coordinator("0.0", "0.1", "1.0", "1.1")
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a0_1=NO, a1_0=DONE, a1_1=NOT_PRIMARY)
    assert (bus.synced[0].loaded, bus.synced[0].quarantined) == ((0, 1), ())


@pytest.mark.parametrize("apart", [NEVER, OTHERS], ids=["never", "others"])
def test_who_takes_no_part_is_not_counted_and_not_left_out(apart: Skipped) -> None:
    bus = fleet()
    bus.sync(1, quorum=2)
    run_phases(bus, *[{**ALL, "2": apart}] * 3)
    assert (bus.synced[0].loaded, bus.synced[0].quarantined) == ((0, 1), ())


# --- dropping out -----------------------------------------------------------------------------------------------------


def test_who_can_not_prepare_is_left_out_before_the_others_load() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, BUT_2)
    assert phase(bus) == WeightSync(phase="load", version=1, quarantine=frozenset({2}))
    assert bus.state.desired[2].quarantined == 1
    run_phases(bus, {**ALL, "2": Skipped(Reason.QUARANTINED)})
    assert phase(bus).quarantine == {2}
    run_phases(bus, {**ALL, "2": Skipped(Reason.QUARANTINED)})
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined) == ("committed", (0, 1), (2,))


def test_who_can_not_load_is_left_out_of_the_commit() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, BUT_2)
    assert phase(bus) == WeightSync(phase="commit", version=1, source=V1, quarantine=frozenset({2}))


def test_who_fails_the_commit_is_named_though_no_phase_comes_after_it() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, ALL, BUT_2)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined) == ("committed", (0, 1), (2,))
    with pytest.raises(CommandFailed, match="weights v1 committed on replicas 0, 1; quarantined: replica 2"):
        report.raise_for_failures()


def test_who_died_on_the_way_has_dropped_out() -> None:
    bus = fleet()
    bus.sync(1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.lose("2.0")
    assert phase(bus).quarantine == {2}


def test_once_out_always_out_of_this_sync() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, BUT_2, ALL)
    assert phase(bus).quarantine == {2}


# --- enough -----------------------------------------------------------------------------------------------------------


ENOUGH: list[tuple[int | None, dict[str, Outcome], bool]] = [
    (None, BUT_2, True),
    (None, ONLY_0, False),
    (1, ONLY_0, True),
    (3, BUT_2, False),
    (3, ALL, True),
]


@pytest.mark.parametrize(("quorum", "said", "goes_on"), [*ENOUGH, (4, ALL, False)])
def test_enough_prepared_is_more_than_half_or_what_the_trainer_says(
    quorum: int | None, said: dict[str, Outcome], goes_on: bool
) -> None:
    bus = fleet()
    bus.sync(1, quorum=quorum)
    run_phases(bus, said)
    assert phase(bus).phase == ("load" if goes_on else "abort")


@pytest.mark.parametrize(("quorum", "said", "goes_on"), ENOUGH)
def test_enough_loaded_is_counted_anew(quorum: int | None, said: dict[str, Outcome], goes_on: bool) -> None:
    bus = fleet()
    bus.sync(1, quorum=quorum)
    run_phases(bus, ALL, said)
    assert phase(bus).phase == ("commit" if goes_on else "abort")


def test_half_is_not_enough() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.sync(1)
    bus.answer(a0_0=DONE, a1_0=NO)
    assert phase(bus) == WeightSync(phase="abort", version=1)


def test_nobody_at_all_is_never_enough() -> None:
    bus = Coordinator()
    bus.sync(1)
    assert [one.status for one in bus.synced] == ["aborted"]
    assert [getattr(one, "phase", None) for one in bus.published] == ["prepare", "abort"]
    assert bus.state.default_desired == Desired()


def test_an_aborted_sync_leaves_nobody_out_of_service_and_says_who_failed() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, ONLY_0, ALL)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined) == ("aborted", (), ())
    assert set(bus.state.desired.values()) == {Desired()}
    with pytest.raises(CommandFailed) as caught:
        report.raise_for_failures()
    assert str(caught.value).startswith("weight sync did not succeed everywhere: weights v1 aborted\n")
    assert "1.0, 2.0: failed engine_error: It burns." in str(caught.value)


def test_a_version_that_was_aborted_may_be_tried_again_from_another_place() -> None:
    bus = fleet()
    bus.sync(1, path="a")
    run_phases(bus, ONLY_0, ALL)
    bus.sync(1, path="b")
    assert phase(bus).source == Checkpoint("b")
    run_phases(bus, ALL, ALL, ALL)
    assert bus.state.default_desired.committed == Committed(1, Checkpoint("b"), None)


def test_a_version_that_all_hold_or_passed_ends_as_stale() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, dict.fromkeys("012", STALE))
    assert [one.status for one in bus.synced] == ["stale"] and bus.published == []
    assert bus.state.sync is None


def test_a_version_that_is_stale_for_one_is_not_stale_for_the_fleet() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, {**ALL, "2": STALE})
    assert phase(bus).phase == "load" and phase(bus).quarantine == {2}


# --- beside a sync ----------------------------------------------------------------------------------------------------


def test_a_second_sync_is_refused_while_one_is_under_way() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL)
    seq, ticket = bus.state.seq, bus.sync(2)
    ((refused, kind, why),) = bus.refused
    assert (refused, kind) == (ticket, "sync_in_progress")
    assert why.startswith("a sync to version 1 is in its load phase;")
    assert bus.state.seq == seq


def test_another_command_in_the_middle_does_not_move_the_sync() -> None:
    bus = fleet()
    bus.sync(1)
    bus.issue(EngineCommand(operation="flush"))
    run_phases(bus, ALL)
    assert bus.published == [] and bus.state.sync is not None and bus.state.sync.phase == "prepare"
    bus.answer(2, a0_0=DONE, a1_0=DONE, a2_0=DONE)
    assert phase(bus).phase == "load"


def test_who_comes_in_the_middle_is_told_of_the_sync_and_follows_the_commit() -> None:
    bus = fleet()
    bus.sync(1)
    bus.hello("3.0")
    bus.join("3.0")
    message = bus.sent[0][1]
    assert isinstance(message, Snapshot) and message.desired.sync is not None
    run_phases(bus, ALL)
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE, a3_0=DONE)
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE, a3_0=DONE)
    assert bus.synced[0].loaded == (0, 1, 2, 3)


def test_who_starts_anew_in_the_middle_is_not_put_in_quarantine() -> None:
    bus = fleet()
    bus.sync(1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.lose("2.0")
    assert phase(bus).quarantine == {2}
    bus.hello("2.0", "b")
    bus.join("2.0", "b")
    message = bus.sent[0][1]
    assert isinstance(message, Snapshot) and message.desired.quarantined == 0
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert phase(bus) == WeightSync(phase="commit", version=1, source=V1)


def test_a_new_start_leads_out_of_an_older_quarantine_and_a_new_connection_does_not() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, BUT_2, BUT_2, BUT_2)
    told = []
    for incarnation in ("a", "b"):
        bus.lose("2.0")
        bus.hello("2.0", incarnation)
        bus.join("2.0", incarnation)
        message = bus.sent[0][1]
        assert isinstance(message, Snapshot)
        told.append(message.desired)
    committed = Committed(1, V1, None)
    assert told == [Desired(committed=committed, quarantined=1), Desired(committed=committed)]


def test_the_next_sync_takes_in_who_was_left_out() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, BUT_2, BUT_2, BUT_2)
    bus.sync(2)
    run_phases(bus, ALL, ALL, ALL)
    assert bus.synced[0].quarantined == ()
    assert {one.quarantined for one in bus.state.desired.values()} == {0}


def test_a_sync_of_some_replicas_leaves_the_others_where_they_are() -> None:
    bus = fleet()
    bus.sync(1, target=Target(replicas=frozenset({0, 1})))
    run_phases(bus, *[{**ALL, "2": OTHERS}] * 3)
    assert bus.synced[0].loaded == (0, 1)
    assert [bus.state.desired[one].version for one in (0, 1, 2)] == [1, 1, 0]
    assert bus.state.default_desired.version == 0


def test_a_judge_that_comes_in_the_middle_is_told_of_no_sync() -> None:
    bus = fleet()
    bus.sync(1)
    bus.hello("3.0", mode=RolloutMode.COLOCATED)
    bus.join("3.0")
    message = bus.sent[0][1]
    assert isinstance(message, Snapshot) and message.desired == Desired()


# --- the phases by themselves -----------------------------------------------------------------------------------------


def report(**said: Conclusion) -> Report:
    outcomes = tuple(AgentOutcome(agent=name[1:].replace("_", "."), conclusion=one) for name, one in said.items())
    return Report(seq=1, origin=1, command=WeightSync(phase="load", version=1), outcomes=outcomes)


SYNC = Sync(
    ticket=1,
    version=1,
    source=V1,
    manifest=None,
    in_flight="abort",
    quorum=None,
    target=Target(),
    timeout_ms=1,
    phase="load",
    members=frozenset({0, 1, 2}),
)


def test_the_word_of_a_replica_is_that_of_its_first_node() -> None:
    assert primary_conclusions(report(a0_0=DONE, a0_1=NOT_PRIMARY, a12_0=NO)) == {0: DONE, 12: NO}


@pytest.mark.parametrize(
    ("said", "follows"),
    [
        (Acted(calls=()), True),
        (ALREADY, True),
        (Skipped(Reason.EXPIRED), False),
        (Failed(ErrorKind.UNKNOWN, "?"), False),
        (Missing("gone"), False),
    ],
)
def test_only_who_acted_or_holds_it_already_has_followed(said: Conclusion, follows: bool) -> None:
    sync, _ = next_phase(SYNC, report(a0_0=DONE, a1_0=DONE, a2_0=said))
    assert sync.lost == (frozenset() if follows else {2})


def test_a_replica_of_which_nothing_was_heard_has_dropped_out() -> None:
    sync, _ = next_phase(SYNC, report(a0_0=DONE, a1_0=DONE))
    assert sync.lost == {2}


def test_who_came_later_is_a_member_from_then_on() -> None:
    sync, _ = next_phase(SYNC, report(a0_0=DONE, a1_0=DONE, a2_0=DONE, a3_0=NO))
    assert sync.members == {0, 1, 2, 3} and sync.lost == {3}


def test_a_replica_that_came_back_and_does_not_serve_is_told() -> None:
    """It is in no quarantine, since a new start follows the commit by itself; this one never said that it did."""
    bus = Coordinator("0.0", "1.0", "2.0")
    bus.sync(1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.lose("2.0")
    bus.hello("2.0", "b")
    bus.join("2.0", "b")
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.time(40_000_000)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined) == ("committed", (0, 1), ())
    with pytest.raises(CommandFailed, match=r"2\.0: missing"):
        report.raise_for_failures()
