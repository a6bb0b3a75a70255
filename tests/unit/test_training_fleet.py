"""Training ranks in the fleet: what they are asked to do, and what does not involve them."""

from controlplane.machine.events import Conclude
from controlplane.machine.status import fleet_status
from schemas.commands import ProfileCommand, ProfilePlan, Target
from schemas.desired import Desired, ProfileSession
from schemas.outcomes import Reason, Skipped
from schemas.wire import Snapshot
from tests.unit.fleets import DONE, NO, Coordinator

NOT_AN_ENGINE = Skipped(Reason.NOT_AN_ENGINE)
ACTORS = ProfilePlan(discrete=True)
START = ProfileCommand(action="start", step=3, roles={"actor": ACTORS})


def fleet() -> Coordinator:
    return Coordinator("0.0", "actor.0", "actor.1")


def test_a_sync_involves_replicas_only() -> None:
    bus = fleet()
    ticket = bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, actor_0=NOT_AN_ENGINE, actor_1=NOT_AN_ENGINE)
    (done,) = [conclusion.report for conclusion in bus.of(Conclude) if conclusion.ticket == ticket]
    assert (done.status, done.loaded, done.quarantined) == ("committed", (0,), ())  # type: ignore[union-attr]
    assert bus.state.desired["actor.0"] == Desired()


def test_each_unit_profiles_by_its_own_plan() -> None:
    bus = fleet()
    bus.issue(START)
    assert bus.state.desired[0].profile == ProfileSession(3, ProfilePlan())
    assert bus.state.desired["actor.1"].profile == ProfileSession(3, ACTORS)
    bus.answer(a0_0=DONE, actor_0=DONE, actor_1=NO)
    assert bus.state.desired["actor.0"].profile is not None and bus.state.desired["actor.1"].profile is None


def test_a_target_of_replicas_does_not_include_ranks_of_that_number() -> None:
    bus = fleet()
    bus.issue(START, target=Target(replicas=frozenset({0})))
    assert bus.state.desired[0].profile is not None and bus.state.desired["actor.0"].profile is None


def test_a_returning_rank_learns_of_the_session_and_a_new_one_does_not() -> None:
    bus = fleet()
    bus.issue(START)
    bus.lose("actor.0")
    bus.hello("actor.0", "b")
    bus.join("actor.0", "b")
    assert bus.sent == [("actor.0/b", Snapshot(desired=Desired(profile=ProfileSession(3, ACTORS))))]
    bus.hello("actor.7")
    bus.join("actor.7")
    assert bus.sent == [("actor.7/a", Snapshot(desired=Desired()))]


def test_a_new_trainer_keeps_ranks_apart_from_replicas() -> None:
    bus = fleet()
    bus.issue(START)
    bus.lose("actor.0", "left")
    bus.open()  # the next trainer, on the same log
    bus.issue(START)
    assert bus.state.desired["actor.0"].profile == ProfileSession(3, ACTORS)


def test_replicas_are_listed_before_training_ranks() -> None:
    bus = Coordinator("critic.0", "actor.10", "actor.2", "1.0", "0.0")
    names = [agent.agent for agent in fleet_status(bus.state, 0, "log", {}).agents]
    assert names == ["0.0", "1.0", "actor.2", "actor.10", "critic.0"]
