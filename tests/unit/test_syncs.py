"""What a trainer does to a sync: it names a version, sends the weights, or says that it can't."""

import pytest

from schemas.commands import WeightSync
from schemas.desired import Desired
from schemas.errors import CommandFailed
from schemas.outcomes import Missing
from tests.unit.fleets import DONE, Coordinator
from tests.unit.test_weights import ALL, fleet, phase, run_phases

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
