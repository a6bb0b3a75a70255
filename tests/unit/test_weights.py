"""A weight sync from its request to its report: which replicas take part, which drop out, and what meets the quorum."""

import pytest
from msgspec.structs import replace

from controlplane.machine.events import OnUnreachable, Publish
from controlplane.machine.replicas import proven_replicas
from controlplane.machine.status import fleet_status
from schemas.agent_status import AgentStatus
from schemas.commands import Checkpoint, EngineCommand, Target, WeightSync
from schemas.desired import Committed, Desired
from schemas.errors import CommandFailed
from schemas.identity import RolloutMode
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped
from tests.unit.fleets import DONE, NO, NOT_PRIMARY, Coordinator, lines

ALREADY, STALE = Skipped(Reason.ALREADY), Skipped(Reason.STALE_VERSION)
NEVER, OTHERS = Skipped(Reason.MODE_NEVER_SYNCS), Skipped(Reason.NOT_TARGETED)
V1 = Checkpoint("v1")


def phase(bus: Coordinator) -> WeightSync:
    """The phase that the last event opened."""
    (body,) = bus.published
    assert isinstance(body, WeightSync)
    return body


def run_phases(bus: Coordinator, *phases: dict[str, Outcome]) -> None:
    for outcomes in phases:
        bus.answer(a0_0=outcomes["0"], a1_0=outcomes["1"], a2_0=outcomes["2"])


def fleet() -> Coordinator:
    """Three replicas of one node."""
    return Coordinator("0.0", "1.0", "2.0")


ALL: dict[str, Outcome] = {"0": DONE, "1": DONE, "2": DONE}
BUT_2: dict[str, Outcome] = {"0": DONE, "1": DONE, "2": NO}
ONLY_0: dict[str, Outcome] = {"0": DONE, "1": NO, "2": NO}

# --- committed --------------------------------------------------------------------------------------------------------


def test_a_sync_goes_from_prepare_through_load_to_commit() -> None:
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
    assert [phase.command for phase in report.phases] == seen
    assert bus.effects[-1].ticket == ticket and bus.state.sync is None  # type: ignore[union-attr]
    assert bus.state.default_desired == Desired(committed=Committed(1, V1, None))
    report.raise_for_failures()


def test_only_the_primary_speaks_for_its_replica() -> None:
    bus = Coordinator("0.0", "0.1", "1.0", "1.1")
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a0_1=NO, a1_0=DONE, a1_1=NOT_PRIMARY)
    assert (bus.synced[0].loaded, bus.synced[0].quarantined) == ((0, 1), ())


# --- dropping out -----------------------------------------------------------------------------------------------------


def test_a_replica_that_cannot_prepare_is_quarantined_before_the_others_load() -> None:
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


def test_a_quarantined_replica_that_pauses_has_neither_loaded_nor_met_the_quorum() -> None:
    bus = fleet()
    bus.sync(1, quorum=2)
    run_phases(bus, BUT_2, {"0": DONE, "1": NO, "2": DONE})
    assert phase(bus).phase == "abort"
    bus = fleet()
    bus.sync(1)
    run_phases(bus, BUT_2, ALL, ALL)
    (report,) = bus.synced
    assert (report.loaded, report.quarantined) == ((0, 1), (2,))


def test_a_quarantine_keeps_no_replica_that_joins_later_out_of_the_sync() -> None:
    bus = Coordinator("0.0", "1.0", "2.0")
    bus.sync(1)
    bus.answer(a0_0=NO, a1_0=DONE, a2_0=DONE)
    assert phase(bus).quarantine == {0}
    assert bus.arrive("3.0").sync == bus.state.desired[1].sync


def test_a_replica_that_fails_the_commit_is_named_in_the_report() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, ALL, BUT_2)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined) == ("committed", (0, 1), (2,))
    with pytest.raises(CommandFailed, match="weights v1 committed on replicas 0, 1; quarantined: replica 2"):
        report.raise_for_failures()


def test_a_replica_that_is_lost_during_a_sync_is_left_out_and_follows_when_it_is_back() -> None:
    bus = fleet()
    bus.sync(1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.lose("2.0")
    assert phase(bus).quarantine == frozenset()
    for _ in range(2):
        bus.answer(a0_0=DONE, a1_0=DONE)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined, report.unproven) == ("committed", (0, 1), (), (2,))
    assert bus.arrive("2.0") == Desired(committed=Committed(1, V1, None))


