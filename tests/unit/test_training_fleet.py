"""Training ranks in the fleet: what is desired of them, what they owe, and what they have no part in."""

from controlplane.machine.events import Conclude
from controlplane.machine.status import fleet_status
from schemas.commands import ProfileCommand, ProfilePlan, Target
from schemas.desired import Desired, ProfileSession
from schemas.outcomes import Reason, Skipped
from schemas.reports import SyncReport
from schemas.wire import Snapshot
from tests.unit.fleets import DONE, NO, Coordinator

NOT_AN_ENGINE = Skipped(Reason.NOT_AN_ENGINE)
ACTORS = ProfilePlan(discrete=True)
START = ProfileCommand(action="start", step=3, roles={"actor": ACTORS})


def fleet() -> Coordinator:
    return Coordinator("0.0", "actor.0", "actor.1")


def test_a_sync_is_the_replicas_business() -> None:
    bus = fleet()
    ticket = bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, actor_0=NOT_AN_ENGINE, actor_1=NOT_AN_ENGINE)
    (done,) = [one.report for one in bus.of(Conclude) if one.ticket == ticket]
    assert (done.status, done.loaded, done.quarantined) == ("committed", (0,), ())  # type: ignore[union-attr]
    assert bus.state.desired["actor.0"] == Desired()


def test_a_rank_that_is_missing_does_not_fail_a_sync() -> None:
    bus = fleet()
    ticket = bus.sync(1)
    bus.answer(a0_0=DONE, actor_0=NOT_AN_ENGINE, actor_1=NOT_AN_ENGINE)
    bus.answer(a0_0=DONE, actor_0=NOT_AN_ENGINE, actor_1=NOT_AN_ENGINE)
    bus.answer(a0_0=DONE, actor_1=NOT_AN_ENGINE)
    bus.lose("actor.0")
    (done,) = [one.report for one in bus.of(Conclude) if one.ticket == ticket]
    assert isinstance(done, SyncReport)
    done.raise_for_failures()


def test_each_unit_is_desired_to_profile_by_its_own_plan() -> None:
    bus = fleet()
    bus.issue(START)
    assert bus.state.desired[0].profile == ProfileSession(3, ProfilePlan())
    assert bus.state.desired["actor.1"].profile == ProfileSession(3, ACTORS)
    bus.answer(a0_0=DONE, actor_0=DONE, actor_1=NO)
    assert bus.state.desired["actor.0"].profile is not None and bus.state.desired["actor.1"].profile is None


def test_replicas_in_a_target_do_not_name_the_rank_of_that_number() -> None:
    bus = fleet()
    bus.issue(START, target=Target(replicas=frozenset({0})))
    assert bus.state.desired[0].profile is not None and bus.state.desired["actor.0"].profile is None


def test_a_rank_that_comes_back_is_told_of_the_session_and_one_that_was_never_seen_is_not() -> None:
    bus = fleet()
    bus.issue(START)
    bus.lose("actor.0")
    bus.hello("actor.0", "b")
    bus.join("actor.0", "b")
    assert bus.sent == [("actor.0/b", Snapshot(desired=Desired(profile=ProfileSession(3, ACTORS))))]
    bus.hello("actor.7")
    bus.join("actor.7")
    assert bus.sent == [("actor.7/a", Snapshot(desired=Desired()))]


def test_a_fleet_that_outlived_its_trainer_keeps_its_ranks_apart_from_its_replicas() -> None:
    bus = fleet()
    bus.issue(START)
    bus.lose("actor.0", "left")
    bus.open()  # the next trainer, on the same log
    bus.issue(START)
    assert bus.state.desired["actor.0"].profile == ProfileSession(3, ACTORS)


def test_replicas_stand_before_training_ranks() -> None:
    bus = Coordinator("critic.0", "actor.10", "actor.2", "1.0", "0.0")
    names = [one.agent for one in fleet_status(bus.state, 0, "log", {}).agents]
    assert names == ["0.0", "1.0", "actor.2", "actor.10", "critic.0"]
