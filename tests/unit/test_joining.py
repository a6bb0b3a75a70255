"""Replicas that are new when a sync runs: they hold it up as little as they fail it, and are named as joining."""

import pytest
from msgspec.structs import replace

from controlplane.machine.replicas import proven_replicas
from schemas.agent_status import AgentStatus
from schemas.commands import Checkpoint, WeightSync
from schemas.desired import Committed, Desired
from schemas.outcomes import Reason, Skipped
from tests.unit.fleets import DONE, NO, Coordinator
from tests.unit.test_weights import LAUNCHING, UP, phase

HOLDS_1 = AgentStatus(ready=True, tokenizer="present", generating=True, version=1)


def grown(*new: str) -> Coordinator:
    """Two replicas that serve version 1, and those that have joined since."""
    bus = Coordinator("0.0", "1.0")
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=DONE)
    for agent in ("0.0", "1.0"):
        bus.status(agent, HOLDS_1)
    for agent in new:
        bus.arrive(agent)
    return bus


@pytest.mark.parametrize("joins_in", ["", "prepare", "load", "commit"])
@pytest.mark.parametrize("status", [None, LAUNCHING, UP], ids=["not heard", "launching", "up and loading"])
def test_no_phase_waits_for_a_replica_that_is_new_and_it_is_no_failure(
    joins_in: str, status: AgentStatus | None
) -> None:
    bus = grown(*([] if joins_in else ["2.0", "3.0", "4.0"]))
    bus.sync(2)
    while not bus.synced:
        phase_of = bus.state.open[-1].command
        assert isinstance(phase_of, WeightSync)
        for agent in ("2.0", "3.0", "4.0") if phase_of.phase == joins_in else ():
            bus.arrive(agent)
        for agent in ("2.0", "3.0", "4.0"):
            if status is not None and agent in bus.state.members:
                bus.status(agent, status)
        bus.answer(bus.state.seq, a0_0=DONE, a1_0=DONE)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.joining) == ("committed", (0, 1), (2, 3, 4))
    report.raise_for_failures()
    assert not report.flawed and report.headline == "weights v2 committed on replicas 0, 1; joining: replicas 2 … 4"
    assert bus.state.desired[2] == Desired(committed=Committed(2, Checkpoint("v2"), None))
    assert proven_replicas(bus.state).serving == {0: 2, 1: 2}


def test_a_fleet_of_one_commits_while_a_second_replica_is_new() -> None:
    bus = grown()
    bus.lose("1.0")
    bus.retire("1")
    bus.arrive("2.0")
    bus.status("2.0", LAUNCHING)
    bus.sync(2)
    for _ in range(3):
        bus.answer(a0_0=DONE)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.joining) == ("committed", (0,), (2,))


def test_a_new_replica_that_keeps_up_with_the_others_serves_with_them() -> None:
    bus = grown("2.0")
    bus.sync(2)
    for _ in range(3):
        bus.answer(a2_0=DONE)
        bus.answer(a0_0=DONE, a1_0=DONE)
    (report,) = bus.synced
    assert (report.loaded, report.joining, report.unproven) == ((0, 1, 2), (), ())


def test_a_new_replica_that_fails_to_load_is_in_quarantine_as_any_other() -> None:
    bus = grown("2.0")
    bus.sync(2)
    for outcome in (DONE, NO, Skipped(Reason.QUARANTINED)):
        bus.answer(a2_0=outcome)
        bus.answer(a0_0=DONE, a1_0=DONE)
    (report,) = bus.synced
    assert (report.loaded, report.quarantined, report.joining) == ((0, 1), (2,), ())


def test_a_new_replica_that_failed_to_load_and_says_nothing_more_is_not_joining() -> None:
    bus = grown("2.0")
    bus.sync(2)
    for outcomes in ({"a2_0": DONE}, {"a2_0": NO}, {}):
        bus.answer(**outcomes)
        bus.answer(a0_0=DONE, a1_0=DONE)
    (report,) = bus.synced
    assert (report.loaded, report.unproven, report.quarantined, report.joining) == ((0, 1), (2,), (), ())


def test_a_new_replica_that_could_not_load_what_is_committed_is_waited_for_since_it_launches_no_more() -> None:
    bus = grown("2.0")
    bus.status("2.0", AgentStatus(ready=False, tokenizer="present", generating=False, version=0, quarantined=1))
    bus.sync(2)
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=DONE)
        assert not bus.synced
        bus.answer(a2_0=DONE)
    (report,) = bus.synced
    assert (report.loaded, report.joining, report.unproven) == ((0, 1, 2), (), ())


def test_a_new_replica_that_dies_is_out_of_reach_and_not_joining() -> None:
    bus = grown("2.0")
    bus.sync(2)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.lose("2.0")
    bus.answer(a0_0=DONE, a1_0=DONE)
    (report,) = bus.synced
    assert (report.loaded, report.unproven, report.joining) == ((0, 1), (2,), ())


def test_a_new_replica_is_waited_for_where_the_others_are_too_few_or_there_are_none() -> None:
    bus = grown("2.0")
    bus.sync(2, quorum=3)
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert bus.published == []
    bus.answer(a2_0=DONE)
    assert phase(bus).phase == "load"
    bus = grown("2.0")
    for agent in ("0.0", "1.0"):
        bus.lose(agent)
    bus.retire("0", "1")
    bus.sync(2)
    assert bus.state.open[-1].waiting == {"2.0"} and bus.synced == []


def test_a_replica_is_new_until_it_holds_what_is_committed_and_never_again() -> None:
    bus = grown("2.0")
    bus.status("2.0", UP)
    assert not bus.state.members["2.0"].settled, "it has loaded nothing yet"
    bus.status("2.0", HOLDS_1)
    bus.status("2.0", LAUNCHING)
    bus.sync(2, on_unreachable="wait")
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert bus.published == [] and bus.state.open[-1].waiting == {"2.0"}


def test_a_new_replica_that_gets_the_weights_of_the_last_sync_in_the_middle_of_the_next_holds_up_neither() -> None:
    bus = grown("2.0")
    bus.sync(2)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.status("2.0", replace(HOLDS_1, ready=False, generating=False))  # stays paused, and begins to load version 2
    for _ in range(2):
        bus.answer(a0_0=DONE, a1_0=DONE)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.joining) == ("committed", (0, 1), (2,))


def test_a_sync_waits_again_for_a_replica_that_has_settled_since_it_began() -> None:
    bus = grown()
    bus.sync(1, adapter="policy", path="policy/1")
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=DONE)
    bus.arrive("2.0")
    bus.sync(2, adapter="policy", path="policy/2")
    for _ in range(2):
        bus.answer(a2_0=DONE)
        bus.answer(a0_0=DONE, a1_0=DONE)
    bus.status("2.0", HOLDS_1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert bus.synced == [] and bus.state.open[-1].waiting == {"2.0"}
    bus.answer(a2_0=DONE)
    (report,) = bus.synced
    assert (report.loaded, report.joining) == ((0, 1, 2), ())
