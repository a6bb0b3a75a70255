"""What a trainer does to a sync: it names a version, sends the weights, or says that it can't."""

from typing import Literal

import pytest

from controlplane.machine.coordinator import next_deadline
from controlplane.machine.events import Conclude
from controlplane.machine.syncs import LOADED_MAX
from schemas.commands import Checkpoint, Target, WeightSync
from schemas.desired import Committed, Desired
from schemas.errors import CommandFailed
from schemas.identity import NUMBER_MAX
from schemas.outcomes import Missing, Reason, Skipped
from tests.unit.fleets import DONE, SECOND_US, Coordinator
from tests.unit.test_weights import ALL, BUT_2, ONLY_0, fleet, phase, run_phases

# --- versions ---------------------------------------------------------------------------------------------------------


def test_without_a_version_the_run_counts_on_from_the_newest_that_was_ever_requested() -> None:
    bus = fleet()
    versions = []
    for version, outcomes in ((None, ALL), (7, ONLY_0), (None, ALL), (3, ONLY_0), (None, ALL)):
        bus.sync(version, path="a")
        versions.append(phase(bus).version)
        run_phases(bus, *[outcomes] * 3)
        bus.close()
        bus.open()
        for agent in ("0.0", "1.0", "2.0"):
            bus.arrive(agent)
    assert versions == [1, 7, 8, 3, 9]


def test_the_report_says_which_version_the_run_chose() -> None:
    bus = fleet()
    bus.sync(None)
    run_phases(bus, ALL, ALL, ALL)
    assert bus.synced[0].version == 1 and bus.state.default_desired.version == 1


def test_a_count_that_has_reached_its_bound_is_refused() -> None:
    bus = fleet()
    bus.sync(NUMBER_MAX)
    run_phases(bus, ONLY_0, ALL)
    ticket = bus.sync(None)
    assert [refused[:2] for refused in bus.refused] == [(ticket, "command")]


def test_a_version_that_replicas_were_told_to_load_is_not_used_for_other_weights() -> None:
    bus = fleet()
    bus.sync(1, path="a")
    run_phases(bus, ALL, ONLY_0, ALL)
    assert bus.synced[0].status == "aborted"
    ticket = bus.sync(1, path="b")
    assert bus.published == [] and bus.state.sync is None
    ((number, kind, reason),) = bus.refused
    assert (number, kind) == (ticket, "command")
    assert reason == (
        "version 1 was used before: engines may have loaded it from a. Take a newer one, or None to let the run count. "
        "Nothing was published"
    )
    bus.sync(1, path="a")
    run_phases(bus, ALL, ALL, ALL)
    assert bus.state.default_desired.version == 1, "the same weights may be tried again"
    bus.sync(1, path="b")
    assert bus.refused, "nor is a committed version"


def test_it_stays_used_when_the_trainer_restarts() -> None:
    bus = fleet()
    bus.sync(1, path="a")
    run_phases(bus, ALL)
    bus.open()
    bus.sync(1, path="b")
    assert bus.refused and bus.published == []


def test_a_version_that_nobody_was_told_to_load_may_be_used_for_other_weights() -> None:
    bus = fleet()
    bus.sync(1, path="a")
    run_phases(bus, ONLY_0, ALL)
    bus.sync(1, path="b")
    assert phase(bus).source == Checkpoint("b")
    run_phases(bus, ALL, ALL, ALL)
    assert bus.state.default_desired.committed == Committed(1, Checkpoint("b"), None)


def test_what_was_loaded_is_remembered_within_bounds() -> None:
    bus = fleet()
    for version in range(2, LOADED_MAX + 3):
        bus.sync(version, target=Target(replicas=frozenset({0, 1})))
        run_phases(bus, *[{**ALL, "2": Skipped(Reason.NOT_TARGETED)}] * 3)
    assert len(bus.state.loaded) == LOADED_MAX
    bus.sync(2, path="b", target=Target(replicas=frozenset({0})))
    assert phase(bus).phase == "prepare", "it ends as stale"
    run_phases(bus, {**ALL, "0": Skipped(Reason.STALE_VERSION)}, ALL)
    bus.sync(2, path="b")
    assert "version 2 may have been used before" in bus.refused[0][2], "replica 2 was never told of a version"


