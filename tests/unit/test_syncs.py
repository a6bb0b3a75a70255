"""What a trainer does to a sync: it names a version, sends the weights, or says that it can't."""

import pytest
from msgspec.structs import replace

from controlplane.machine.coordinator import next_deadline
from controlplane.machine.versions import LOADED_MAX, VERSION_MAX
from schemas.commands import Checkpoint, Manifest, Pushed, Target, WeightSync
from schemas.desired import Committed, Desired
from schemas.errors import CommandFailed
from schemas.outcomes import Missing, Outcome, Reason, Skipped
from tests.unit.fleets import DONE, SECOND_US, Coordinator
from tests.unit.test_weights import ALL, ONLY_0, fleet, phase, run_phases

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


def test_a_run_can_still_count_on_from_the_largest_version_that_may_be_asked_for() -> None:
    bus = fleet()
    ticket = bus.sync(VERSION_MAX + 1)
    assert [refused[:2] for refused in bus.refused] == [(ticket, "command")]
    bus.sync(VERSION_MAX)
    run_phases(bus, ALL, ALL, ALL)
    bus.sync(None)
    assert phase(bus).version == VERSION_MAX + 1


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


def pushed(bus: Coordinator, version: int | None, label: str, content: str | None = None) -> str:
    """Ask for a sync of pushed weights, and end it if it begins; returns why it was refused."""
    manifest = Manifest(tensors=1, nbytes=1, layout="a", content=content) if content else None
    bus.sync(version, source=Pushed(label), manifest=manifest)
    if bus.refused:
        return bus.refused[0][2]
    run_phases(bus, ALL, ALL, ALL)
    return ""


def test_a_label_is_not_used_for_other_bytes() -> None:
    bus = fleet()
    assert pushed(bus, 1, "step 7", "a") == pushed(bus, 2, "step 8", "b") == pushed(bus, 3, "step 7", "a") == ""
    assert pushed(bus, 4, "step 7", "b") == (
        "engines may have the label 'step 7' for other weights, which were pushed as version 1. Take another label. "
        "Nothing was published"
    )
    assert pushed(bus, 4, "step 7") == "", "nothing can tell: agents that hold the earlier ones do not take its word"


@pytest.mark.parametrize(("contents", "doubted"), [((None, None), True), (("a", None), True), (("a", "a"), False)])
def test_a_label_that_was_used_again_without_digests_is_said_to_prove_nothing(
    contents: tuple[str | None, str | None], doubted: bool
) -> None:
    bus, (earlier, later) = fleet(), contents
    reasons = []
    for version, (label, content) in enumerate((("step 7", earlier), ("step 8", None), ("step 7", later)), 1):
        assert pushed(bus, version, label, content) == ""
        reasons += [report.reason for report in bus.synced]
    assert len(reasons) == 3 and reasons[:2] == ["", ""]
    assert reasons[2].startswith("label 'step 7' was pushed before, as version 1, and no digests") is doubted


def test_the_label_of_a_push_is_not_the_number_of_a_version_that_agents_load() -> None:
    bus = fleet()
    assert pushed(bus, None, "2") == ""
    bus.sync(2)
    assert "engines may have the label '2' for other weights, which were pushed as version 1" in bus.refused[0][2]
    bus.sync(None)
    assert phase(bus).version == 3, "the run passes over it"
    run_phases(bus, ALL, ALL, ALL)
    assert pushed(bus, None, "4") == "" and bus.state.default_desired.version == 4, "its own number is no other's"


def test_weights_of_another_manifest_are_other_weights() -> None:
    bus = fleet()
    bus.sync(1, path="a")
    run_phases(bus, ALL, ONLY_0, ALL)
    bus.sync(1, path="a", manifest=Manifest(tensors=1, nbytes=1, layout="other"))
    ((_, _, reason),) = bus.refused
    assert "engines may have loaded it from another manifest" in reason


def test_it_stays_used_when_the_trainer_restarts() -> None:
    bus = fleet()
    bus.sync(1, path="a")
    run_phases(bus, ALL)
    bus.open()
    bus.sync(1, path="b")
    assert bus.refused and bus.published == []


def test_a_version_that_no_agent_was_told_to_load_may_be_used_for_other_weights() -> None:
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