def test_a_trainer_that_goes_on_without_the_rest_raises_only_if_nothing_was_committed() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, BUT_2, BUT_2)
    bus.synced[0].raise_unless_committed()
    with pytest.raises(CommandFailed, match="did not succeed everywhere"):
        bus.synced[0].raise_for_failures()
    bus.sync(2)
    run_phases(bus, ONLY_0, ALL)
    short = "weights v2 aborted; quarantined: replica 2: 1 of 3 replicas prepared, and 2 must: not replicas 1, 2"
    with pytest.raises(CommandFailed, match=f"weight sync was not committed: {short}\n.*It burns"):
        bus.synced[0].raise_unless_committed()
    bus.sync(1)
    run_phases(bus, dict.fromkeys("012", STALE))
    with pytest.raises(CommandFailed, match="weights v1 stale"):
        bus.synced[0].raise_unless_committed()


# --- engines that are known to be down --------------------------------------------------------------------------------

LAUNCHING, UP = AgentStatus(ready=False), AgentStatus(ready=True, tokenizer="present", generating=True)


def test_no_phase_waits_for_an_engine_that_is_known_to_be_down() -> None:
    bus = fleet()
    bus.status("2.0", LAUNCHING)
    bus.sync(1)
    phases = []
    for _ in range(3):
        phases.append(phase(bus))
        bus.answer(a0_0=DONE, a1_0=DONE)
    assert [(command.phase, set(command.quarantine)) for command in phases] == [
        ("prepare", set()),
        ("load", set()),
        ("commit", set()),
    ]
    (report,) = bus.synced
    assert (report.status, report.loaded, report.unproven) == ("committed", (0, 1), (2,))
    assert lines(report.phases[2])["2.0"] == "engine_down"
    assert bus.state.desired[2] == Desired(committed=Committed(1, V1, None)), "it comes back to these weights"


def test_a_phase_waits_for_an_engine_that_has_done_what_the_last_one_asked_for_since_it_was_down() -> None:
    bus = fleet()
    for agent in ("1.0", "2.0"):
        bus.status(agent, LAUNCHING)
    bus.sync(1, quorum=1)
    bus.answer(a0_0=DONE)
    bus.answer(a0_0=NO)
    assert bus.published == [], "no replica has loaded: it waits for those that are down"
    bus.answer(a1_0=DONE)
    assert phase(bus).phase == "commit"
    bus.answer(a0_0=Skipped(Reason.QUARANTINED))
    assert bus.synced == []
    bus.answer(a1_0=DONE)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.unproven) == ("committed", (1,), (2,))


def test_a_phase_goes_on_as_soon_as_an_engine_is_known_to_be_down() -> None:
    bus = fleet()
    bus.sync(1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert bus.published == []
    bus.status("2.0", LAUNCHING)
    assert phase(bus).phase == "load"


@pytest.mark.parametrize(
    ("quorum", "status", "on_unreachable"),
    [(3, LAUNCHING, "skip"), (None, UP, "skip"), (2, LAUNCHING, "wait")],
    ids=["no quorum without it", "it is up", "as asked for"],
)
def test_otherwise_a_phase_waits(quorum: int | None, status: AgentStatus, on_unreachable: OnUnreachable) -> None:
    bus = fleet()
    bus.status("2.0", status)
    bus.sync(1, quorum=quorum, on_unreachable=on_unreachable)
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert bus.published == []
    bus.answer(a2_0=DONE)
    assert phase(bus).phase == "load"


def test_a_phase_does_not_wait_for_an_engine_that_is_down_if_the_others_fail() -> None:
    bus = fleet()
    bus.status("2.0", LAUNCHING)
    bus.sync(1, quorum=2)
    bus.answer(a0_0=DONE, a1_0=NO)
    assert bus.published == [], "two of three can still prepare"


# --- the target -------------------------------------------------------------------------------------------------------


def test_to_name_all_replicas_is_to_name_none() -> None:
    bus = fleet()
    bus.arrive("3.0", mode=RolloutMode.COLOCATED)
    bus.sync(1, target=Target(replicas=frozenset({0, 1, 2})))
    assert bus.of(Publish)[0].envelope.target == Target()
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE, a3_0=NEVER)
    assert bus.state.default_desired.version == 1 and fleet_status(bus.state, 0, "log", {}).version == 1


# --- quorum -----------------------------------------------------------------------------------------------------------


QUORUMS: list[tuple[int | None, dict[str, Outcome], bool]] = [
    (None, BUT_2, True),
    (None, ONLY_0, False),
    (1, ONLY_0, True),
    (3, BUT_2, False),
    (3, ALL, True),
]


