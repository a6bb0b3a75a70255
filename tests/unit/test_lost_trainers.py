"""What an agent does once its trainer is lost: by the lease, after restarts without a bus, and by the next trainer."""

import pytest
from msgspec.structs import replace

from schemas import events
from schemas.commands import EngineCommand, EpochStart
from schemas.desired import Desired, desired_after
from tests.unit.machines import (
    PRESENT,
    PRIMARY,
    START,
    agent,
    called,
    carry_out,
    command,
    fault,
    fold,
    looked,
    observed,
    sync,
)
from tests.unit.test_machine_lives import PAUSED, RESTARTED, V1, snapshot
from workers.machine.readiness import in_sync
from workers.machine.state import AgentState, call_name
from workers.machine.suppressed import still_desired

LEASE_OVER = events.LeaseExpired(at_ms=0)
NEXT_TRAINER = EpochStart(previous_epoch=1, logic=1)
WAITS_FOR_BUS = replace(RESTARTED, settings=events.MachineSettings(on_lost_bus="pause"))


def test_an_agent_that_restarts_without_a_bus_returns_to_the_committed_weights_when_its_lease_expires() -> None:
    seen = replace(PRESENT, version=1)
    state, effects = fold(agent(seen=seen, desired=Desired(committed=V1)), command(sync("prepare", 2), 1))
    state, _, seen = carry_out(state, effects, seen)
    state, effects = fold(state, command(sync("load", 2), 2))
    state, _, seen = carry_out(state, effects, seen)
    assert seen.version == 2 and not seen.generating
    state, effects = fold(state, RESTARTED, RESTARTED, observed(seen))
    assert called(effects) == []
    state, effects = fold(state, LEASE_OVER)
    state, _, seen = carry_out(state, effects, seen)
    assert seen.generating and seen.version == 1 and not in_sync(state)
    _, effects = fold(state, snapshot(Desired(committed=V1, generation="paused"), seq=9))
    assert called(effects) == ["pause"]


def test_an_agent_that_restarts_without_a_bus_ends_the_session_when_its_lease_expires() -> None:
    state, effects = fold(agent(), command(START))
    state, _, seen = carry_out(state, effects)
    state, effects = fold(state, RESTARTED, observed(seen), LEASE_OVER)
    assert called(looked(state, effects, seen)[1]) == ["stop_profile"]


def test_without_a_bus_nothing_is_asked_of_an_engine_that_was_launched_since() -> None:
    """It may be of another run, whose trainer has not started yet."""
    seen = replace(PRESENT, version=1)
    launched = observed(replace(PRESENT, instance="two"))
    for order in ((launched, LEASE_OVER), (LEASE_OVER, launched)):
        state, effects = fold(agent(desired=Desired(committed=V1), seen=seen), RESTARTED, *order)
        assert called(effects) == []


@pytest.mark.parametrize(
    ("begun", "seen"),
    [
        (AgentState(), PRESENT),
        (agent(), PRESENT),
        (agent(desired=Desired(committed=V1), seen=replace(PRESENT, version=1)), replace(PRESENT, version=1)),
        (agent(desired=Desired(committed=V1), seen=replace(PRESENT, version=1)), replace(PRESENT, instance="two")),
    ],
    ids=["first start", "nothing committed", "committed", "relaunched"],
)
def test_an_engine_that_waits_for_a_bus_is_paused_after_a_lease_although_its_agent_was_restarted(
    begun: AgentState, seen: events.Observation
) -> None:
    state, effects = fold(begun, WAITS_FOR_BUS, observed(seen), LEASE_OVER)
    state, calls, seen = carry_out(state, effects, seen)
    assert not seen.generating and [call_name(call) for call in calls] == ["observe", "pause"]


def test_an_engine_that_waits_for_a_bus_is_paused_although_it_is_not_known_which_of_its_memory_is_released() -> None:
    """It was relaunched during a sleep, so it may be asleep. A pause does no harm in either case."""
    unseen = replace(PRESENT, asleep=None)
    state, _ = fold(agent(seen=unseen), WAITS_FOR_BUS, observed(unseen), snapshot(Desired(), seq=0))
    state, _ = fold(state, command(EngineCommand(operation="sleep")), returned(1, replace(unseen, generating=False)))
    state, _ = fold(state, returned(2, replace(unseen, instance="two")))
    assert state.engine.lost and state.engine.generating
    state, effects = fold(state, LEASE_OVER)
    state, calls, _ = carry_out(state, effects, replace(unseen, instance="two"))
    assert [call_name(call) for call in calls] == ["observe", "pause"]


def returned(call_id: int, seen: events.Observation) -> events.EngineReturned:
    return events.EngineReturned(at_ms=1, call_id=call_id, result=events.Returned(), observation=seen)


