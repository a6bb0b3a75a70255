"""Memory that the trainer's own data plane releases and takes back: the agent neither calls for it nor fights it."""

from typing import Literal

import pytest
from msgspec.structs import replace

from schemas.commands import Checkpoint, Command, EngineCommand, WeightSync
from schemas.desired import Committed, Desired
from schemas.events import (
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    HeadSeen,
    LeaseExpired,
    MachineSettings,
    Observation,
    Observe,
    Returned,
    SnapshotReceived,
    Started,
)
from schemas.outcomes import Acted, ErrorKind, Failed, Skipped
from tests.unit.machines import PRESENT, PRIMARY, START, answers, called, carry_out, command, fold, observed, sync
from workers.link.heartbeat import status_of
from workers.machine.readiness import in_sync, is_ready
from workers.machine.state import AgentState, call_name

V1 = Committed(1, Checkpoint("v1"), None)
SERVING = replace(PRESENT, version=1)
ASLEEP = replace(SERVING, asleep=frozenset({"weights", "kv_cache"}), generating=False)
"""What tiny reports once it sleeps."""
PAUSED_ASLEEP = replace(SERVING, asleep=None, generating=False)
"""What vLLM's server reports once it sleeps: it can't say which memory."""
SETTINGS = MachineSettings(memory="trainer")
HEARD = HeadSeen(at_ms=1, epoch=1, seq=0)


def started(*events: Event, seen: Observation = SERVING, desired: Desired | None = None) -> AgentState:
    state, _ = fold(
        AgentState(),
        Started(at_ms=0, identity=PRIMARY, incarnation="a", settings=SETTINGS),
        EngineObserved(at_ms=0, observation=seen),
        SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=desired or Desired(committed=V1)),
        *events,
    )
    return state


@pytest.mark.parametrize("asleep", [ASLEEP, PAUSED_ASLEEP])
def test_a_replica_whose_memory_the_trainer_has_released_stays_ready_and_is_left_alone(asleep: Observation) -> None:
    state = started()
    assert is_ready(state)
    state, effects = fold(state, observed(asleep))
    assert effects == [] and is_ready(state)
    status = status_of(state)
    assert (status.ready, status.generating, status.asleep) == (True, True, ())
    state, effects = fold(state, observed(SERVING))
    assert effects == [] and is_ready(state)


def test_without_the_flag_the_agent_wakes_what_it_did_not_release() -> None:
    state, _ = fold(
        AgentState(),
        Started(at_ms=0, identity=PRIMARY, incarnation="a"),
        observed(SERVING),
        SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=Desired(committed=V1)),
    )
    state, effects = fold(state, observed(ASLEEP), HEARD)
    assert called(effects) == ["wake"] and not is_ready(state)


@pytest.mark.parametrize("operation", ["sleep", "wake"])
@pytest.mark.parametrize("seen", [SERVING, ASLEEP])
def test_sleep_and_wake_commands_are_refused(operation: Literal["sleep", "wake"], seen: Observation) -> None:
    state = started(observed(seen))
    state, effects = fold(state, command(EngineCommand(operation=operation)))
    (answer,) = answers(effects)
    assert isinstance(answer.outcome, Failed) and answer.rule == 9
    assert answer.outcome.error is ErrorKind.UNSUPPORTED and "memory=trainer" in answer.outcome.message
    assert called(effects) == [] and is_ready(state)


def test_a_pause_that_is_not_the_trainers_sleep_is_undone() -> None:
    state = started()
    state, effects = fold(state, observed(replace(SERVING, generating=False)), HEARD)
    state, made, _ = carry_out(state, effects, replace(SERVING, generating=False))
    assert [call_name(call) for call in made] == ["observe", "resume"] and is_ready(state)


def test_a_sync_goes_on_while_the_trainer_moves_memory() -> None:
    """As verl does: memory is released for the training step, and taken back between prepare and commit."""
    state = started(observed(ASLEEP))
    prepare = WeightSync(phase="prepare", version=2, source=Checkpoint("v2"))
    state, effects = fold(state, command(prepare))
    seen = replace(ASLEEP, asleep=frozenset({"kv_cache"}))
    while state.activity is not None:
        returned = EngineReturned(at_ms=1, call_id=state.activity.call_id, result=Returned(), observation=seen)
        state, more = fold(state, returned)
        effects += more
    assert called(effects) == ["check_source", "pause"]
    state, effects = fold(state, command(WeightSync(phase="load", version=2), 2))
    state, made, _ = carry_out(state, effects, seen)
    assert [call_name(call) for call in made] == ["observe", "load"]
    state, effects = fold(state, command(WeightSync(phase="commit", version=2, source=Checkpoint("v2")), 3))
    state, made, _ = carry_out(state, effects, replace(SERVING, generating=False, version=2))
    assert [call_name(call) for call in made] == ["observe", "flush", "resume"] and is_ready(state)


