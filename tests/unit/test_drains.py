"""Replicas that leave the fleet in good order, and places that are taken up again: what the bus decides."""

import pytest

from controlplane.machine.events import LeaveRequested, Retired
from controlplane.machine.fleet_view import FleetView
from controlplane.machine.replicas import all_serve, not_ready_reasons, proven_replicas
from controlplane.machine.status import fleet_status
from schemas.agent_status import AgentStatus
from schemas.commands import Drain, EngineCommand, Target, WeightSync
from schemas.desired import Desired
from schemas.outcomes import Acted, Reason, Skipped
from schemas.wire import Rejoin
from tests.unit.fleets import DONE, NOT_PRIMARY, SECOND_US, Coordinator, lines

DRAIN = Drain(grace_ms=5000)
NOT_TARGETED = Skipped(Reason.NOT_TARGETED)
FLUSH = EngineCommand(operation="flush")
SERVES = AgentStatus(ready=True, tokenizer="present", generating=True)


def fleet() -> Coordinator:
    bus = Coordinator("0.0", "1.0", "2.0")
    for agent in ("0.0", "1.0", "2.0"):
        bus.status(agent, SERVES, seq=1)
    bus.answer(1, a0_0=DONE, a1_0=DONE, a2_0=DONE)
    return bus


def drain(bus: Coordinator, *replicas: int) -> int:
    return bus.issue(DRAIN, target=Target(replicas=frozenset(replicas)), timeout_ms=DRAIN.timeout_ms)


def test_a_replica_that_drains_is_not_served_and_gets_no_requests_at_once() -> None:
    bus = fleet()
    assert proven_replicas(bus.state).serving == {0: 0, 1: 0, 2: 0}
    drain(bus, 1)
    view = FleetView(bus.state)
    status = fleet_status(bus.state, 0, "run.db", {})
    assert (status.draining, status.stopped) == ((1,), ()), "its requests still run"
    assert view.serving == {0: 0, 2: 0} and view.unfit(1) == "it leaves the fleet" and not view.unfit(0)


def test_no_later_command_waits_for_a_replica_that_drains_or_names_it() -> None:
    bus = fleet()
    drain(bus, 1)
    bus.issue(FLUSH)
    bus.answer(a0_0=DONE, a2_0=DONE)
    assert [lines(report) for report in bus.reports] == [{"0.0": DONE, "2.0": DONE}]
    bus.lose("1.0")
    bus.issue(FLUSH)
    bus.answer(a0_0=DONE, a2_0=DONE)
    assert [lines(report) for report in bus.reports] == [{"0.0": DONE, "2.0": DONE}], "also once it is gone"


def test_a_command_that_is_open_stops_waiting_for_a_replica_that_begins_to_drain() -> None:
    bus = fleet()
    bus.issue(FLUSH)
    bus.answer(a0_0=DONE, a2_0=DONE)
    assert bus.reports == []
    drain(bus, 1)
    assert [lines(report) for report in bus.reports] == [{"0.0": DONE, "2.0": DONE}]


@pytest.mark.parametrize("phase", ["prepare", "load", "commit"])
@pytest.mark.parametrize("quorum", [None, 3])
def test_a_sync_goes_on_without_a_replica_that_drains_meanwhile(phase: str, quorum: int | None) -> None:
    bus = fleet()
    bus.sync(1, quorum=quorum)
    for expected in ("prepare", "load", "commit"):
        command = bus.state.open[-1].command
        assert isinstance(command, WeightSync) and command.phase == expected
        seq = bus.state.seq
        if expected == phase:
            bus.answer(seq, a0_0=DONE, a2_0=DONE)
            drain(bus, 1)
        else:
            bus.answer(seq, a0_0=DONE, a1_0=DONE, a2_0=DONE)
    ((report,),) = [bus.synced]
    assert (report.status, report.loaded, report.unproven, report.quarantined) == ("committed", (0, 2), (), ())
    report.raise_for_failures()
    assert bus.state.desired[1].sync is None


def test_a_replica_is_retired_once_its_drain_has_ended_and_its_agents_are_told() -> None:
    bus = Coordinator("0.0", "1.0", "1.1")
    drain(bus, 1)
    bus.answer(a1_1=NOT_PRIMARY)
    assert bus.of(Retired) == [] and bus.state.draining == {1}
    done = Acted(calls=("await_idle", "pause"))
    bus.answer(bus.state.seq, a1_0=done)
    ((report,), (retired,)) = bus.reports, bus.of(Retired)
    assert lines(report) == {"0.0": NOT_TARGETED, "1.1": NOT_PRIMARY, "1.0": done}
    assert (retired.ticket, retired.agents) == (None, ("1.0", "1.1"))
    told = {peer: message for peer, message in bus.sent if isinstance(message, Rejoin)}
    assert told.keys() == {"1.0/a", "1.1/a"} and all(message.give_up for message in told.values())
    assert bus.state.members.keys() == {"0.0"} and bus.state.desired.keys() == {0}


def test_a_drain_that_is_not_answered_retires_at_its_deadline_and_one_whose_agent_dies_at_once() -> None:
    bus = fleet()
    drain(bus, 1)
    bus.time(DRAIN.timeout_ms * 1000)
    assert [lines(report)["1.0"] for report in bus.reports] == ["deadline"] and len(bus.of(Retired)) == 1
    bus = fleet()
    drain(bus, 1)
    bus.lose("1.0", at_us=SECOND_US)
    assert [lines(report)["1.0"] for report in bus.reports] == ["gone"] and len(bus.of(Retired)) == 1