# --- a trainer that was lost in a sync --------------------------------------------------------------------------------


def in_first_sync(loaded: bool) -> tuple[AgentState, events.Observation]:
    """Return an agent in the load phase of the run's first sync, and what is observed of its engine."""
    state, effects = fold(agent(), command(sync("prepare"), 1))
    state, _, seen = carry_out(state, effects)
    state, effects = fold(state, command(sync("load"), 2))
    if not loaded:
        return fault(state, "cut off", seen)[0], seen
    state, _, seen = carry_out(state, effects, seen)
    return state, seen


@pytest.mark.parametrize("loss", ["lease", "restart", "next trainer", "next trainer and a restart"])
def test_weights_of_the_first_sync_are_served_once_its_trainer_is_lost(loss: str) -> None:
    state, seen = in_first_sync(loaded=True)
    assert seen.version == 1 and not seen.generating
    orphan = desired_after(state.desired, NEXT_TRAINER, True, PRIMARY)
    following: dict[str, tuple[events.Event, ...]] = {
        "lease": (LEASE_OVER,),
        "restart": (RESTARTED, observed(seen), LEASE_OVER),
        "next trainer": (command(NEXT_TRAINER, 3, epoch=2),),
        "next trainer and a restart": (RESTARTED, observed(seen), snapshot(orphan, 3, 2)),
    }
    state, effects = fold(state, *following[loss])
    state, calls, seen = carry_out(state, effects, seen)
    assert seen.generating and seen.version == 1
    looks = ["observe"] if following[loss][-1] is LEASE_OVER else []
    assert [call_name(call) for call in calls] == [*looks, "flush", "resume"]


def test_an_engine_torn_in_the_first_sync_loads_its_weights_again_once_the_trainer_is_lost() -> None:
    state, seen = in_first_sync(loaded=False)
    state, effects = fold(state, command(NEXT_TRAINER, 3, epoch=2))
    state, calls, seen = carry_out(state, effects, seen)
    assert seen.generating and seen.version == 1 and "load" in map(call_name, calls)


def test_an_engine_that_never_began_the_first_load_serves_the_weights_of_its_launch() -> None:
    _, effects = fold(AgentState(), RESTARTED, observed(PAUSED), snapshot(Desired(fallback=V1)))
    assert called(effects) == ["resume"]


def test_the_first_commit_ends_the_fallback() -> None:
    after = desired_after(Desired(fallback=V1, uncommitted=V1), sync("commit", 2), True, PRIMARY)
    assert (after.fallback, after.uncommitted, after.version) == (None, None, 2)


@pytest.mark.parametrize("loss", [LEASE_OVER, command(NEXT_TRAINER, 4, epoch=2)], ids=["lease", "next trainer"])
def test_after_an_abort_of_the_first_sync_its_weights_are_not_served_before_the_trainer_is_lost(
    loss: events.Event,
) -> None:
    """A trainer that lives was told: the replicas move together or not at all."""
    state, seen = in_first_sync(loaded=True)
    state, effects = fold(state, command(sync("abort"), 3))
    assert called(effects) == [] and state.desired.fallback is None
    state, effects = fold(state, loss)
    assert carry_out(state, effects, seen)[2].generating


@pytest.mark.parametrize("by", ["coordinator", "agent"])
@pytest.mark.parametrize("loss", ["lease", "next trainer"])
def test_a_quarantine_ends_with_a_sync_that_loses_its_trainer(by: str, loss: str) -> None:
    state = agent(desired=Desired(committed=V1), seen=replace(PRESENT, version=1))
    seen = replace(PRESENT, version=1)
    state, effects = fold(state, command(sync("prepare", 2), 1))
    state, _, seen = carry_out(state, effects, seen)
    load = sync("load", 2, quarantine=frozenset({0}) if by == "coordinator" else frozenset())
    state, effects = fold(state, command(load, 2))
    if by == "agent":
        state, _ = fault(state, "No such file.", seen)
    assert still_desired(state.desired, state.suppressed).quarantined == 2
    lost = LEASE_OVER if loss == "lease" else command(NEXT_TRAINER, 3, epoch=2)
    state, effects = fold(state, lost)
    state, _, seen = carry_out(state, effects, seen)
    assert seen.generating and seen.version == 1
    assert still_desired(state.desired, state.suppressed).quarantined == 0


@pytest.mark.parametrize("lost", [LEASE_OVER, command(NEXT_TRAINER, 1, epoch=2)])
def test_a_quarantine_from_a_committed_sync_outlives_its_trainer(lost: events.Event) -> None:
    state = agent(desired=Desired(committed=V1, quarantined=1), seen=PAUSED)
    state, effects = fold(state, lost)
    assert called(effects) == [] and state.desired.quarantined == 1