# --- weights that are not sent ----------------------------------------------------------------------------------------


def test_a_sender_that_raises_ends_the_load_phase_at_once_and_the_report_says_why() -> None:
    bus = fleet()
    ticket = bus.sync(1)
    run_phases(bus, ALL)
    bus.answer(a0_0=DONE)
    bus.send_failed(ticket)
    assert phase(bus) == WeightSync(phase="abort", version=1)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined, report.unproven) == ("aborted", (), (), (0, 1, 2))
    assert report.headline.endswith(
        "aborted; unproven: replicas 0 … 2: the trainer could not send the weights: RuntimeError: no group"
    )
    assert [line.conclusion for line in report.phases[-1].outcomes] == [DONE, Missing("not_sent"), Missing("not_sent")]
    with pytest.raises(CommandFailed, match="no group"):
        report.raise_for_failures()
    assert bus.state.sync is None and bus.state.default_desired == Desired()
    bus.sync(2)  # the next one need not wait for the answers to the abort
    assert phase(bus).phase == "prepare"


def test_a_late_or_foreign_failure_to_send_changes_nothing() -> None:
    bus = fleet()
    ticket = bus.sync(1)
    bus.send_failed(ticket)  # before anybody loads, there is nothing that waits
    assert phase_of(bus) == "prepare"
    run_phases(bus, ALL)
    bus.send_failed(ticket + 7)
    assert phase_of(bus) == "load"
    run_phases(bus, ALL)
    bus.send_failed(ticket)
    assert phase_of(bus) == "commit"


def phase_of(bus: Coordinator) -> str | None:
    return bus.state.sync.phase if bus.state.sync is not None else None


# --- weights that were sent -------------------------------------------------------------------------------------------


def test_a_sender_that_returned_leaves_the_load_phase_a_short_time() -> None:
    bus = fleet()
    ticket = bus.sync(1)
    bus.send_returned(ticket)  # nobody loads yet
    run_phases(bus, ALL)
    bus.send_returned(ticket + 7)
    assert deadline_us(bus) == 30 * SECOND_US
    bus.send_returned(ticket, at_us=SECOND_US)
    assert deadline_us(bus) == 11 * SECOND_US
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.time(11 * SECOND_US)
    assert phase(bus) == WeightSync(phase="commit", version=1, source=Checkpoint("v1"), quarantine=frozenset({2}))
    bus.send_returned(ticket, at_us=12 * SECOND_US)
    assert deadline_us(bus) == 41 * SECOND_US
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert (bus.synced[0].loaded, bus.synced[0].unproven) == ((0, 1), (2,)), "nobody waits for the engine that does"


def test_a_sender_that_returned_without_having_sent_ends_the_sync_though_the_engines_go_on_waiting() -> None:
    bus = fleet()
    ticket = bus.sync(1)
    run_phases(bus, ALL)
    bus.send_returned(ticket)
    bus.time(10 * SECOND_US)
    assert bus.synced[0].status == "aborted" and bus.state.sync is None


def test_a_sender_that_returned_late_does_not_lengthen_the_phase() -> None:
    bus = fleet()
    ticket = bus.sync(1)
    run_phases(bus, ALL)
    bus.send_returned(ticket, at_us=29 * SECOND_US)
    assert deadline_us(bus) == 30 * SECOND_US


def deadline_us(bus: Coordinator) -> int:
    return bus.state.open[-1].deadline_us


# --- phase by phase ---------------------------------------------------------------------------------------------------

PREPARE = 99


def prepared() -> tuple[Coordinator, int]:
    """A sync whose phases are asked for, after its prepare phase."""
    bus = fleet()
    ticket = bus.sync(1, prepare=PREPARE)
    assert phase(bus).phase == "prepare"
    run_phases(bus, ALL)
    return bus, ticket


def concluded(bus: Coordinator) -> list[int | None]:
    """Tickets of what the last event ended."""
    return [effect.ticket for effect in bus.of(Conclude)]