@pytest.mark.parametrize(("quorum", "outcomes", "continues"), [*QUORUMS, (4, ALL, False)])
def test_the_quorum_to_prepare_is_more_than_half_or_as_given(
    quorum: int | None, outcomes: dict[str, Outcome], continues: bool
) -> None:
    bus = fleet()
    bus.sync(1, quorum=quorum)
    run_phases(bus, outcomes)
    assert phase(bus).phase == ("load" if continues else "abort")


@pytest.mark.parametrize(("quorum", "outcomes", "continues"), QUORUMS)
def test_the_quorum_is_counted_again_after_the_load(
    quorum: int | None, outcomes: dict[str, Outcome], continues: bool
) -> None:
    bus = fleet()
    bus.sync(1, quorum=quorum)
    run_phases(bus, ALL, outcomes)
    assert phase(bus).phase == ("commit" if continues else "abort")


def test_by_default_replicas_that_are_away_are_not_counted_for_the_quorum_and_are_named() -> None:
    bus = Coordinator("0.0", "1.0", "2.0", "3.0")
    for agent in ("1.0", "2.0", "3.0"):
        bus.lose(agent)
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.unproven) == ("committed", (0,), (1, 2, 3))
    bus.sync(2, quorum=2)
    bus.answer(a0_0=DONE)
    assert phase(bus).phase == "abort"


def test_half_is_not_enough() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.sync(1)
    bus.answer(a0_0=DONE, a1_0=NO)
    assert phase(bus) == WeightSync(phase="abort", version=1)


def test_an_empty_fleet_never_meets_the_quorum() -> None:
    bus = Coordinator()
    bus.sync(1)
    assert [report.status for report in bus.synced] == ["aborted"]
    assert [getattr(command, "phase", None) for command in bus.published] == ["prepare", "abort"]
    assert replace(bus.state.default_desired, uncommitted=None) == Desired()


def test_an_aborted_sync_quarantines_no_replica_and_names_those_that_failed() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, ONLY_0, ALL)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined) == ("aborted", (), ())
    assert all(replace(desired, uncommitted=None) == Desired() for desired in bus.state.desired.values())
    with pytest.raises(CommandFailed) as caught:
        report.raise_for_failures()
    short = "weights v1 aborted: 1 of 3 replicas loaded, and 2 must: not replicas 1, 2"
    assert str(caught.value).startswith(f"weight sync did not succeed everywhere: {short}\n")
    assert "1.0, 2.0: failed engine_error: It burns." in str(caught.value)


def test_a_sync_to_a_version_that_one_replica_serves_already_brings_the_others_to_it() -> None:
    bus = fleet()
    bus.status("2.0", AgentStatus(ready=True, tokenizer="present", generating=True))
    bus.sync(1, target=Target(replicas=frozenset({2})))
    for _ in range(3):
        bus.answer(a0_0=OTHERS, a1_0=OTHERS, a2_0=DONE)
    assert bus.synced[0].loaded == (2,)
    bus.sync(1)
    run_phases(bus, {**ALL, "2": STALE}, {**ALL, "2": STALE})
    assert phase(bus) == WeightSync(phase="commit", version=1, source=V1)
    run_phases(bus, {**ALL, "2": STALE})
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined, report.unproven) == ("committed", (0, 1, 2), (), ())
    assert proven_replicas(bus.state).serving[2] == 1


def test_a_replica_that_serves_a_newer_version_is_left_alone_and_named() -> None:
    bus = fleet()
    bus.sync(7, target=Target(replicas=frozenset({2})))
    for _ in range(3):
        bus.answer(a0_0=OTHERS, a1_0=OTHERS, a2_0=DONE)
    bus.sync(6)
    run_phases(bus, *[{**ALL, "2": STALE}] * 3)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined, report.unproven) == ("committed", (0, 1), (), (2,))


# --- beside a sync ----------------------------------------------------------------------------------------------------


def test_a_second_sync_is_refused_while_one_is_in_progress() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL)
    seq, ticket = bus.state.seq, bus.sync(2)
    ((refused, kind, why),) = bus.refused
    assert (refused, kind) == (ticket, "sync_in_progress")
    assert why.startswith("a sync to version 1 is in its load phase;")
    assert bus.state.seq == seq


