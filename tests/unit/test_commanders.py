"""One engine has one commander: what something else did to an engine stands until the bus was heard again."""

from typing import Literal

import pytest
from msgspec.structs import replace

from schemas.commands import Checkpoint, EngineCommand, ProfilePlan, Pushed, WeightSync
from schemas.desired import Committed, Desired, ProfileSession, Syncing
from schemas.events import (
    EngineReturned,
    Event,
    Fault,
    HeadSeen,
    LeaseExpired,
    MachineSettings,
    Observation,
    Returned,
    SnapshotReceived,
    Started,
)
from schemas.identity import OnLostBus
from tests.unit.machines import PRESENT, PRIMARY, called, carry_out, command, fold, looked, observed
from workers.machine.readiness import in_sync, trouble
from workers.machine.state import AgentState, call_name

V1 = Committed(1, Checkpoint("v1"), None)
COMMITTED = Desired(committed=V1)
SERVING = replace(PRESENT, instance="one", version=1, label="1")
PAUSED = replace(SERVING, generating=False)
OTHERS = replace(SERVING, version=2, label="2")
HEARD = HeadSeen(at_ms=5, epoch=1, seq=0)
LEASE = LeaseExpired(at_ms=9)


def agent(desired: Desired = COMMITTED, lost: OnLostBus = "serve", seen: Observation = SERVING) -> AgentState:
    """One that has brought its engine to what is desired."""
    state, effects = fold(
        AgentState(),
        Started(at_ms=0, identity=PRIMARY, incarnation="a", settings=MachineSettings(on_lost_bus=lost)),
        observed(seen),
        SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=desired),
    )
    state, _, _ = carry_out(state, effects, seen)
    return state


@pytest.mark.parametrize(("seen", "undoes"), [(PAUSED, ["resume"]), (OTHERS, ["check_source"])])
def test_what_others_did_is_undone_only_by_an_agent_that_hears_its_bus(seen: Observation, undoes: list[str]) -> None:
    state, effects = fold(agent(), observed(seen), observed(seen))
    assert called(effects) == [] and not in_sync(state)
    state, effects = fold(state, HeadSeen(at_ms=4, epoch=1, seq=0))
    assert called(effects) == undoes


@pytest.mark.parametrize("lost", ["serve", "pause"])
@pytest.mark.parametrize("events", [(observed(PAUSED), LEASE), (observed(OTHERS), LEASE), (LEASE, observed(OTHERS))])
def test_an_agent_that_is_cut_off_leaves_an_engine_that_others_changed_as_it_is(
    events: tuple[Event, ...], lost: OnLostBus
) -> None:
    state = agent(lost=lost)
    if lost == "pause" and events[0] is LEASE:  # its own rule, once
        state, effects = fold(state, LEASE)
        state, made, _ = carry_out(state, effects, SERVING)
        assert [call_name(call) for call in made] == ["observe", "pause"]
    state, effects = fold(state, *events, observed(OTHERS), LEASE, HEARD)
    assert called(effects) == [], "a head alone does not say what is desired"
    assert trouble(state) == "something else commands its engine, and its bus is out of reach; waits for the bus"
    state, effects = fold(state, SnapshotReceived(at_ms=10, epoch=1, seq=0, desired=Desired(committed=V1)))
    assert called(effects) == ["check_source"]


def test_an_engine_that_was_relaunched_while_its_agent_is_cut_off_is_brought_back() -> None:
    launched = replace(SERVING, instance="two", version=0, label="default")
    state, _ = fold(agent(), LEASE)
    state, effects = fold(state, observed(launched))
    assert called(looked(state, effects, launched)[1]) == ["check_source"]


def test_the_label_that_a_sync_waits_for_is_the_trainers_and_its_death_leaves_nothing_paused() -> None:
    pushed = Syncing(2, Pushed("step 2"), None, "abort", phase="prepare")
    state = agent(Desired(committed=V1, sync=pushed), seen=PAUSED)
    state, effects = fold(state, observed(replace(PAUSED, version=None, label="step 2")), LEASE)
    assert called(effects) != [], "it goes back to the committed weights"


