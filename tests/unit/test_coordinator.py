"""Every command gets one seq and one end: issuing, answers, deadlines, retransmission, and the lives of a bus."""

from typing import get_args

import pytest
from msgspec.structs import replace

from controlplane.machine.coordinator import EPOCH_START_TIMEOUT_MS, REACTIONS, next_deadline
from controlplane.machine.events import Conclude, CoordinatorEvent, Publish
from controlplane.machine.publishing import PAGE
from controlplane.machine.status import fleet_status
from schemas.agent_status import AgentStatus, Clock
from schemas.commands import EngineCommand, EpochStart, ProfileCommand, ProfilePlan, Target
from schemas.desired import Desired
from schemas.outcomes import Missing, Reason, Skipped
from schemas.wire import MAX_COMMAND_BYTES, Rejoin, decode_command
from tests.unit.fleets import DONE, NO, NOT_PRIMARY, SECOND_US, Coordinator, lines
from tests.unit.machines import START, sync

PAUSE, RESUME, FLUSH = (EngineCommand(operation=operation) for operation in ("pause", "resume", "flush"))


def test_every_kind_of_event_has_a_reaction() -> None:
    assert set(REACTIONS) == set(get_args(CoordinatorEvent))


# --- issuing ----------------------------------------------------------------------------------------------------------


def test_a_command_gets_the_next_seq_and_is_published_to_all() -> None:
    bus = Coordinator("0.0")
    seqs = []
    for body in (PAUSE, START):
        bus.issue(body)
        (published,) = bus.of(Publish)
        seqs.append((published.epoch, published.seq, decode_command(published.envelope.body)))
    assert seqs == [(1, 2, PAUSE), (1, 3, START)]


@pytest.mark.parametrize(("timeout_ms", "ttl_ms"), [(30_000, 29_000), (10_000, 9000), (1000, 900), (5, 5)])
def test_agents_have_a_little_less_time_than_the_trainer_waits(timeout_ms: int, ttl_ms: int) -> None:
    bus = Coordinator("0.0")
    bus.issue(PAUSE, timeout_ms=timeout_ms)
    assert bus.of(Publish)[0].envelope.ttl_ms == ttl_ms


def test_a_command_that_is_too_large_is_refused_and_changes_nothing() -> None:
    bus = Coordinator("0.0")
    before = bus.state
    ticket = bus.issue(ProfileCommand(action="start", step=1, plan=ProfilePlan(ranks=frozenset(range(60_000)))))
    ((refused, kind, why),) = bus.refused
    assert (refused, kind) == (ticket, "command")
    assert f"of at most {MAX_COMMAND_BYTES:,}; nothing was published" in why
    assert bus.state is before and bus.published == []


def test_a_targeted_command_is_open_for_all_and_changes_the_desired_state_of_its_targets() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.issue(PAUSE, target=Target(replicas=frozenset({1})))
    assert bus.state.open[0].waiting == {"0.0", "1.0"}
    assert bus.state.desired == {0: Desired(), 1: Desired(generation="paused")}


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_report_has_one_line_for_each_agent_of_the_fleet() -> None:
    bus = Coordinator("0.0", "0.1", "1.0")
    ticket = bus.issue(PAUSE, at_us=100)
    bus.answer(a0_0=DONE, a0_1=NOT_PRIMARY, at_us=350)
    assert bus.reports == []
    bus.answer(a1_0=NO, at_us=400)
    (report,) = bus.reports
    assert bus.of(Conclude)[0].ticket == ticket
    assert lines(report) == {"0.0": DONE, "0.1": NOT_PRIMARY, "1.0": NO}
    assert [outcome.latency_us for outcome in report.outcomes] == [250, 250, 300]


def test_a_second_answer_of_the_same_agent_changes_nothing() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.issue(PAUSE)
    bus.answer(a0_0=DONE)
    before = bus.state
    bus.answer(a0_0=NO)
    assert bus.state == before and bus.effects == ()