@pytest.mark.parametrize("operation", ["resume", "flush"])
def test_a_command_that_needs_released_memory_looks_again_first(operation: Literal["resume", "flush"]) -> None:
    """What was last observed may be a second old. A call into memory that is not there kills SGLang."""
    state = started()
    state, effects = fold(state, command(EngineCommand(operation="pause")))
    state, _, _ = carry_out(state, effects, SERVING)
    state, effects = fold(state, observed(ASLEEP), command(EngineCommand(operation=operation), 2))
    assert state.activity is not None and called(effects) == ["observe"]

    def seen(observation: Observation) -> list[Effect]:
        assert state.activity is not None
        returned = EngineReturned(at_ms=1, call_id=state.activity.call_id, result=Returned(), observation=observation)
        return fold(state, returned)[1]

    assert called(seen(replace(SERVING, generating=False))) == [operation]
    effects = seen(ASLEEP)
    (answer,) = answers(effects)
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.WEIGHTS_ASLEEP
    assert "take it back first" in answer.outcome.message and called(effects) == []


def test_nothing_is_called_without_a_command_while_the_memory_is_released() -> None:
    """A late joiner would load into memory that is not there; a lost lease would resume into it."""
    state = started(seen=replace(ASLEEP, version=0))
    assert state.activity is None and not in_sync(state)
    state, effects = fold(state, LeaseExpired(at_ms=2))
    assert called(effects) == []
    snapshot = SnapshotReceived(at_ms=3, epoch=1, seq=1, desired=Desired(committed=V1))
    state, effects = fold(state, snapshot, observed(replace(SERVING, version=0)))
    _, made, _ = carry_out(state, effects, replace(SERVING, version=0))
    assert [call_name(call) for call in made] == ["observe", "check_source", "pause", "load", "flush", "resume"]


def test_a_call_without_a_command_waits_when_the_memory_turns_out_to_be_released() -> None:
    state = started(seen=replace(SERVING, version=0, generating=False))
    assert state.activity is not None and state.activity.calls == (Observe(),)
    state, effects = fold(
        state, EngineReturned(at_ms=1, call_id=state.activity.call_id, result=Returned(), observation=ASLEEP)
    )
    assert effects == [] and state.activity is None and not state.reconcile_blocked and not in_sync(state)


def test_what_the_bus_knows_to_sleep_does_not_keep_such_a_replica_from_serving() -> None:
    state = started(desired=Desired(committed=V1, asleep=frozenset({"weights"})))
    assert is_ready(state)
    state, effects = fold(state, command(EngineCommand(operation="flush")))
    _, made, _ = carry_out(state, effects, SERVING)
    assert [call_name(call) for call in made] == ["observe", "flush"]


def test_a_relaunched_engine_is_still_one_whose_memory_is_the_trainers() -> None:
    state = started(observed(replace(PRESENT, instance="two")))
    state, effects = fold(state, observed(replace(ASLEEP, instance="two")))
    assert "wake" not in called(effects) and state.engine.asleep == frozenset()


def test_a_pause_is_answered_as_before() -> None:
    state = started()
    state, effects = fold(state, command(EngineCommand(operation="pause")))
    state, _, _ = carry_out(state, effects, SERVING)
    assert isinstance(state.answers[-1].outcome, Acted)
    state, effects = fold(state, command(EngineCommand(operation="pause"), 2))
    assert isinstance(answers(effects)[0].outcome, Skipped)


@pytest.mark.parametrize("asks", [EngineCommand(operation="resume"), WeightSync(phase="abort", version=2)])
def test_an_engine_that_cannot_be_read_before_it_resumes_is_called_for_nothing_and_read_again(asks: Command) -> None:
    """It shows no operation either, which is no reason to close the session that is open."""
    stops: Command = sync("prepare", 2) if isinstance(asks, WeightSync) else EngineCommand(operation="pause")
    state, effects = fold(started(), command(START))
    state, _, seen = carry_out(state, effects, SERVING)
    state, effects = fold(state, command(stops, 2))
    state, _, seen = carry_out(state, effects, seen)
    state, effects = fold(state, command(asks, 3))
    assert called(effects) == ["observe"]
    unreadable = Observation(engine="tiny 1", tokenizer="unknown", trouble="it can't be read")
    returned = EngineReturned(at_ms=1, call_id=state.calls_made, result=Returned(), observation=unreadable)
    state, effects = fold(state, returned)
    assert called(effects) == [] and state.engine.session is not None
    if isinstance(asks, EngineCommand):
        (answer,) = answers(effects)
        assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.ENGINE_ERROR
    else:
        state, effects = fold(state, observed(seen))  # once it can be read, no retry is waited for
        carry_out(state, effects, seen)
        assert called(effects) == ["observe", "resume"]