def test_a_version_between_two_that_are_remembered_was_never_used() -> None:
    bus = fleet()
    for version in range(2, 2 * LOADED_MAX + 4, 2):
        bus.sync(version, target=Target(replicas=frozenset({0, 1})))
        run_phases(bus, *[{**ALL, "2": Skipped(Reason.NOT_TARGETED)}] * 3)
    assert [bus.state.loaded[0].weights.version, len(bus.state.loaded)] == [4, LOADED_MAX]
    bus.sync(5)
    assert bus.refused == [] and phase(bus).version == 5


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
    assert bus.state.sync is None and replace(bus.state.default_desired, uncommitted=None) == Desired()
    bus.sync(2)  # the next one need not wait for the answers to the abort
    assert phase(bus).phase == "prepare"


def test_a_late_or_foreign_failure_to_send_changes_nothing() -> None:
    bus = fleet()
    ticket = bus.sync(1)
    bus.send_failed(ticket)  # before any replica loads, there is nothing that waits
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
    bus.send_returned(ticket)  # no replica loads yet
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
    assert (bus.synced[0].loaded, bus.synced[0].unproven) == ((0, 1), (2,)), "no phase waits for the engine that does"


def test_a_sender_that_returned_late_does_not_lengthen_the_phase() -> None:
    bus = fleet()
    ticket = bus.sync(1)
    run_phases(bus, ALL)
    bus.send_returned(ticket, at_us=29 * SECOND_US)
    assert deadline_us(bus) == 30 * SECOND_US


def deadline_us(bus: Coordinator) -> int:
    return bus.state.open[-1].deadline_us


def sending(outcomes: dict[str, Outcome] = ALL) -> tuple[Coordinator, int]:
    """A sync whose weights a sender of the trainer's sends, once all replicas report them."""
    bus = fleet()
    ticket = bus.sync(1, sends=True)
    run_phases(bus, ALL, outcomes)
    return bus, ticket


def test_nothing_is_committed_before_the_sender_has_returned() -> None:
    bus, ticket = sending()
    assert bus.published == [] and bus.synced == []
    assert next_deadline(bus.state) == 30 * SECOND_US
    bus.send_returned(ticket + 7)
    assert bus.published == []
    bus.send_returned(ticket, at_us=SECOND_US)
    assert phase(bus).phase == "commit"
    run_phases(bus, ALL)
    assert bus.synced[0].loaded == (0, 1, 2)


def test_a_sender_that_returned_before_the_engines_loaded_holds_nothing_up() -> None:
    bus = fleet()
    ticket = bus.sync(1, sends=True)
    run_phases(bus, ALL)
    bus.send_returned(ticket)
    run_phases(bus, ALL)
    assert phase(bus).phase == "commit"


def test_a_sender_that_raises_after_the_engines_reported_the_weights_aborts_the_sync() -> None:
    bus, ticket = sending()
    bus.send_failed(ticket)
    assert phase(bus).phase == "abort"
    (report,) = bus.synced
    assert (report.status, report.unproven) == ("aborted", (0, 1, 2)) and "RuntimeError: no group" in report.reason


def test_a_sender_that_does_not_return_aborts_the_sync_at_the_deadline_of_the_load() -> None:
    bus, ticket = sending()
    bus.time(30 * SECOND_US)
    assert phase(bus).phase == "abort"
    assert bus.synced[0].reason == "the trainer's sender had not returned by the deadline"
    bus.send_returned(ticket)
    assert bus.published == []


def test_a_sync_that_waits_for_its_sender_ends_with_the_bus() -> None:
    bus, sync = sending()
    bus.sync(2)
    assert "a sync to version 1 is in its load phase" in bus.refused[0][2]
    bus.close()
    assert phase(bus).phase == "abort"
    ((ticket, kind, reason),) = bus.refused
    assert (ticket, kind) == (sync, "closed") and "in the load phase" in reason, "nothing of it was committed"


@pytest.mark.parametrize("phases", [0, 1, 2])
def test_a_sync_whose_bus_closes_ends_as_the_fleet_will(phases: int) -> None:
    """What was published is heard: a commit is never taken back."""
    bus = fleet()
    sync = bus.sync(1)
    run_phases(bus, *[ALL] * phases)
    bus.answer(a0_0=DONE)
    bus.close()
    if phases < 2:
        assert phase(bus).phase == "abort"
        assert [refused[:2] for refused in bus.refused] == [(sync, "closed")]
        return
    assert bus.published == [] and bus.refused == []
    (report,) = bus.synced
    assert (report.status, report.loaded, report.unproven) == ("committed", (0,), (1, 2))
    assert bus.state.default_desired.version == 1


def test_a_bus_that_closes_in_an_abort_says_so_and_asks_for_no_second_one() -> None:
    bus = fleet()
    bus.sync(1)
    run_phases(bus, ONLY_0)
    bus.close()
    assert bus.published == [] and (bus.synced[0].status, bus.synced[0].unproven) == ("aborted", (0, 1, 2))