def test_an_answer_to_the_same_seq_of_another_epoch_is_ignored() -> None:
    bus = Coordinator("0.0")
    bus.issue(PAUSE)
    before = bus.state
    bus.answer(a0_0=DONE, origin=9)
    assert bus.state == before and bus.effects == ()


def test_a_failed_start_withdraws_the_session_from_that_replica_only() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.issue(START)
    bus.answer(a0_0=NO, a1_0=Skipped(Reason.RANK_NOT_SELECTED))
    assert bus.state.desired[0].profile is None and bus.state.desired[1].profile is not None


# --- time -------------------------------------------------------------------------------------------------------------


def test_an_agent_that_has_not_answered_by_the_deadline_is_missing_and_the_others_are_not() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.issue(PAUSE, timeout_ms=5000)
    bus.answer(a0_0=DONE)
    bus.time(5 * SECOND_US - 1)
    assert bus.reports == []
    bus.time(5 * SECOND_US)
    assert [lines(report) for report in bus.reports] == [{"0.0": DONE, "1.0": "deadline"}]


def test_a_command_is_retransmitted_to_late_agents_at_growing_intervals() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.issue(PAUSE)
    bus.answer(a0_0=DONE)
    retransmitted = []
    for second in range(1, 20):
        bus.time(second * SECOND_US)
        if bus.sent:
            assert [peer for peer, _ in bus.sent] == ["1.0/a"]
            retransmitted.append((second, bus.replayed[0].envelope.ttl_ms))
    assert retransmitted == [(1, 28_000), (2, 27_000), (4, 25_000), (8, 21_000), (16, 13_000)]


def test_a_retransmission_starves_no_agent_of_a_large_fleet_and_takes_many_turns() -> None:
    agents = [f"{replica}.0" for replica in range(150)]
    bus = Coordinator(*agents)
    bus.issue(PAUSE)
    turns: list[list[str]] = []
    moments: list[int] = []
    while (moment := next_deadline(bus.state)) is not None and moment < 3 * SECOND_US:
        bus.time(moment)
        moments.append(moment)
        turns.append([peer.removesuffix("/a") for peer, _ in bus.sent])
    assert [len(turn) for turn in turns] == [PAGE, PAGE, 150 - 2 * PAGE] * 2
    assert sorted(name for turn in turns[:3] for name in turn) == sorted(agents)
    assert moments == sorted(set(moments)), "each turn lets time pass"


def test_the_next_deadline_is_the_next_retransmission_or_the_end_of_a_command() -> None:
    bus = Coordinator("0.0")
    assert next_deadline(bus.state) is None
    bus.issue(PAUSE, timeout_ms=1500)
    assert next_deadline(bus.state) == SECOND_US
    bus.time(SECOND_US)
    assert next_deadline(bus.state) == 1_500_000
    bus.time(1_500_000)
    assert next_deadline(bus.state) is None


def test_a_late_timer_never_leaves_a_deadline_in_the_past() -> None:
    bus = Coordinator("0.0")
    bus.issue(PAUSE)
    bus.time(25 * SECOND_US)
    moment = next_deadline(bus.state)
    assert moment is not None and moment > 25 * SECOND_US


# --- lives of a bus ---------------------------------------------------------------------------------------------------


def test_a_life_begins_with_an_epoch_start() -> None:
    bus = Coordinator()
    assert bus.published == [EpochStart(previous_epoch=0, logic=1)]
    (published,) = bus.of(Publish)
    assert (published.epoch, published.seq) == (1, 1)
    assert published.envelope.ttl_ms == EPOCH_START_TIMEOUT_MS - 1000


def test_agents_of_an_earlier_life_must_say_hello_again_and_keep_their_incarnation() -> None:
    bus = Coordinator("0.0")
    bus.open()
    bus.join("0.0")
    assert isinstance(bus.sent[0][1], Rejoin)
    assert bus.arrive("0.0") == Desired()


