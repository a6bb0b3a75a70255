"""What a trainer does to a sync: it names a version, sends the weights, or says that it can't."""

import pytest

from controlplane.machine.syncs import LOADED_MAX
from schemas.commands import Checkpoint, Target, WeightSync
from schemas.desired import Committed, Desired
from schemas.errors import CommandFailed
from schemas.identity import NUMBER_MAX
from schemas.outcomes import Missing, Reason, Skipped
from tests.unit.fleets import DONE, Coordinator
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
    assert (report.status, report.loaded, report.quarantined, report.unproven) == ("aborted", (), (), (1, 2))
    assert report.headline.endswith(
        "aborted; unproven: replicas 1, 2: the trainer could not send the weights: RuntimeError: no group"
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