def test_a_phase_that_is_asked_for_waits_for_the_trainer_and_reports_by_itself() -> None:
    bus, sync = prepared()
    assert bus.published == [] and concluded(bus) == [PREPARE]
    load = bus.ask(sync, "load")
    assert phase(bus) == WeightSync(phase="load", version=1)
    run_phases(bus, BUT_2)
    assert bus.published == [] and concluded(bus) == [load]
    commit = bus.ask(sync, "commit")
    assert phase(bus).quarantine == {2}
    run_phases(bus, BUT_2)
    assert concluded(bus) == [commit, sync]
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined, len(report.phases)) == ("committed", (0, 1), (2,), 3)


@pytest.mark.parametrize("asked", ["load", "commit"])
def test_a_phase_that_too_few_replicas_followed_ends_the_sync_at_once(asked: Literal["load", "commit"]) -> None:
    bus = fleet()
    sync = bus.sync(1, prepare=PREPARE)
    run_phases(bus, ONLY_0)
    assert phase(bus).phase == "abort"
    ticket = bus.ask(sync, asked)
    assert bus.refused == [
        (ticket, "command", "the sync to version 1 is in its abort phase: wait for the report of that")
    ]
    run_phases(bus, ALL)
    assert bus.synced[0].status == "aborted"
    ticket = bus.ask(sync, asked)
    assert bus.refused == [(ticket, "command", f"its sync has ended, as its report says: nothing is left to {asked}")]


def test_a_phase_out_of_order_is_refused_and_changes_nothing() -> None:
    bus = fleet()
    sync = bus.sync(1, prepare=PREPARE)
    ticket = bus.ask(sync, "load")
    assert bus.refused == [
        (ticket, "command", "the sync to version 1 is in its prepare phase: wait for the report of that")
    ]
    run_phases(bus, ALL)
    ticket = bus.ask(sync, "commit")
    assert bus.refused == [(ticket, "command", "the sync to version 1 goes on with load, not with commit")]
    bus.ask(sync, "load")
    assert phase(bus).phase == "load"


@pytest.mark.parametrize("phases", [0, 1, 2], ids=["prepare open", "prepared", "loading"])
def test_a_trainer_may_abort_at_any_time_before_the_commit(phases: int) -> None:
    bus = fleet()
    sync = bus.sync(1, prepare=PREPARE)
    if phases:
        run_phases(bus, ALL)
    if phases == 2:
        bus.ask(sync, "load")
    ticket = bus.ask(sync, "abort")
    assert phase(bus) == WeightSync(phase="abort", version=1)
    (report,) = bus.synced
    assert (report.status, report.reason) == ("aborted", "the trainer aborted it")
    assert bus.state.sync is None and set(bus.state.desired.values()) == {Desired()}
    run_phases(bus, ALL)
    assert concluded(bus) == [ticket]


def test_a_commit_cannot_be_aborted() -> None:
    bus, sync = prepared()
    bus.ask(sync, "load")
    run_phases(bus, ALL)
    bus.ask(sync, "commit")
    bus.ask(sync, "abort")
    assert bus.refused and bus.published == []
    run_phases(bus, ALL)
    assert bus.state.default_desired.version == 1


def test_a_trainer_that_does_not_go_on_is_ended_by_the_deadline_of_the_phase() -> None:
    bus, _ = prepared()
    assert next_deadline(bus.state) == 30 * SECOND_US
    bus.time(30 * SECOND_US - 1)
    assert bus.published == []
    bus.time(30 * SECOND_US)
    assert phase(bus).phase == "abort"
    assert bus.synced[0].reason == "the trainer did not ask for its load phase in time"
    assert bus.synced[0].status == "aborted" and bus.state.sync is None


def test_a_sync_that_waits_for_its_trainer_ends_with_the_bus() -> None:
    bus, sync = prepared()
    bus.close()
    assert phase(bus).phase == "abort"
    assert [refused[:2] for refused in bus.refused] == [(sync, "closed")]


def test_a_request_that_is_refused_ends_both_of_its_tickets() -> None:
    bus, _ = prepared()
    second = bus.sync(2, prepare=77)
    assert [refused[:2] for refused in bus.refused] == [(second, "sync_in_progress"), (77, "sync_in_progress")]