def test_the_next_life_knows_every_agent_of_the_one_before() -> None:
    bus = Coordinator("0.0", "1.0", "2.0")
    bus.lose("1.0", "left")
    bus.lose("2.0")
    bus.open(at_us=7 * SECOND_US)
    states = {"0.0": "gone", "1.0": "left", "2.0": "gone"}
    assert {name: member.state for name, member in bus.state.members.items()} == states
    bus.issue(PAUSE, at_us=9 * SECOND_US)
    (report,) = bus.reports
    assert [outcome.conclusion for outcome in report.outcomes] == [Missing("absent", away_ms=2000)] * 3


def test_a_new_life_ends_unfinished_work_and_keeps_what_is_committed() -> None:
    bus = Coordinator("0.0")
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE)
    bus.issue(PAUSE)
    bus.issue(START)
    bus.sync(2)
    committed = bus.state.desired[0].committed
    bus.open()
    assert committed is not None and committed.version == 1
    assert bus.state.desired[0] == bus.state.default_desired == Desired(committed=committed)
    assert bus.state.sync is None


def test_records_of_an_earlier_life_are_replayed_without_time_left() -> None:
    bus = Coordinator("0.0")
    bus.issue(FLUSH)
    bus.open()
    bus.arrive("0.0")
    bus.request_resend("0.0", 2)
    assert [(record.origin, record.envelope.ttl_ms) for record in bus.replayed] == [(1, 0), (2, 59_000)]


def test_closing_ends_open_commands_and_publishes_nothing() -> None:
    bus = Coordinator("0.0")
    bus.issue(PAUSE)
    bus.close()
    assert [lines(report) for report in bus.reports] == [{"0.0": "bus_restarted"}]
    assert bus.published == []


def test_closing_in_the_middle_of_a_sync_aborts_it() -> None:
    bus = Coordinator("0.0")
    ticket = bus.sync(3)
    bus.close()
    assert bus.published == [sync("abort", 3)]
    ((refused, kind, why),) = bus.refused
    assert (refused, kind) == (ticket, "closed")
    assert why == "the bus was closed in the prepare phase of the sync to version 3; it was aborted"
    assert bus.state.sync is None and bus.state.desired[0] == Desired()


# --- for people -------------------------------------------------------------------------------------------------------


def test_a_status_says_how_long_an_engine_call_has_been_in_flight() -> None:
    """By the clock of the agent, as it was measured against that of the bus."""
    clock = Clock(at_ms=1000, wall_ns=50_000_000_000, offset_ns=-3_000_000_000, error_ns=1)
    busy = AgentStatus(ready=False, activity="load", since_ms=4000, clock=clock)
    bus = Coordinator("0.0", "1.0", "2.0")
    bus.status("0.0", busy)
    bus.status("1.0", replace(busy, clock=None))
    bus.status("2.0", AgentStatus(ready=True, clock=clock))

    def calls(wall_ns: int | None) -> list[int | None]:
        fleet = fleet_status(bus.state, 0, "run.db", {}, wall_ns=wall_ns)
        return [line.call_ms for line in sorted(fleet.agents, key=lambda line: line.agent)]

    assert calls(92_000_000_000) == [42_000, None, None]
    assert calls(1) == [0, None, None], "the clock of the bus was set back"
    assert calls(None) == [None, None, None]
    bus.lose("0.0")
    assert calls(92_000_000_000) == [None, None, None], "it is not known what it does"


def test_the_status_of_the_fleet() -> None:
    bus = Coordinator("10.0", "2.0", "2.1")
    bus.status("2.0", AgentStatus(ready=True), seq=1)
    bus.lose("2.1")
    bus.issue(PAUSE)
    bus.answer(a2_0=DONE)
    seen = fleet_status(bus.state, 5_000_000, "run.db", {"2.0/a": 3_000_000})
    assert [(line.agent, line.state, line.silent_ms, line.waits_for) for line in seen.agents] == [
        ("2.1", "gone", 0, ()),
        ("2.0", "live", 2000, ()),
        ("10.0", "live", 0, ("pause (seq 2)",)),
    ]
    assert seen.open == ("pause (seq 2) waits for 10.0",)
    assert (seen.run, seen.epoch, seen.seq, seen.version, seen.log) == ("run", 1, 2, 0, "run.db")