def test_another_command_does_not_advance_the_sync() -> None:
    bus = fleet()
    bus.sync(1)
    bus.issue(EngineCommand(operation="flush"))
    run_phases(bus, ALL)
    assert bus.published == [] and bus.state.sync is not None and bus.state.sync.phase == "prepare"
    bus.answer(2, a0_0=DONE, a1_0=DONE, a2_0=DONE)
    assert phase(bus).phase == "load"


def test_an_agent_that_joins_during_a_sync_follows_the_commit() -> None:
    bus = fleet()
    bus.sync(1)
    assert bus.arrive("3.0").sync is not None
    run_phases(bus, ALL)
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE, a3_0=DONE)
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE, a3_0=DONE)
    assert bus.synced[0].loaded == (0, 1, 2, 3)


def test_a_replica_that_restarts_during_a_sync_is_not_quarantined() -> None:
    bus = fleet()
    bus.sync(1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.lose("2.0")
    assert bus.arrive("2.0", "b").quarantined == 0
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=NO)
    assert phase(bus) == WeightSync(phase="commit", version=1, source=V1)


def test_a_restart_ends_a_quarantine_though_the_agent_says_hello_twice_before_it_joins() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, BUT_2, BUT_2, BUT_2)
    bus.lose("2.0")
    bus.sync(2)
    bus.hello("2.0", "b")
    bus.hello("2.0", "b")
    bus.join("2.0", "b")
    assert bus.snapshot.quarantined == 0
    assert bus.state.sync is not None and bus.state.sync.restarted == {2}


def test_a_judge_that_restarts_in_quarantine_is_sent_no_sync() -> None:
    """A replica that synced when it was quarantined, and is a judge in its next life."""
    bus = fleet()
    bus.sync(1)
    run_phases(bus, BUT_2, BUT_2, BUT_2)
    bus.sync(2)
    bus.lose("2.0")
    assert bus.state.default_desired.sync is not None
    assert bus.arrive("2.0", "b", mode=RolloutMode.COLOCATED).sync is None


def test_a_restart_ends_a_quarantine_and_a_reconnect_does_not() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, BUT_2, BUT_2, BUT_2)
    desired = []
    for incarnation in ("a", "b"):
        bus.lose("2.0")
        desired.append(bus.arrive("2.0", incarnation))
    committed = Committed(1, V1, None)
    assert desired == [Desired(committed=committed, quarantined=1), Desired(committed=committed)]


def test_a_sync_of_some_replicas_leaves_the_others_where_they_are() -> None:
    bus = fleet()
    bus.sync(1, target=Target(replicas=frozenset({0, 1})))
    run_phases(bus, *[{**ALL, "2": OTHERS}] * 3)
    assert bus.synced[0].loaded == (0, 1)
    assert [bus.state.desired[replica].version for replica in (0, 1, 2)] == [1, 1, 0]
    assert bus.state.default_desired.version == 0


def test_a_judge_that_returns_to_the_next_trainer_in_the_middle_of_a_sync_takes_no_part() -> None:
    bus = Coordinator("0.0")
    bus.arrive("3.0", mode=RolloutMode.COLOCATED)
    bus.lose("3.0", "left")
    bus.close()
    bus.open()
    bus.arrive("0.0")
    bus.sync(1)
    assert bus.arrive("3.0", mode=RolloutMode.COLOCATED) == Desired()
    bus.answer(a0_0=DONE)  # the prepare, for which the judge was away
    for _ in range(2):
        bus.answer(a0_0=DONE, a3_0=NEVER)
    assert bus.synced[0].status == "committed" and bus.state.desired[3] == Desired()


@pytest.mark.parametrize(
    ("conclusion", "succeeded"),
    [
        (Acted(calls=()), True),
        (ALREADY, True),
        (Skipped(Reason.EXPIRED), False),
        (Failed(ErrorKind.UNKNOWN, "?"), False),
    ],
)
def test_only_acted_and_already_count_as_success(conclusion: Outcome, succeeded: bool) -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ALL, {**ALL, "2": conclusion})
    assert phase(bus).quarantine == (frozenset() if succeeded else {2})


def test_a_replica_that_restarted_and_does_not_serve_is_named() -> None:
    """A restarted agent follows the commit by itself, so it is not quarantined. This one never reported that it did."""
    bus = Coordinator("0.0", "1.0", "2.0")
    bus.sync(1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.lose("2.0")
    bus.arrive("2.0", "b")
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.time(40_000_000)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined) == ("committed", (0, 1), ())
    with pytest.raises(CommandFailed, match=r"2\.0: missing"):
        report.raise_for_failures()