def test_a_load_of_ones_own_that_was_not_answered_is_no_other_agents() -> None:
    """The trainer is gone too: the replica goes back to the committed weights, and serves."""
    loading = Desired(committed=V1, sync=Syncing(2, Checkpoint("v2"), None, "abort", phase="prepare"))
    state = agent(loading, seen=PAUSED)
    state, effects = fold(state, command(WeightSync(version=2, phase="load")))
    assert called(effects) == ["load"] and state.activity is not None
    lost = Fault("unanswered", "it broke off")
    state, _ = fold(state, EngineReturned(at_ms=2, call_id=state.activity.call_id, result=lost, observation=PAUSED))
    loaded = replace(PAUSED, version=2, label="2")
    state, effects = fold(state, observed(loaded), LEASE)
    assert called(looked(state, effects, loaded)[1]) == ["check_source"]


@pytest.mark.parametrize(("seen", "expected"), [(OTHERS, []), (SERVING, ["pause"])])
def test_an_agent_that_was_restarted_without_a_bus_compares_with_what_it_last_saw(
    seen: Observation, expected: list[Literal["pause"]]
) -> None:
    settings = MachineSettings(on_lost_bus="pause")
    state, _ = fold(agent(lost="pause"), Started(at_ms=2, identity=PRIMARY, incarnation="b", settings=settings))
    state, effects = fold(state, observed(seen), LEASE)
    assert called(effects) == (["observe"] if expected else [])
    assert not expected or called(looked(state, effects, seen)[1]) == expected


@pytest.mark.parametrize("lost", ["serve", "pause"])
@pytest.mark.parametrize("seen", [OTHERS, PAUSED])
def test_an_agent_that_is_cut_off_looks_at_its_engine_right_before_it_acts(seen: Observation, lost: OnLostBus) -> None:
    """Its successor has just committed, after it last looked."""
    state = agent(Desired(committed=V1, profile=ProfileSession(1, ProfilePlan())), lost)
    state, effects = fold(state, LEASE)
    assert called(effects) == ["observe"]
    state, effects = looked(state, effects, seen)
    assert called(effects) == [] and state.changed_by_others and not in_sync(state)


def test_an_agent_that_is_cut_off_stops_once_another_loads_while_it_acts() -> None:
    state, effects = fold(agent(), command(EngineCommand(operation="pause")))
    state, _, seen = carry_out(state, effects, SERVING)
    state, effects = fold(state, LEASE)
    state, effects = looked(state, effects, seen)
    assert called(effects) == ["resume"] and state.activity is not None
    after = EngineReturned(at_ms=2, call_id=state.activity.call_id, result=Returned(), observation=OTHERS)
    state, effects = fold(state, after)
    assert called(effects) == [] and state.changed_by_others


def test_two_agents_of_one_engine_that_hear_their_buses_do_not_take_turns_for_ever() -> None:
    """Each would bring back what its own run has committed, and both would say that they serve it."""
    state = agent()
    state, effects = fold(state, observed(OTHERS), HEARD)
    state, made, seen = carry_out(state, effects, OTHERS)
    assert [call_name(call) for call in made] == ["check_source", "pause", "load", "flush", "resume"]
    assert in_sync(state)
    again = replace(seen, label="7", version=7)
    state, effects = fold(state, observed(again), HEARD, observed(again), HEARD)
    assert called(effects) == [] and not in_sync(state)
    assert trouble(state) == (
        "something else commands its engine and undoes what this agent does; waits for the next command"
    )
    state, effects = fold(state, command(EngineCommand(operation="flush")))
    assert called(effects)[:1] == ["check_source"], "its trainer is there, and goes on to command it"