def test_a_replica_that_is_away_already_is_drained_and_retired_at_once() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.lose("1.0")
    drain(bus, 1)
    assert bus.state.retired.keys() == {"1.0"}


def test_a_drain_in_the_last_life_of_the_bus_ends_in_the_next() -> None:
    bus = fleet()
    drain(bus, 1)
    bus.open()
    assert bus.state.retired.keys() == {"1.0"} and bus.state.draining == frozenset()


def test_an_agent_that_is_asked_to_end_drains_its_replica_once() -> None:
    bus = Coordinator("0.0", "1.0", "1.1", "actor.0")
    for _ in range(2):
        bus.feed(LeaveRequested(at_us=0, at_ns=0, peer="1.1/a", grace_ms=7000))
    assert bus.state.draining == {1} and bus.state.seq == 2
    open_command = bus.state.open[-1]
    assert open_command.command == Drain(grace_ms=7000)
    assert open_command.record.envelope.target == Target(replicas=frozenset({1}))
    before = bus.state
    bus.feed(LeaveRequested(at_us=0, at_ns=0, peer="actor.0/a", grace_ms=7000))
    assert bus.state is before, "a training rank has no requests"
    bus.feed(LeaveRequested(at_us=0, at_ns=0, peer="9.0/a", grace_ms=7000))
    assert [type(message) for _, message in bus.sent] == [Rejoin]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (Target(), "a drain names the replicas that leave. Nothing was drained"),
        (Target(replicas=frozenset({0, 7})), "this run has no replica 7. Nothing was drained"),
        (Target(replicas=frozenset({1})), "already leaving the fleet: replica 1. Nothing was drained"),
    ],
)
def test_a_drain_is_refused_that_names_no_replica_or_one_that_is_not_there(target: Target, why: str) -> None:
    bus = fleet()
    drain(bus, 1)
    ticket = bus.issue(DRAIN, target=target)
    assert bus.refused == [(ticket, "command", why)]


def test_what_waits_for_agents_does_not_wait_for_one_that_drains() -> None:
    bus = fleet()
    bus.status("1.0", AgentStatus(ready=False), at_us=1)
    for agent in ("0.0", "2.0"):
        bus.status(agent, SERVES, at_us=1)
    assert not all_serve(bus.state, 2, 0)
    drain(bus, 1)
    assert all_serve(bus.state, 2, 0) and not all_serve(bus.state, 3, 0) and not_ready_reasons(bus.state, 0) == {}


def test_checkpoints_are_not_kept_for_a_replica_that_drains() -> None:
    bus = fleet()
    bus.sync(1, target=Target(replicas=frozenset({1})), path="old")
    for _ in range(3):
        bus.answer(bus.state.seq, a0_0=NOT_TARGETED, a1_0=DONE, a2_0=NOT_TARGETED)
    bus.sync(2, target=Target(replicas=frozenset({0, 2})), path="new")
    for _ in range(3):
        bus.answer(bus.state.seq, a0_0=DONE, a1_0=NOT_TARGETED, a2_0=DONE)
    assert FleetView(bus.state).needed_checkpoints == {"old", "new"}
    drain(bus, 1)
    assert FleetView(bus.state).needed_checkpoints == {"new"}


# --- places that are taken up again -----------------------------------------------------------------------------------


def rejoin(bus: Coordinator, agent: str, incarnation: str) -> None:
    bus.hello(agent, incarnation, rejoin=True)
    if not any(isinstance(message, Rejoin) for _, message in bus.sent):
        bus.join(agent, incarnation)


def test_a_retired_place_is_taken_up_again_from_nothing_by_a_new_agent_that_says_so() -> None:
    bus = fleet()
    bus.issue(EngineCommand(operation="pause"), target=Target(replicas=frozenset({1})))
    drain(bus, 1)
    bus.answer(bus.state.seq, a0_0=NOT_TARGETED, a1_0=DONE, a2_0=NOT_TARGETED)
    assert bus.state.retired == {"1.0": "a"}
    rejoin(bus, "1.0", "b")
    assert bus.snapshot == Desired() and bus.state.retired == {}
    assert bus.state.members["1.0"].state == "live" and 1 not in bus.state.stops
    bus.issue(FLUSH)
    assert bus.state.open[-1].waiting == {"0.0", "1.0", "2.0"}


def test_the_process_that_was_retired_does_not_come_back_nor_one_that_does_not_say_so() -> None:
    bus = Coordinator("0.0", "1.0")
    drain(bus, 1)
    bus.answer(bus.state.seq, a0_0=NOT_TARGETED, a1_0=DONE)
    rejoin(bus, "1.0", "a")
    ((_, message),) = bus.sent
    assert isinstance(message, Rejoin) and message.give_up and "--rejoin" in message.reason
    bus.hello("1.0", "b")
    ((_, message),) = bus.sent
    assert isinstance(message, Rejoin) and message.give_up
    assert bus.state.retired == {"1.0": "a"}


def test_a_drain_that_still_waits_for_others_does_not_retire_what_has_taken_up_the_place() -> None:
    bus = fleet()
    drain(bus, 0, 1)
    seq = bus.state.seq
    bus.lose("1.0")
    bus.retire("1")
    rejoin(bus, "1.0", "b")
    bus.answer(seq, a0_0=DONE)
    assert len(bus.reports) == 1 and [retired.agents for retired in bus.of(Retired)] == [("0.0",)]
    assert bus.state.members["1.0"].state == "live"
